"""Products of few rows on a CPU: maskfx's C function against PyTorch's, plain and packed.

    python -m bench.few_rows [--threads 1 2] [--rounds 3] [--quick]

Each shape has enough weights that none is in a cache when its turn comes, as in a step of a real
denoiser. All sides run in this process, one after another over all weights, in alternating order;
figures are medians of single products. `own` reads weights as they are stored, `torch` too
(`F.linear`), `packed` in the layout of the CPU's matrix library (`prepack=True`). Errors are
relative, against double precision. Writes few-rows.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import ROOT, figure, header, write_json
from bench.report import columns
from maskfx import ops
from maskfx.ops.native.build import wide_functions

BYTES = 300_000_000  # of the weights of a shape
MOST = 40  # weights


@dataclass(frozen=True)
class Shape:
    """A product: rows times a weight of (outputs, depth)."""

    rows: int
    depth: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.depth} x {self.outputs}"


SHAPES = (
    Shape(9, 5760, 640),
    Shape(16, 5760, 640),
    Shape(16, 640, 640),
    Shape(36, 5760, 640),
    Shape(36, 640, 640),
    Shape(36, 640, 5120),
    Shape(48, 3072, 12288),
    Shape(64, 2880, 320),
    Shape(121, 2880, 320),
    Shape(121, 320, 2560),
)


def measure(shape: Shape, threads: int, rounds: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    count = max(2, min(MOST, BYTES // (4 * shape.depth * shape.outputs)))
    weights = [
        torch.randn(shape.outputs, shape.depth, generator=draw) / shape.depth**0.5
        for _ in range(count)
    ]
    rows = torch.randn(shape.rows, shape.depth, generator=draw)
    bias = torch.randn(shape.outputs, generator=draw)
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 256) for weight in weights]
    sides: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]] = {
        "own": (lambda w: ops.few_rows_linear(rows, w, bias), weights),
        "torch": (lambda w: F.linear(rows, w, bias), weights),
        "packed": (
            lambda w: torch.ops.mkldnn._linear_pointwise(rows, w, bias, "none", [], ""),
            packed,
        ),
    }
    wanted = F.linear(rows.double(), weights[0].double(), bias.double())
    errors = {
        name: ((run(own[0]) - wanted).norm() / wanted.norm()).item()
        for name, (run, own) in sides.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds):
        names = list(sides) if index % 2 == 0 else list(sides)[::-1]
        for name in names:
            run, own = sides[name]
            for weight in own:
                began = time.perf_counter()
                run(weight)
                seconds[name].append(time.perf_counter() - began)
    taken = {name: figure(own) for name, own in seconds.items()}
    flops = 2 * shape.rows * shape.depth * shape.outputs
    return {
        **asdict(shape),
        "threads": threads,
        "served": wide_functions() is not None,
        "weights": count,
        "seconds": taken,
        "times_faster": {
            name: taken[name]["median"] / taken["own"]["median"] for name in ("torch", "packed")
        },
        "flops_per_second": {name: flops / own["median"] for name, own in taken.items()},
        "errors": errors,
    }


def tell(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["threads", "rows x depth x outputs", "GFLOP/s", "torch's", "packed", "times torch's"]]
    lines[0].append("times packed")
    for row in rows:
        shape = Shape(row["rows"], row["depth"], row["outputs"])
        rates = (f"{row['flops_per_second'][n] / 1e9:.0f}" for n in ("own", "torch", "packed"))
        times = (f"{row['times_faster'][n]:.2f}" for n in ("torch", "packed"))
        lines.append([str(row["threads"]), str(shape), *rates, *times])
    return columns(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.few_rows", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one shape")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    shapes, rows = SHAPES[2:3] if options.quick else SHAPES, []
    for threads in options.threads:
        torch.set_num_threads(threads)
        rows += [measure(shape, threads, options.rounds) for shape in shapes]
    print(tell(rows))
    about = header("bench.few_rows", arguments)
    write_json(options.out / "few-rows.json", {**about, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
