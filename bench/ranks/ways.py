"""The ways of attentions that ranks choose, beside each fixed way: a dense step and an edit.

    OMP_NUM_THREADS=1 python -m bench.ranks.ways --shape flux --side 32
    OMP_NUM_THREADS=1 python -m bench.ranks.ways --shape sdxl --side 32

Two ranks, each with half of the sites, in turn: keys gathered, keys by rank (edits alone have
cached keys), heads divided, and what is predicted to be the quickest for each attention;
`attentions` counts the ways that were chosen. Writes ranks-ways-SHAPE.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.ranks.__main__ import SHARE, centre
from bench.ranks.shapes import SHAPES, shape_of
from bench.report import columns
from bench.shapes import Shape
from maskfx import DenseStep, EditStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.rank_group import RankGroup
from maskfx.ir.programs.head_sources import WAYS, AttentionWays

CHOSEN = "chosen"


def measure(shape: Shape, share: float, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    denoiser = maskfx.compile(shape.build())
    cache = denoiser.record(**shape.inputs(0))[1]
    mask = shape.as_mask(centre(shape.size.height, share))
    batches: dict[str, list[Any]] = {
        "dense": [DenseStep(shape.inputs(1))],
        "edit": [EditStep(shape.inputs(1), mask, cache, any_step=True)],
    }
    group = RankGroup(denoiser, 2)
    try:
        rows = [row_of(group, shape, name, steps, rounds) for name, steps in batches.items()]
        assert group.computed_here == group.failures == 0, "a step ran in this process"
        return {"costs": asdict(group.costs), "rows": rows}
    finally:
        group.stop()


def row_of(
    group: RankGroup, shape: Shape, name: str, steps: list[Any], rounds: int
) -> dict[str, Any]:
    found: list[Any] = []
    group.denoiser.step(steps, lambda *given: found.append(given))
    [(program, _, frame, _, members)] = found
    halves = Partition(((1.0, 1.0),), (not shape.has_convolutions,))
    group.denoiser.step(steps, group.on(2, halves))  # starts and measures
    counts = group.divider.exchange_counts(program)
    sides: dict[str, AttentionWays] = {
        way: way for way in WAYS if way in counts and (name == "edit" or way != "keys by rank")
    }
    sides[CHOSEN] = group.divider.attention_ways(program, frame, members, halves, group.costs)
    own = {n: group.on(2, halves, way) for n, way in sides.items()}
    runs = {n: lambda _, n=n: group.denoiser.step(steps, own[n]) for n in sides}
    times = {n: took[1:] for n, took in alternate(runs, rounds + 1).items()}
    chosen = sides[CHOSEN]
    ways = {chosen: "all"} if isinstance(chosen, str) else dict(Counter(w for _, w in chosen))
    return {
        "batch": name,
        "attentions": ways,
        "seconds": {n: figure(took) for n, took in times.items()},
        "times faster than it": {
            n: ratio(took, times[CHOSEN]) for n, took in times.items() if n != CHOSEN
        },
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["batch", "way", "ms", "chosen, times faster", ""]]
    for row in rows:
        for name, took in row["seconds"].items():
            faster = row["times faster than it"].get(name)
            last = str(row["attentions"]) if faster is None else ""
            times = "" if faster is None else f"{faster['median']:.2f}"
            lines.append([row["batch"], name, f"{1000 * took['median']:.0f}", times, last])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.ways", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="flux")
    parser.add_argument("--side", type=int, default=64, help="of the latent")
    parser.add_argument("--share", type=float, default=SHARE, help="of sites that are masked")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    result = header("bench.ranks.ways", given)
    shape = shape_of(options.shape, options.side)
    result["shape"] = shape.title
    result |= measure(shape, options.share, options.rounds)
    print(shape.title, result["costs"], table(result["rows"]), sep="\n")
    write_json(options.out / f"ranks-ways-{options.shape}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
