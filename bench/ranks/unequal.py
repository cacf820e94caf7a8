"""One step of edits with unequal masks on two ranks: members dealt by predicted cost.

    OMP_NUM_THREADS=1 python -m bench.ranks.unequal

Edits of 5, 10, 20 and 40 % of the sites are one batch, of SD3's class with 4 blocks of width 512.
Sides, in turn: one rank; two ranks by the division that the group predicts to be the quickest; two
ranks that get two members each, in the order of the batch. Per side: seconds of a step, seconds
that each rank computed, and how much longer the slower rank computed than the mean. Writes
ranks-unequal.json to bench/results. With fewer idle cores than ranks, the ratios mean nothing.
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
from bench.ranks.__main__ import SEEDS, centre
from bench.ranks.shapes import SHAPES, shape_of
from bench.report import columns
from maskfx import EditStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.rank_group import RankGroup

SHARES = (0.05, 0.1, 0.2, 0.4)
IN_ORDER = Partition(((1.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.0, 1.0)))
ALONE, PREDICTED, ORDERED = "one rank", "two, by predicted cost", "two, in order"


def measure(group: RankGroup, steps: Sequence[EditStep], rounds: int) -> list[dict[str, Any]]:
    sides = {ALONE: group.on(1), PREDICTED: group.on(2), ORDERED: group.on(2, IN_ORDER, "gathered")}
    parts: dict[str, list[list[float]]] = {name: [] for name in sides}

    def run(name: str) -> None:
        group.denoiser.step(steps, sides[name])
        parts[name].append([part.seconds for part in group.last if part is not None])

    found = alternate({name: lambda _, n=name: run(n) for name in sides}, rounds + 2)
    seconds = {name: own[2:] for name, own in found.items()}  # the first ones teach the costs
    return [
        {
            "side": name,
            "seconds": figure(own),
            "times_faster": ratio(seconds[ALONE], own),
            "computing": parts[name][2:],
            "slower_rank_over_mean": figure(
                [max(each) * len(each) / sum(each) for each in parts[name][2:]]
            ),
        }
        for name, own in seconds.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["side", "ms", "times faster", "slower rank over mean"]]
    for row in rows:
        ms = f"{1000 * row['seconds']['median']:.0f}"
        faster = f"{row['times_faster']['median']:.2f}"
        lines.append([row["side"], ms, faster, f"{row['slower_rank_over_mean']['median']:.2f}"])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.unequal", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shape", choices=SHAPES, default="sd3")
    parser.add_argument("--side", type=int, default=64, help="of the latent, 192 at most")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    result = header("bench.ranks.unequal", given)
    shape = shape_of(options.shape, options.side, None)
    denoiser = maskfx.compile(shape.build())
    cache = denoiser.record(**shape.inputs(SEEDS[0]))[1]
    steps = [
        EditStep(shape.inputs(n * SEEDS[1]), shape.as_mask(centre(shape.size.height, share)), cache)
        for n, share in enumerate(SHARES, 1)
    ]
    group = RankGroup(denoiser, 2)
    try:
        rows = measure(group, steps, options.rounds)
        assert group.computed_here == group.failures == 0, "a step ran in this process"
    finally:
        group.stop()
    result |= {"shape": shape.title, "masked": SHARES, "sides": rows}
    print(shape.title, table(rows), sep="\n")
    write_json(options.out / "ranks-unequal.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
