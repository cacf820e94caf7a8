"""The planner's gain over FlashPS's Algorithm 1 and its strawmen, and how long planning takes.

    python -m bench.planner

Nothing runs on a device here: times come from formulas, and they are predictions. FLOPs over an
assumed rate, bytes over a bandwidth, and a fixed time per block. Writes planner.json and
planner.png to bench/results.

Choices per block: `all` computes every site; `output` is the paper's: it reads the full stream and
loads the rest's output; `input` loads the rest's inputs and projects its keys and values again;
`keys` loads those. Convolution blocks have `rows` instead of the last two: they load a halo.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import ROOT, header, write_json
from bench.report import columns
from maskfx.runtime.planner import baselines
from maskfx.runtime.planner.plan import QUICK, WIDTHS, plan
from maskfx.runtime.planner.timeline import NOW, Block, Choice, Start, Timeline, simulate

RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5)
BANDWIDTHS = (6e9, 12e9, 25e9, 50e9)
BATCHES = (1, 8)
STEPS = 4  # the first from a cold start; later ones find the load stream ahead
BYTES = 2  # bf16


@dataclass(frozen=True)
class Device:
    """What the formulas assume."""

    flops_per_second: float = 4e14
    fixed_seconds: float = 3e-5
    buffer_bytes: float = 2.0**29  # for each member of the batch


DEVICE = Device()


def attention_block(
    ratio: float, sites: int, text: int, width: int, dense: float, joint: bool, pending: float
) -> tuple[Choice, ...]:
    """One transformer block of one member.

    dense: multiply-adds per site and width^2 outside attention; the keys' and values' are two of
    them. joint: the text's tokens run along. pending: bytes of skips that a full block needs later.
    """
    along = text if joint else 0
    rest, active = (1 - ratio) * sites, ratio * sites + along
    every = sites + along
    rows = rest * width * BYTES

    def seconds(queries: float, projected: float) -> float:
        """Two FLOPs a multiply-add; attention's two products over every key."""
        linear = 2 * width**2 * ((dense - 2) * queries + 2 * projected)
        products = 4 * queries * (every + (0 if joint else text)) * width
        return (linear + products) / DEVICE.flops_per_second

    whole = {"needs_full": True, "leaves_full": True, "extra_bytes": rows + pending}
    return (
        Choice("all", compute_seconds=seconds(every, every), **whole),  # type: ignore[arg-type]
        Choice("output", rows, 0.0, seconds(active, every), **whole),  # type: ignore[arg-type]
        Choice("input", rows, 0.0, seconds(active, every)),
        Choice("keys", 2 * rows, 0.0, seconds(active, active)),
    )


def resnet_block(
    ratio: float, sites: int, before: int, width: int, pending: float
) -> tuple[Choice, ...]:
    """Two 3x3 convolutions of one member. The halo is the ring around a square mask."""
    full = 2 * 9 * sites * (before * width + width**2) / DEVICE.flops_per_second
    ring = 4 * math.sqrt(ratio * sites) * (before + width) * BYTES
    rest = (1 - ratio) * sites * BYTES
    extra = rest * before + pending
    return (
        Choice("all", 0, 0, full, needs_full=True, leaves_full=True, extra_bytes=extra),
        Choice("output", rest * width, 0, full * ratio, True, True, extra_bytes=extra),
        Choice("rows", ring, 0, full * ratio),
    )


def flux_like(ratio: float) -> list[tuple[Choice, ...]]:
    """19 double and 38 single blocks, 1024 x 1024: 12 width^2 a site in both, 512 text tokens."""
    return [attention_block(ratio, 4096, 512, 3072, 12, True, 0.0)] * 57


def unet_like(ratio: float) -> list[tuple[Choice, ...]]:
    """SDXL's shape at 1024 x 1024: three levels, 17 residual and 70 transformer blocks.

    A transformer block has 18 width^2 a site (self-attention 4, cross-attention 2, gated MLP 12).
    """
    levels = ((128**2, 320, 0), (64**2, 640, 2), (32**2, 1280, 10))
    blocks: list[tuple[Choice, ...]] = []
    skips = [(levels[0][0], 320)]
    before = 320

    def add(level: int, into: int) -> None:
        sites, width, depth = levels[level]
        pending = sum((1 - ratio) * s * w * BYTES for s, w in skips)
        blocks.append(resnet_block(ratio, sites, into, width, pending))
        blocks.extend([attention_block(ratio, sites, 77, width, 18, False, pending)] * depth)

    for level, (sites, width, _) in enumerate(levels):
        for _ in range(2):
            add(level, before)
            before = width
            skips.append((sites, width))
        if level < 2:
            skips.append((sites // 4, width))
    add(2, before)
    pending = sum((1 - ratio) * s * w * BYTES for s, w in skips)
    blocks.append(resnet_block(ratio, levels[2][0], 1280, 1280, pending))
    for level in (2, 1, 0):
        for _ in range(3):
            into = before + skips.pop()[1]
            add(level, into)
            before = levels[level][1]
    return blocks


SHAPES: dict[str, Callable[[float], list[tuple[Choice, ...]]]] = {
    "flux-like": flux_like,
    "unet-like": unet_like,
}


def make_step(shape: str, ratios: Sequence[float], bandwidth: float) -> list[Block]:
    """The blocks of one step for a batch of masks."""
    members = [SHAPES[shape](ratio) for ratio in ratios]
    blocks = []
    for number, menus in enumerate(zip(*members, strict=True)):
        over = tuple(tuple(choice.over(bandwidth) for choice in menu) for menu in menus)
        blocks.append(Block(over, DEVICE.fixed_seconds, begins_step=number == 0))
    return blocks


def masks_of(ratio: float, batch: int) -> list[float]:
    """Members' masks from half to one and a half times the ratio."""
    return [ratio] if batch == 1 else [ratio * (0.5 + i / (batch - 1)) for i in range(batch)]


# One step after another


Decide = Callable[[list[Block], Start], Timeline]


def buffer_of(blocks: Sequence[Block]) -> float:
    return DEVICE.buffer_bytes * len(blocks[0].members)


def algorithm_1(blocks: list[Block], start: Start) -> Timeline:
    picked = baselines.greedy(blocks, "output", "all", start)
    return simulate(blocks, picked, buffer_of(blocks), start)


def ours(blocks: list[Block], start: Start) -> Timeline:
    return plan(blocks, buffer_of(blocks), start, widths=QUICK).timeline


SIDES: dict[str, Decide] = {
    "no cache": lambda blocks, start: baselines.compute_all(blocks, "all", start),
    "naive": lambda blocks, start: baselines.naive(blocks, "output", buffer_of(blocks), start),
    "strawman": lambda blocks, start: baselines.strawman(
        blocks, "output", buffer_of(blocks), start
    ),
    "Algorithm 1": algorithm_1,
    "ours": ours,
}


def seconds_per_step(blocks: list[Block], decide: Decide, carried: bool) -> dict[str, float]:
    """The first step, and the mean of those after it, each started where the last one ended."""
    start, ends = NOW, []
    for _ in range(STEPS):
        timeline = decide(blocks, start)
        ends.append(timeline.end)
        start = timeline.carry() if carried else NOW
    return {"first": ends[0], "later": statistics.mean(ends[1:])}


def sweep() -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        for batch in BATCHES:
            for bandwidth in BANDWIDTHS:
                for ratio in RATIOS:
                    blocks = make_step(shape, masks_of(ratio, batch), bandwidth)
                    ends = {
                        name: seconds_per_step(blocks, decide, name != "naive")
                        for name, decide in SIDES.items()
                    }
                    first = plan(blocks, buffer_of(blocks), widths=QUICK)
                    rows.append(
                        {
                            "shape": shape,
                            "batch": batch,
                            "bandwidth": bandwidth,
                            "ratio": ratio,
                            "seconds": ends,
                            "proved_gap": (first.end - first.bound) / first.end,
                        }
                    )
    return rows


def gain_table(rows: list[dict[str, Any]]) -> str:
    """Times faster than each other side, steps after the first."""
    others = [name for name in SIDES if name != "ours"]
    lines = [["shape", "batch", "GB/s", "m", "ms", *others, "gap to bound (first step)"]]
    for row in rows:
        mine = row["seconds"]["ours"]["later"]
        line = [row["shape"], str(row["batch"]), f"{row['bandwidth'] / 1e9:g}", f"{row['ratio']:g}"]
        line += [f"{1e3 * mine:.2f}"]
        line += [f"{row['seconds'][name]['later'] / mine:.3f}" for name in others]
        lines.append([*line, f"{row['proved_gap']:.1e}"])
    return columns(lines)


# How long planning takes


@dataclass(frozen=True)
class Case:
    """60 blocks of 4 choices; `noise` tells the blocks' costs apart. `later`: not a batch's first
    step, so that the load stream is ahead."""

    batch: int
    alike: bool
    noise: float
    bandwidth: float
    later: bool = False

    @property
    def name(self) -> str:
        return "1" if self.batch == 1 else f"{self.batch} {'alike' if self.alike else 'different'}"

    def blocks(self) -> list[Block]:
        pick = random.Random(0)
        masks = [0.15 if self.alike else pick.uniform(0.03, 0.5) for _ in range(self.batch)]
        blocks = []
        for _ in range(60):
            menus = []
            for mask in masks:
                menu = attention_block(mask, 4096, 512, 3072, 12, True, 0.0)
                factor = 1 + self.noise * pick.random()
                rows = [c.over(self.bandwidth) for c in menu]
                slower = [replace(c, compute_seconds=c.compute_seconds * factor) for c in rows]
                menus.append(tuple(slower))
            blocks.append(Block(tuple(menus), DEVICE.fixed_seconds))
        return blocks

    def start(self, blocks: list[Block]) -> Start:
        return ours(blocks, NOW).carry() if self.later else NOW


def quick_cases() -> list[Case]:
    """What a serving loop meets: every balance of the two streams."""
    batches = [(1, True), (8, True), (8, False)]
    return [
        Case(batch, alike, noise, bandwidth, later)
        for batch, alike in batches
        for noise in (0.0, 0.1)
        for bandwidth in BANDWIDTHS
        for later in (False, True)
    ]


def seconds_of(
    make: Callable[[], list[Block]], start: Start, rounds: int, **how: Any
) -> dict[str, float]:
    """Median and least CPU seconds of plan(); `make` is not timed.

    As long as on a clock if the machine does nothing else: plan() is one thread that never waits.
    """
    samples = []
    for _ in range(rounds):
        blocks = make()
        began = time.process_time()
        plan(blocks, buffer_of(blocks), start, **how)
        samples.append(time.process_time() - began)
    return {"median": statistics.median(samples), "least": min(samples)}


def quick_times(rounds: int) -> list[dict[str, Any]]:
    """Plans without a search: of blocks planned before, and of new ones."""
    rows = []
    for case in quick_cases():
        blocks = case.blocks()
        start = case.start(blocks)
        found = plan(blocks, buffer_of(blocks), start, widths=QUICK)
        rows.append(
            {
                **asdict(case),
                "batch": case.name,
                "seconds": seconds_of(lambda: blocks, start, rounds, widths=QUICK),  # noqa: B023
                "seconds_new": seconds_of(case.blocks, start, rounds, widths=QUICK),
                "end": found.end,
                "proved_gap": (found.end - found.bound) / found.end,
                "algorithm_1": algorithm_1(blocks, start).end,
            }
        )
    return rows


def quick_table(rows: list[dict[str, Any]]) -> str:
    """CPU milliseconds: over the cases the median and the worst of the rounds' median and least."""

    def spread(values: list[float], spelled: str) -> list[str]:
        return [format(statistics.median(values), spelled), format(max(values), spelled)]

    heads = ["known", "worst", "least", "worst", "new", "worst", "least", "worst"]
    lines = [["batch", "cases", *heads, "gap", "worst", "Algorithm 1"]]
    for name in dict.fromkeys(row["batch"] for row in rows):
        chosen = [row for row in rows if row["batch"] == name]
        line = [name, str(len(chosen))]
        for blocks in ("seconds", "seconds_new"):
            for kind in ("median", "least"):
                line += spread([1e3 * row[blocks][kind] for row in chosen], ".2f")
        line += spread([row["proved_gap"] for row in chosen], ".2%")
        least = min(row["algorithm_1"] / row["end"] for row in chosen)
        lines.append([*line, f"{least:.3f} or more"])
    return columns(lines)


def proof_times(rounds: int) -> list[dict[str, Any]]:
    """What more search costs and proves, at 25 GB/s."""
    rows = []
    for batch, alike in ((1, True), (8, True), (8, False)):
        for noise in (0.0, 0.1):
            case = Case(batch, alike, noise, 25e9)
            blocks = case.blocks()
            efforts = {"no search": QUICK, "one pass": WIDTHS[:1], "two passes": WIDTHS[:2]}
            for effort, widths in (efforts | ({"exact": WIDTHS} if batch == 1 else {})).items():
                found = plan(blocks, buffer_of(blocks), widths=widths)
                rows.append(
                    {
                        "batch": case.name,
                        "noise": noise,
                        "effort": effort,
                        "seconds": seconds_of(lambda: blocks, NOW, rounds, widths=widths),  # noqa: B023
                        "end": found.end,
                        "proved_gap": (found.end - found.bound) / found.end,
                        "optimal": found.optimal,
                    }
                )
    return rows


def proof_table(rows: list[dict[str, Any]]) -> str:
    lines = [["batch", "blocks differ", "effort", "plan ms", "end ms", "proved within"]]
    for row in rows:
        proved = "optimal" if row["optimal"] else f"{row['proved_gap']:.1e}"
        lines.append(
            [
                row["batch"],
                "yes" if row["noise"] else "no",
                row["effort"],
                f"{1e3 * row['seconds']['median']:.1f}",
                f"{1e3 * row['end']:.3f}",
                proved,
            ]
        )
    return columns(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="timings of plan() per case")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    from bench.planner.picture import draw

    result = header("bench.planner", arguments)
    result["kind"] = "predictions from formulas; only the CPU times of plan() are measured"
    result["assumed"] = asdict(DEVICE)
    rows = sweep()
    quick, proof = quick_times(options.rounds), proof_times(options.rounds)
    print(gain_table(rows), quick_table(quick), proof_table(proof), sep="\n\n")
    every = {**result, "gains": rows, "quick": quick, "proof": proof}
    write_json(options.out / "planner.json", every)
    draw(options.out / "planner.png")
    return 0
