"""The three ways in which ranks attend, over 2, 3 and 4 ranks: bytes, exchanges and seconds.

    OMP_NUM_THREADS=1 python -m bench.ranks.heads
    OMP_NUM_THREADS=1 python -m bench.ranks.heads --shape sdxl --rounds 2

Each rank attends to gathered keys and values, to its share of the cached keys, or with its share
of the heads. Per batch (a dense member, an edit of 20 % of the sites), number of ranks and way:
the bytes that all ranks send; those of theory for keys and values, or for queries, keys, values
and results of divided heads, without border rows, moments and what cached keys add; exchanges;
seconds of a step, with the ways in turn; and the way that is chosen. With fewer
idle cores than ranks, the seconds compare ways of one number of ranks at best. Writes
ranks-heads-SHAPE.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import maskfx
from bench.harness import ROOT, alternate, figure, header, write_json
from bench.ranks.__main__ import centre
from bench.ranks.shapes import SHAPES, shape_of
from bench.report import columns
from bench.shapes import Shape
from maskfx import DenseStep, EditStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.step_costs import Exchanges
from maskfx.distributed.rank_group import RankGroup
from maskfx.ir.programs.head_sources import WAYS, AttentionWay
from maskfx.runtime.batch.member import Member

RANKS, SHARE = (2, 3, 4), 0.2


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    denoiser = maskfx.compile(shape.build())
    cache = denoiser.record(**shape.inputs(0))[1]
    mask = shape.as_mask(centre(shape.size.height, SHARE))
    inputs = shape.inputs(40)
    batches: dict[str, list[Any]] = {
        "dense": [DenseStep(inputs)],
        "edit": [EditStep(inputs, mask, cache)],
    }
    group = RankGroup(denoiser, max(RANKS))
    try:
        rows = [
            row
            for name, steps in batches.items()
            for ranks in RANKS
            for row in rows_of(group, shape, name, steps, ranks, rounds)
        ]
        assert group.computed_here == group.failures == 0, "a step ran in this process"
        return {"costs": asdict(group.costs), "rows": rows}
    finally:
        group.stop()


def rows_of(
    group: RankGroup, shape: Shape, name: str, steps: list[Any], ranks: int, rounds: int
) -> list[dict[str, Any]]:
    found: list[Any] = []
    group.denoiser.step(steps, lambda *given: found.append(given))
    [(program, _, frame, _, members)] = found
    partition = Partition(((1.0,) * ranks,), (not shape.has_convolutions,))
    group.denoiser.step(steps, group.on(ranks, partition))  # starts and measures
    chosen = group.divider.attention_ways(program, frame, members, partition, group.costs)
    mixed = set(WAYS) if isinstance(chosen, tuple) else {chosen}  # not all attentions alike
    counts = group.divider.exchange_counts(program)
    ways: list[AttentionWay] = [way for way in WAYS if way in counts]
    if name == "dense":
        ways.remove("keys by rank")  # there are no cached keys
    sent: dict[str, list[int]] = {}

    def run(way: AttentionWay) -> None:
        group.denoiser.step(steps, group.on(ranks, partition, way))
        sent[way] = [part.sent for part in group.last if part is not None]

    times = alternate({way: lambda _, way=way: run(way) for way in ways}, rounds + 1)
    exchanges = group.divider.exchanges(program, members[0])
    return [
        {
            "batch": name,
            "ranks": ranks,
            "way": way,
            "seconds": figure(times[way][1:]),
            "chosen": way in mixed,
            "exchanges": counts[way],
            "sent": sent[way],
            "theory": theory(exchanges, members[0], ranks, way),
        }
        for way in ways
    ]


def theory(exchanges: Exchanges, member: Member, ranks: int, way: AttentionWay) -> float:
    """Return the bytes that all ranks send, for L rows of equal shares and keys of d numbers.

    Keys and values: 2 (n - 1) L/n d of each rank. Divided heads: 4 (n - 1)/n L/n d.
    """
    total = 0.0
    for segments, width in exchanges.whole:  # of a row's key and value
        rows = sum(map(member.sites.active_count, segments)) * member.batch
        total += (ranks - 1) * rows * width * (2 / ranks if way == "heads" else 1)
    return total


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["batch", "ranks", "way", "KiB sent", "theory", "exchanges", "ms", ""]]
    for row in rows:
        kib = [f"{number / 1024:.0f}" for number in (sum(row["sent"]), row["theory"])]
        ms = f"{1000 * row['seconds']['median']:.0f}"
        chosen = "chosen" if row["chosen"] else ""
        lines.append(
            [row["batch"], str(row["ranks"]), row["way"], *kib, str(row["exchanges"]), ms, chosen]
        )
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.heads", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="sd3")
    parser.add_argument("--side", type=int, default=64, help="of the latent")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    result = header("bench.ranks.heads", given)
    shape = shape_of(options.shape, options.side)
    result["shape"] = shape.title
    result |= measure(shape, options.rounds)
    print(shape.title, result["costs"], table(result["rows"]), sep="\n")
    write_json(options.out / f"ranks-heads-{options.shape}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
