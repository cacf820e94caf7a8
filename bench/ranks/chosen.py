"""What ranks gain where patches are chosen while a step runs (`order="stretch"`).

    OMP_NUM_THREADS=1 python -m bench.ranks.chosen
    OMP_NUM_THREADS=1 python -m bench.ranks.chosen --side 32 --rounds 4

Ranks add up, before each stretch of blocks that is compared, how far its input changed, decide
alike, and make their tables then. Sides, in turn, each with rows of its own and half of the
patches, drawn anew for each step: chosen while the step runs, in this process and over two ranks;
the same patches given before the step, in this process; given before it, over two ranks, which make
all tables anew; and over two ranks with patches that stay, whose tables are kept. The stretches
compute the same patches, or each its own. SD3's class, 4 blocks of width 512. Writes
ranks-chosen.json to bench/results
(ranks-chosen-SIDE.json for another latent). With fewer idle cores than ranks, the ratios mean
little.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maskfx
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.ranks.__main__ import SIDE
from bench.ranks.drawn import Drawn
from bench.ranks.shapes import shape_of
from bench.report import columns
from bench.shapes import Shape
from maskfx import EditStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.rank_group import RankGroup
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.patches import PatchGrid

PATCH, KEPT, POOL = 8, 0.5, 1 << 32
HALVES = Partition(((1.0, 1.0),), (True,))
CHOSEN, GIVEN = "chosen in the step, one process", "given before it, one process"
TOGETHER = "chosen in the step, two ranks"
FRESH, AGAIN = "given before it, two ranks", "the same with known tables"
SIDES = CHOSEN, TOGETHER, GIVEN, FRESH, AGAIN
BY_RUNNING, OVER_RANKS = (CHOSEN, TOGETHER), (TOGETHER, FRESH, AGAIN)


class Bed:
    """A denoiser with stretches, and a request's rows for each side."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.side = shape, shape.size.height
        self.denoiser = maskfx.compile(shape.build(), stretches=True)
        kept = self.denoiser.record(**shape.inputs(0))[1]
        program = self.denoiser.programs[kept.program]
        grid = PatchGrid(tuple(self.denoiser.mask_shape(shape.inputs(0))), PATCH)
        self.caches: dict[str, RollingCache] = {
            name: RollingPool(POOL).start(
                program, kept, patches=grid, since_read=name in BY_RUNNING
            )
            for name in SIDES
        }

    @property
    def stretches(self) -> int:
        return len(self.denoiser.stretches)

    def drawn(self, seed: int, alike: bool) -> list[Tensor]:
        """Return a mask for each stretch."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for _ in range(1 if alike else self.stretches):
            order = torch.randperm((self.side // PATCH) ** 2, generator=generator)
            patches = order < len(order) * KEPT
            squares = patches.view(self.side // PATCH, -1)
            found.append(squares.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1))
        return found * self.stretches if alike else found

    def step(self, name: str, number: int, masks: Sequence[Tensor], alike: bool) -> EditStep:
        inputs, cache = self.shape.inputs(100 + number), self.caches[name]
        if name in BY_RUNNING:
            choice = Drawn(list(map(Mask, masks)), alike)
            every = torch.ones_like(masks[0])
            return EditStep(inputs, every, cache, any_step=True, record=True, choice=choice)
        wide: Mapping[int, Tensor] = dict(enumerate(masks[:-1], 1))
        return EditStep(inputs, masks[-1], cache, any_step=True, wide=wide, record=True)


def row_of(bed: Bed, group: RankGroup, alike: bool, rounds: int) -> dict[str, Any]:
    split = group.on(2, HALVES, "gathered")
    stay = bed.drawn(0, alike)

    def run(name: str, number: int) -> None:
        masks = stay if name == AGAIN else bed.drawn(1 + number, alike)
        step = bed.step(name, number, masks, alike)
        bed.denoiser.step([step], split if name in OVER_RANKS else None)

    sides = {name: lambda n, name=name: run(name, n) for name in bed.caches}
    times = {name: took[1:] for name, took in alternate(sides, rounds + 1).items()}
    return {
        "sets": "alike" if alike else "each",
        "stretches": bed.stretches,
        "seconds": {name: figure(took) for name, took in times.items()},
        "times faster, chosen in the step": ratio(times[CHOSEN], times[TOGETHER]),
        "times faster, given before it": ratio(times[GIVEN], times[FRESH]),
    }


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    bed = Bed(shape)
    group = RankGroup(bed.denoiser, 2)
    try:
        rows = [row_of(bed, group, alike, rounds) for alike in (True, False)]
        assert group.computed_here == group.failures == 0, "a step ran in this process"
        return {"costs": asdict(group.costs), "rows": rows}
    finally:
        group.stop()


def table(rows: Sequence[dict[str, Any]]) -> str:
    faster = "times faster, chosen in the step", "times faster, given before it"
    lines = [["sets", "stretches", *(f"ms {name}" for name in SIDES), *faster]]
    for row in rows:
        ms = [f"{1000 * row['seconds'][name]['median']:.0f}" for name in SIDES]
        ratios = [f"{row[name]['median']:.2f}" for name in faster]
        lines.append([row["sets"], str(row["stretches"]), *ms, *ratios])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.chosen", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--side", type=int, default=SIDE, help="of the latent")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    result = header("bench.ranks.chosen", given)
    shape = shape_of("sd3", options.side)
    result["shape"] = shape.title
    result |= measure(shape, options.rounds)
    print(shape.title, table(result["rows"]), sep="\n")
    last = f"-{options.side}" if options.side != SIDE else ""
    write_json(options.out / f"ranks-chosen{last}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
