"""A roofline of one edit step: the operators of a step against this machine's measured peaks.

    OMP_NUM_THREADS=1 python -m bench.roofline [--shape a] [--ratio 0.11] [--runs 9] [--quick]

The step of the shape, pre-packed, runs operator by operator under a dispatch mode that times each
call; before and after each run, the peaks are measured: the largest rate of products of matrices
(with a packed weight, as the step multiplies), and the bandwidth of a copy of memory that no cache
holds. Of each call the least time of all runs counts, of the peaks the largest rate: what disturbs
single runs drops out.

The least time that the peaks allow a call is the longer of FLOPs over the product rate and bytes
over the bandwidth, with the bytes of its tensor arguments and results. What a call takes beyond it
is lost. Operators that read less than their arguments hold, such as a gather, have a bound that is
too high; they are never counted as faster than it. Writes results/roofline.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import maskfx
from bench import masks, shapes
from bench.harness import ROOT, header, write_json
from bench.report import columns
from maskfx import EditStep

PRODUCT = (256, 640, 640)  # rows, features in and out: short enough to run undisturbed
COPIED = 1 << 26  # bytes


@dataclass(frozen=True)
class Call:
    """One call of an operator: its least seconds, FLOPs and bytes."""

    name: str
    seconds: float
    flops: float
    nbytes: float


class CallTimer(TorchDispatchMode):
    """Times each call of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        began = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - began
        packet = func._overloadpacket
        flops = 0.0
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
        elif func.__name__.startswith("_linear_pointwise"):
            flops = 2.0 * args[0].numel() * result.shape[-1]
        tensors = {id(t): t for t in pytree.tree_leaves((args, kwargs, result)) if is_held(t)}
        nbytes = float(sum(t.numel() * t.element_size() for t in tensors.values()))
        if is_view(func.__name__, result, (args, kwargs)):
            nbytes = 0.0  # nothing moves
        self.calls.append(Call(str(packet), seconds, flops, nbytes))
        return result


def is_held(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def is_view(name: str, result: object, given: object) -> bool:
    """Return True if a result has the memory of an argument, and nothing was written into it."""
    if not isinstance(result, Tensor) or name.partition(".")[0].endswith("_"):
        return False
    tensors = [t for t in pytree.tree_leaves((given, result)) if isinstance(t, Tensor)]
    if any(t.is_mkldnn for t in tensors):  # packed weights have no storage that can be read
        return False
    *held, own = (t.untyped_storage().data_ptr() for t in tensors)
    return own in held


def peaks() -> tuple[float, float]:
    """Return FLOP/s of a product of matrices, and bytes per second of a copy."""
    rows, into, out = PRODUCT
    left, weight = torch.randn(rows, into), torch.randn(out, into)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    source = torch.zeros(COPIED // 4)
    target = torch.empty_like(source)
    rates = []
    for work, run in (
        (
            2.0 * rows * into * out,
            lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""),
        ),
        (2.0 * COPIED, lambda: target.copy_(source)),
    ):
        best = float("inf")
        for _ in range(40):
            began = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - began)
        rates.append(work / best)
    return rates[0], rates[1]


def measured_step(options: argparse.Namespace) -> tuple[list[Call], float, float, float]:
    """Return the step's calls, its least seconds without the mode, and the two peaks."""
    shape = shapes.choose(options.shape, options.quick)
    denoiser = maskfx.compile(shape.build(), prepack=True)
    inputs = shape.inputs(0)
    cache = denoiser.record(**inputs)[1]
    grid = masks.make("square", shape.size.height, shape.size.width, options.ratio, 0)
    step = EditStep(inputs, shape.as_mask(grid), cache)
    denoiser.edit([step])
    runs: list[list[Call]] = []
    plain, product, stream = float("inf"), 0.0, 0.0
    for _ in range(options.runs):
        flops, nbytes = peaks()
        product, stream = max(product, flops), max(stream, nbytes)
        began = time.perf_counter()
        denoiser.edit([step])
        plain = min(plain, time.perf_counter() - began)
        with CallTimer() as timer:
            denoiser.edit([step])
        runs.append(timer.calls)
    usual = min(map(len, runs))
    runs = [own for own in runs if len(own) == usual]
    least = [
        Call(same[0].name, min(c.seconds for c in same), same[0].flops, same[0].nbytes)
        for same in zip(*runs, strict=True)
    ]
    return least, plain, product, stream


def rows_of(calls: Sequence[Call], product: float, stream: float) -> list[dict[str, Any]]:
    """Return the figures of each operator, those that lose most first."""
    groups = defaultdict(list)
    for call in calls:
        groups[call.name].append(call)
    total = sum(call.seconds for call in calls)
    rows = []
    for name, own in groups.items():
        seconds = sum(c.seconds for c in own)
        bounds = [max(c.flops / product, c.nbytes / stream) for c in own]
        bound = sum(min(b, c.seconds) for b, c in zip(bounds, own, strict=True))
        flops, nbytes = sum(c.flops for c in own), sum(c.nbytes for c in own)
        rows.append(
            {
                "operator": name,
                "calls": len(own),
                "share": seconds / total,
                "of_product_rate": flops / seconds / product,
                "of_bandwidth": nbytes / seconds / stream,
                "flops_per_byte": flops / nbytes if nbytes else 0.0,
                "of_bound": bound / seconds,
                "lost": (seconds - bound) / total,
            }
        )
    return sorted(rows, key=lambda row: -row["lost"])


def tell(result: dict[str, Any]) -> str:
    heads = ["operator", "calls", "of the step", "of FLOP/s", "of bytes/s", "of its bound", "lost"]
    lines = [heads]
    for row in result["operators"][:14]:
        lines.append(
            [
                row["operator"],
                str(row["calls"]),
                f"{row['share']:.1%}",
                f"{row['of_product_rate']:.0%}",
                f"{row['of_bandwidth']:.0%}",
                f"{row['of_bound']:.0%}",
                f"{row['lost']:.1%}",
            ]
        )
    return columns(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.roofline", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shape", default="a", choices=sorted(shapes.SHAPES))
    parser.add_argument("--ratio", type=float, default=0.11)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small denoiser, in seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        calls, plain, product, stream = measured_step(options)
    inside = sum(call.seconds for call in calls)
    result = {
        **header("bench.roofline", arguments),
        "title": shapes.choose(options.shape, options.quick).title,
        "mask_ratio": options.ratio,
        "load_average": os.getloadavg()[0],
        "peaks": {"flops_per_second": product, "bytes_per_second": stream},
        "step_seconds": plain,
        "in_operators": inside,
        "flops": sum(call.flops for call in calls),
        "of_product_rate": sum(call.flops for call in calls) / plain / product,
        "operators": rows_of(calls, product, stream),
    }
    name = "roofline" + ("-quick" if options.quick else "")
    write_json(options.out / f"{name}.json", result)
    print(tell(result))
    print(f"the step: {result['of_product_rate']:.0%} of the product rate")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
