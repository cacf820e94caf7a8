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
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import ROOT, header, write_json
from bench.planner.picture import draw
from bench.planner.steps import DEVICE, SHAPES, attention_block, buffer_of, make_step
from bench.report import columns
from maskfx.runtime.planner import baselines
from maskfx.runtime.planner.plan import QUICK, WIDTHS, plan
from maskfx.runtime.planner.timeline import NOW, BlockTimes, Start, Timeline, simulate

RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5)
BANDWIDTHS = (6e9, 12e9, 25e9, 50e9)
BATCHES = (1, 8)
STEPS = 4  # the first from a cold start; later ones find the load stream ahead


def masks_of(ratio: float, batch: int) -> list[float]:
    """Members' masks from half to one and a half times the ratio."""
    return [ratio] if batch == 1 else [ratio * (0.5 + i / (batch - 1)) for i in range(batch)]


# One step after another


Decide = Callable[[list[BlockTimes], Start], Timeline]


def algorithm_1(blocks: list[BlockTimes], start: Start) -> Timeline:
    picked = baselines.greedy(blocks, "output", "all", start)
    return simulate(blocks, picked, buffer_of(blocks), start)


def ours(blocks: list[BlockTimes], start: Start) -> Timeline:
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


def seconds_per_step(blocks: list[BlockTimes], decide: Decide, carried: bool) -> dict[str, float]:
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
    """60 blocks of 4 choices; `noise` distinguishes the blocks' costs. `later`: not a batch's first
    step, so that the load stream is ahead."""

    batch: int
    alike: bool
    noise: float
    bandwidth: float
    later: bool = False

    @property
    def name(self) -> str:
        return "1" if self.batch == 1 else f"{self.batch} {'alike' if self.alike else 'different'}"

    def blocks(self) -> list[BlockTimes]:
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
            blocks.append(BlockTimes(tuple(menus), DEVICE.fixed_seconds))
        return blocks

    def start(self, blocks: list[BlockTimes]) -> Start:
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
    make: Callable[[], list[BlockTimes]], start: Start, rounds: int, **how: Any
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
    parser = argparse.ArgumentParser(
        prog="bench.planner", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="timings of plan() per case")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)

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
