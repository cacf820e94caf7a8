"""Where the time of a rank's part of an edit goes, beside the whole edit: seconds by operator.

    OMP_NUM_THREADS=1 python -m bench.ranks.parts --shape sdxl

One process computes in turn the whole edit, and the part of the first of two ranks, whose exchanges
are answered at once, with zeros: so nothing is waited for, and no other rank uses the memory. What
isn't halved there limits what ranks gain: products of few rows take as long as to read the weights.
The rest of the loss that `bench.ranks` measures is that of exchanges, and of two processes that
share caches and memory. The profiler's own time is in the figures. Writes
ranks-parts-SHAPE.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import maskfx
from bench.harness import ROOT, figure, header, write_json
from bench.ranks.__main__ import centre
from bench.ranks.shapes import SHAPES, shape_of
from bench.report import columns
from bench.shapes import Shape
from maskfx import EditStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.rank_step import RankPrograms
from maskfx.ir.programs.head_sources import WAYS, AttentionWay

# by what the names of operators contain; the first that fits counts
KINDS = {
    "products": ("addmm", "::mm", "bmm", "linear", "matmul"),
    "convolutions": ("convolution",),
    "attention": ("scaled_dot_product", "flash"),
    "copies": ("index", "copy", "cat", "clone", "gather", "stack", "contiguous", "split"),
    "moments": ("var_mean", "mean", "sum", "norm"),
}
REST = "numbers alone, and the rest"


class Nobody:
    """Other ranks that send zeros at once."""

    rank = 0

    def exchange(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> None:
        for value in incoming.values():
            value.zero_()


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(p in name for p in parts)), REST)


def measure(shape: Shape, way: AttentionWay, share: float, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    denoiser = maskfx.compile(shape.build())
    cache = denoiser.record(**shape.inputs(1))[1]
    mask = shape.as_mask(centre(shape.size.height, share))
    edit = EditStep(shape.inputs(2), mask, cache, any_step=True)
    found: list[tuple[Any, ...]] = []
    denoiser.step([edit], lambda *given: found.append(given))
    program, _, frame, _, members = found[0]
    programs = RankPrograms(denoiser.settings)
    sides = {
        "whole edit": (Partition(((1.0,),)), "gathered"),
        "half of it": (Partition(((1.0, 1.0),)), way),
    }
    taken: dict[str, list[Counter[str]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, (partition, own) in sides.items():
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                given = program, False, frame, members, partition, Nobody(), own
                programs.run(*given)
            if number:  # the first makes tables
                seconds: Counter[str] = Counter()
                for event in profiler.key_averages():
                    seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
                taken[name].append(seconds)
    return {
        name: {
            **{kind: figure([one[kind] for one in runs]) for kind in (*KINDS, REST)},
            "all": figure([sum(one.values()) for one in runs]),
        }
        for name, runs in taken.items()
    }


def table(found: dict[str, Any]) -> str:
    whole, half = found.values()
    lines = [["operators", "whole, ms", "half, ms", "whole / half"]]
    for kind, one in whole.items():
        pair = [1000 * each["median"] for each in (one, half[kind])]
        ratio = f"{pair[0] / pair[1]:.2f}" if pair[1] else ""
        lines.append([kind, *(f"{ms:.1f}" for ms in pair), ratio])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="sdxl")
    parser.add_argument("--side", type=int, default=64, help="of the latent")
    parser.add_argument("--blocks", type=int, help="of the transformer, or its deepest level")
    parser.add_argument("--share", type=float, default=0.11, help="of sites that are masked")
    parser.add_argument("--way", choices=WAYS, default="keys by rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    shape = shape_of(asked.shape, asked.side, asked.blocks)
    result = header("bench.ranks.parts", given)
    result["shape"], result["way"] = shape.title, asked.way
    result["sides"] = measure(shape, asked.way, asked.share, asked.rounds)
    write_json(asked.out / f"ranks-parts-{asked.shape}.json", result)
    print(shape.title, table(result["sides"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
