"""Attention of edits on a CPU: maskfx's C function against PyTorch's kernels, shape by shape.

    python -m bench.cpu_attention [--threads 1 2] [--rounds 15] [--quick]

Two requests (the branches of guidance) whose queries are the active sites of an edit; keys are
fresh ones of these sites and cached ones of all others. Both sides run in this process, in
alternating order: `own` is the operator as graphs call it, `torch` its plain implementation, which
attends to fresh and cached keys apart and merges the results, or copies the keys together where
that takes less. Errors are relative, against the plain implementation in float64. Writes
cpu-attention.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import ROOT, alternate, figure, header, ratio, write_json
from bench.report import columns
from maskfx import ops
from maskfx.ops.base import plain_of
from maskfx.ops.native.attention import serving

REQUESTS = 2


@dataclass(frozen=True)
class Shape:
    """Attention of one layer."""

    layer: str
    queries: int
    fresh: int
    cached: int
    heads: int
    depth: int


SHAPES = (
    Shape("SD1.5 at half width, 64x64 sites, 11 % masked", 441, 441, 3655, 8, 20),
    Shape("the same, text", 441, 77, 0, 8, 20),
    Shape("the same, 32x32 sites", 121, 121, 903, 8, 40),
    Shape("the same, 8x8 sites", 16, 16, 48, 8, 80),
    Shape("SD1.5, 64x64 sites, 11 % masked", 441, 441, 3655, 8, 40),
    Shape("SDXL, 32x32 sites, 11 % masked", 121, 121, 903, 10, 64),
    Shape("Flux, 32x32 tokens and 77 of text, 11 % masked", 198, 198, 903, 4, 128),
    Shape("all of 32x32 sites", 1024, 1024, 0, 8, 64),
)


def given(shape: Shape, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the rows and the spans of an operator's call."""
    draw = torch.Generator().manual_seed(0)
    counts = (shape.queries, shape.fresh, shape.fresh, shape.cached, shape.cached)
    rows = tuple(
        torch.randn(REQUESTS * n, shape.heads, shape.depth, generator=draw).to(dtype)
        for n in counts
    )
    spans = (spans_of(n) for n in (shape.queries, shape.fresh, shape.cached))
    return rows, tuple(spans)


def spans_of(count: int) -> Tensor:
    return torch.tensor([[number * count, (number + 1) * count] for number in range(REQUESTS)])


def measure(shape: Shape, threads: int, rounds: int) -> dict[str, Any]:
    rows, spans = given(shape, torch.float32)
    more = (*spans, None, 1, False, None)
    plain = plain_of("attend")
    wanted = plain(*given(shape, torch.float64)[0], *more)
    sides: dict[str, Callable[[int], Tensor]] = {
        "own": lambda _: ops.attend(*rows, *more),
        "torch": lambda _: plain(*rows, *more),
    }
    errors = {
        name: ((run(0) - wanted).norm() / wanted.norm()).item() for name, run in sides.items()
    }
    seconds = alternate(sides, rounds)
    keys = shape.fresh + shape.cached
    flops = 4 * REQUESTS * shape.queries * keys * shape.heads * shape.depth
    return {
        **asdict(shape),
        "threads": threads,
        "served": serving(rows, spans) is not None,
        "seconds": {name: figure(own) for name, own in seconds.items()},
        "times_faster": ratio(seconds["torch"], seconds["own"]),
        "flops_per_second": {n: flops / figure(own)["median"] for n, own in seconds.items()},
        "errors": errors,
    }


def tell(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["threads", "layer", "own ms", "torch ms", "times faster", "GFLOP/s", "torch's"]]
    for row in rows:
        faster, rates = row["times_faster"], row["flops_per_second"]
        lines.append(
            [
                str(row["threads"]),
                row["layer"],
                *(f"{1e3 * row['seconds'][name]['median']:.2f}" for name in ("own", "torch")),
                f"{faster['median']:.2f} ({faster['min']:.2f}-{faster['max']:.2f})",
                *(f"{rates[name] / 1e9:.0f}" for name in ("own", "torch")),
            ]
        )
    return columns(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.cpu_attention", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one shape")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for shape in SHAPES[3:4] if options.quick else SHAPES:
            rows.append(measure(shape, threads, options.rounds))
    print(tell(rows))
    about = header("bench.cpu_attention", arguments)
    write_json(options.out / "cpu-attention.json", {**about, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
