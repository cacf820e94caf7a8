"""Templates on a slow disk: what is read of them is planned per block, ahead of the step.

    python -m bench.planner.disk [--shape c] [--blocks 2 4] [--links 1 0.25] [--steps 6] [--quick]

Each side edits the same steps of a template, one after another, in one process and alternating, in
every round as a process that just started does: nothing of the template is in memory, its entries
are opened in the background; the costs, and the FLOPs of the graph, are known. The disk is the real
store with reads held to a bandwidth: 1 is that at which a step's keys and values take as long to
read as the step computes with all rows at hand.

- `resident`: all rows are at hand.
- `planned`: a plan chooses per block what is read: keys and values, what they are made of, or
  nothing, where the block is computed whole.
- `loaded`: the same without blocks that are computed whole.
- `keys`: keys and values are read ahead, without a plan.
- `whole`: whole steps are read ahead by two threads.
- `naive`: keys and values are read when a step begins, and computed after.
- `dense`: the module computes all sites and reads nothing; it sees other values outside the mask.

Other processes of the machine are left out of the figures, as far as Linux states how long the
computing thread was ready and didn't run (`schedstat`): the disk's seconds are stretched as that
thread is at the moment, and a side's seconds are those that the thread ran, plus those that it was
blocked, shortened by the side's own stretch.

The denoiser has its real width and, to end within minutes, fewer blocks (`--blocks`).

Wanted: planned within 1.1 of resident. Writes results/planner-disk.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench import masks, shapes
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.report import columns
from bench.shapes import Shape
from maskfx import CompiledDenoiser, EditStep, Templates
from maskfx.runtime.cache.stores.filesystem import Disk
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.planner.step_planner import StepPlanner
from maskfx.runtime.steps import DenseStep

WANTED = 1.1  # times resident
HOST = 1 << 33
SIDES = ("planned", "loaded", "keys", "whole", "naive", "dense")  # each against resident
USUAL = ("planned", "loaded", "keys", "naive")


class Pace:
    """How other processes stretch this thread: from what it ran, and waited for a core."""

    def __init__(self) -> None:
        self._path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._recent: deque[tuple[float, float]] = deque([self.now()], maxlen=64)

    def now(self) -> tuple[float, float]:
        """Return the seconds that the thread has run, and those that it waited for a core."""
        if not self._path.exists():
            return time.process_time(), 0.0
        ran, waited, _ = self._path.read_text().split()
        return 1e-9 * int(ran), 1e-9 * int(waited)

    def stretch(self) -> float:
        """Return the recent seconds per second that the thread ran."""
        found = self.now()
        if found[0] - self._recent[-1][0] > 0.01:
            self._recent.append(found)
        return stretch_of(self._recent[0], self._recent[-1])

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of a call without what other processes take."""
        began, before = time.perf_counter(), self.now()
        run()
        took, after = time.perf_counter() - began, self.now()
        ran, waited = (b - a for a, b in zip(before, after, strict=True))
        return ran + max(0.0, took - ran - waited) / stretch_of(before, after)


def stretch_of(before: tuple[float, float], after: tuple[float, float]) -> float:
    ran, waited = (b - a for a, b in zip(before, after, strict=True))
    return 1 + waited / ran if ran > 0 else 1.0


@dataclass
class SlowDisk(Disk):
    """A disk whose reads share a bandwidth, in bytes per second at the pace of a thread."""

    pace: Pace
    bandwidth: float = float("inf")
    nbytes: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def read(self, file: int, into: memoryview) -> int:
        with self._turn:
            began = time.perf_counter()
            return self._held(super().read(file, into), began)

    def read_at(self, file: int, into: memoryview, offset: int) -> int:
        with self._turn:
            began = time.perf_counter()
            return self._held(super().read_at(file, into, offset), began)

    def _held(self, count: int, began: float) -> int:
        self.nbytes += count
        left = began + count * self.pace.stretch() / self.bandwidth - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return count


@dataclass
class Bed:
    """A denoiser, a template of some steps on disk, and the same with all rows at hand."""

    shape: Shape
    denoiser: CompiledDenoiser
    disk: SlowDisk
    root: Path
    inputs: list[dict[str, Any]]
    mask: torch.Tensor
    resident: Templates
    costs: Costs | None = None

    def planner(self) -> StepPlanner:
        return StepPlanner(self.denoiser, self.costs)

    def calibrate(self) -> None:
        """Measure the costs, as the first edit of a process does that finds none on disk."""
        planner = StepPlanner(self.denoiser)
        planner.plan_step([edit_of(self.resident, self.inputs, self.mask, 0)])
        [self.costs] = planner.known._found.values()
        assert self.costs is not None, planner.describe()


def prepare(options: argparse.Namespace, root: Path) -> Bed:
    torch.manual_seed(0)
    shape = shallow(shapes.choose(options.shape, options.quick), options.blocks)
    denoiser = maskfx.compile(
        shape.build().eval(), plans=True, prepack=True, loader=maskfx.Loader()
    )
    disk = SlowDisk(Pace())
    resident = Templates(denoiser, Tiers(Store(root, disk=disk), host_bytes=HOST))
    inputs = [shape.inputs(step) for step in range(options.steps)]
    for step, one in enumerate(inputs):
        resident.put("picture", step, denoiser.record(**one)[1])
    grid = masks.make("square", shape.size.height, shape.size.width, options.ratio, 0)
    mask = shape.as_mask(grid)
    return Bed(shape, denoiser, disk, root, inputs, mask, resident)


def shallow(shape: Shape, blocks: Sequence[int]) -> Shape:
    """The same with fewer blocks, if it is a transformer of two kinds of blocks."""
    if "num_single_layers" not in shape.config:
        return shape
    joint, single = blocks
    config = {**shape.config, "num_layers": joint, "num_single_layers": single}
    return replace(shape, config=config, title=f"{shape.title}, of which {joint} + {single} run")


def edit_of(
    templates: Templates,
    inputs: Sequence[dict[str, Any]],
    mask: torch.Tensor,
    step: int,
    whole: bool = True,
) -> EditStep:
    found = templates.edit("picture", step, inputs[step], mask)
    assert found is not None, "recorded before"
    return found if whole else replace(found, cache=replace(found.cache, given=[]))


def run_side(bed: Bed, side: str) -> StepPlanner:
    """Edit all steps as a process does that has just started."""
    count, denoiser = len(bed.inputs), bed.denoiser
    planner = bed.planner()
    if side == "dense":
        for inputs in bed.inputs:
            denoiser.plain_step(DenseStep(inputs))
        return planner
    denoiser.planner = None if side == "whole" else planner
    templates = bed.resident
    if side != "resident":
        templates = Templates(denoiser, Tiers(Store(bed.root, disk=bed.disk), host_bytes=HOST))
        if side != "naive":
            templates.prefetch("picture", range(count))
    plans, whole = side in ("resident", "planned", "loaded"), side != "loaded"
    upcoming = None
    for number in range(count):
        now = upcoming or edit_of(templates, bed.inputs, bed.mask, number, whole)
        [now] = planner.plan_step([now]) if plans else [now]  # type: ignore[list-item]
        loads = denoiser.ahead([now], only=True)
        if side == "naive":
            for loading in loads:
                loading.wait()
        elif number + 1 < count:
            following = edit_of(templates, bed.inputs, bed.mask, number + 1, whole)
            upcoming = following
            denoiser.ahead(planner.plan_ahead([following]) if plans else [following])
        if side == "naive":
            upcoming = None
        denoiser.step([now])
    denoiser.ahead([], only=True)
    return planner


def measure_link(bed: Bed, share: float, options: argparse.Namespace) -> dict[str, Any]:
    """One bandwidth; the even one is measured here, as the machine's speed varies."""
    rounds, sides = options.rounds, ["resident", *options.sides]
    bed.calibrate()
    nbytes, compute = even_link(bed, rounds)
    bandwidth = share * nbytes / compute
    bed.disk.bandwidth = bandwidth
    read, told, again, whole = {}, "", (0, 0), (0, 0)
    for side in sides:  # not counted
        before = bed.disk.nbytes
        planner = run_side(bed, side)
        read[side] = (bed.disk.nbytes - before) / len(bed.inputs)
        if side == "planned":
            told, again, whole = planner.describe(), planner.again, planner.whole
    clocked: dict[str, list[float]] = {side: [] for side in sides}
    ran: dict[str, list[float]] = {side: [] for side in sides}

    def timed(side: str) -> None:
        before, _ = bed.disk.pace.now()
        clocked[side].append(bed.disk.pace.seconds(lambda: run_side(bed, side)))
        ran[side].append(bed.disk.pace.now()[0] - before)

    alternate({side: lambda _, side=side: timed(side) for side in sides}, rounds)
    seconds = clocked
    bed.disk.bandwidth = float("inf")
    return {
        "of_even": share,
        "bytes_per_second": bandwidth,
        "even": {"bytes_per_step": nbytes, "compute_seconds_per_step": compute},
        "load_average": os.getloadavg()[0],
        "bytes_read_per_step": read,
        "projected_again": again[0] / max(again[1], 1),
        "computed_whole": whole[0] / max(whole[1], 1),
        "planner": told,
        "seconds": {side: figure(taken) for side, taken in seconds.items()},
        "computing_thread_ran": {side: figure(taken) for side, taken in ran.items()},
        "over_resident": {
            side: ratio(seconds[side], seconds["resident"]) for side in options.sides
        },
    }


def even_link(bed: Bed, rounds: int) -> tuple[float, float]:
    """Bytes that a step reads for keys and values, and seconds that it computes."""
    run_side(bed, "resident")
    times = [bed.disk.pace.seconds(lambda: run_side(bed, "resident")) for _ in range(rounds)]
    taken = figure(times)["median"] / len(bed.inputs)
    before = bed.disk.nbytes
    run_side(bed, "keys")
    return (bed.disk.nbytes - before) / len(bed.inputs), taken


def run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as root:
        bed = prepare(options, Path(root))
        links = [measure_link(bed, share, options) for share in options.links]
    return {
        **header("bench.planner.disk", arguments),
        "title": bed.shape.title,
        "note": "the disk is a real store whose reads are held to a bandwidth by sleeping",
        "mask_ratio": options.ratio,
        "steps": options.steps,
        "rounds": options.rounds,
        "links": links,
        "wanted": f"planned within {WANTED} of resident where reads take as long as compute",
        "met": all(
            link["over_resident"]["planned"]["median"] <= WANTED
            for link in links
            if link["of_even"] == 1.0
        ),
    }


def tell(result: dict[str, Any]) -> str:
    sides = list(result["links"][0]["over_resident"])
    rows = [["of even", "MB/s", *sides, "projected again", "whole", "MB a step, planned"]]
    for link in result["links"]:
        read = link["bytes_read_per_step"]
        rows.append(
            [
                f"{link['of_even']:g}",
                f"{link['bytes_per_second'] / 1e6:.0f}",
                *(f"{link['over_resident'][side]['median']:.2f}" for side in sides),
                f"{link['projected_again']:.0%}",
                f"{link['computed_whole']:.0%}",
                f"{read['planned'] / 1e6:.1f}",
            ]
        )
    return columns(rows) + ("\nmet" if result["met"] else "\nMISSED")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.planner.disk", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shape", default="c", choices=sorted(shapes.SHAPES))
    parser.add_argument(
        "--links", type=float, nargs="+", default=[1.0, 0.25], help="of the even one"
    )
    parser.add_argument("--sides", nargs="+", default=USUAL, choices=SIDES)
    parser.add_argument("--blocks", type=int, nargs=2, default=[2, 4], help="joint and single ones")
    parser.add_argument("--ratio", type=float, default=0.11)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of compute; loads have their own")
    parser.add_argument("--quick", action="store_true", help="a small denoiser, in seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    result = run(options, arguments)
    name = "planner-disk" + ("" if options.shape == "c" else f"-{options.shape}")
    write_json(options.out / f"{name}{'-quick' if options.quick else ''}.json", result)
    print(tell(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
