"""A step of two ranks whose border rows travel with moments, against one that sends both apart.

    OMP_NUM_THREADS=1 python -m bench.ranks.joined
    OMP_NUM_THREADS=1 python -m bench.ranks.joined --backend gloo

A UNet's window after a norm reads border rows of other ranks, and the norm their moments: in one
message, or in two. Per batch (a dense member, an edit of 11 % of the sites): exchanges of a step,
bytes that both ranks send, seconds, and CPU time of both ranks, both sides in turn. Writes
ranks-joined-SHAPE.json to bench/results (with -gloo for gloo). With fewer idle cores than ranks,
the ratios of seconds mean little.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.ranks.__main__ import SEEDS, SHARE, SIDE, batch_of, centre
from bench.ranks.shapes import SHAPES, shape_of
from bench.report import columns
from bench.shapes import Shape
from maskfx import DenseStep, EditStep
from maskfx.compiler.rank_twins import SplitProgram, split_program
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.exchanges.world import RINGS
from maskfx.distributed.rank_group import RankGroup
from maskfx.distributed.ranks import Ranks

SIDES = {"apart": False, "joined": True}
HALVES = Partition(((1.0, 1.0),))


def measure(shape: Shape, rounds: int, backend: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    denoiser = maskfx.compile(shape.build())
    cache = denoiser.record(**shape.inputs(SEEDS[0]))[1]
    mask = shape.as_mask(centre(shape.size.height, SHARE))
    inputs = shape.inputs(SEEDS[1])
    batches: dict[str, list[Any]] = {
        "dense": [DenseStep(inputs)],
        "edit": [EditStep(inputs, mask, cache)],
    }
    group = RankGroup(denoiser, Ranks(2, backend=backend))
    try:
        rows = [row_of(group, name, steps, rounds) for name, steps in batches.items()]
        assert group.computed_here == group.failures == 0, "a step ran in this process"
    finally:
        group.stop()
    return rows


def row_of(group: RankGroup, name: str, steps: list[Any], rounds: int) -> dict[str, Any]:
    sent: dict[str, list[int]] = {}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}

    def run(side: str) -> None:
        group.joined = SIDES[side]
        group.denoiser.step(steps, group.on(2, HALVES, "gathered"))
        parts = [part for part in group.last if part is not None]
        sent[side] = [part.sent for part in parts]
        cpu[side].append(sum(part.cpu for part in parts))

    times = alternate({side: lambda _, side=side: run(side) for side in SIDES}, rounds + 1)
    times = {side: taken[1:] for side, taken in times.items()}
    program, _ = batch_of(group.denoiser, steps)
    row: dict[str, Any] = {
        "batch": name,
        "ratio": ratio(times["apart"], times["joined"]),
        "ratio of CPU time": ratio(cpu["apart"][1:], cpu["joined"][1:]),
    }
    for side, joined in SIDES.items():
        split = split_program(program, joined=joined)
        assert isinstance(split, SplitProgram)
        row[side] = {
            "seconds": figure(times[side]),
            "cpu": figure(cpu[side][1:]),
            "exchanges": len(split.exchanges),
            "sent": sent[side],
        }
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        ["batch", "moments", "exchanges", "KiB sent", "ms", "times faster", "ms of CPU", "less"]
    ]
    for row in rows:
        for side in SIDES:
            found = row[side]
            ms = f"{1000 * found['seconds']['median']:.0f}"
            joined = side == "joined"
            faster = f"{row['ratio']['median']:.3f}" if joined else ""
            less = f"{row['ratio of CPU time']['median']:.3f}" if joined else ""
            cpu = f"{1000 * found['cpu']['median']:.0f}"
            kib = f"{sum(found['sent']) / 1024:.0f}"
            exchanges = str(found["exchanges"])
            lines.append([row["batch"], side, exchanges, kib, ms, faster, cpu, less])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.joined", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shape", choices=SHAPES, default="sdxl")
    parser.add_argument("--side", type=int, default=SIDE, help="of the latent")
    parser.add_argument("--backend", choices=(RINGS, "gloo"), default=RINGS)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    result = header("bench.ranks.joined", given)
    shape = shape_of(options.shape, options.side)
    result["shape"] = shape.title
    result["rows"] = measure(shape, options.rounds, options.backend)
    print(shape.title, table(result["rows"]), sep="\n")
    last = "-gloo" if options.backend == "gloo" else ""
    write_json(options.out / f"ranks-joined-{options.shape}{last}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
