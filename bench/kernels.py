"""The operators that have kernels, one by one: whether they are right, and how fast they are.

Each is compared with its plain implementation in fp32 and timed against it, in the dtype of the
device. The share of the roofline is the time that the bytes or the FLOPs need at least, by the
device's own peaks, over the time measured. Sizes are those of edits of real denoisers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bench.harness import Figure, count_flops, figure
from maskfx import ops
from maskfx.ops.base import plain_of
from maskfx.runtime.cache.quantize import Format, Packed, pack

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
LAUNCHES = 10  # per sample, so that the host's part is hidden behind the device's


@dataclass(frozen=True)
class Case:
    """One operator with its arguments.

    Args:
        name: What is computed, and its sizes.
        operator: The operator's name.
        arguments: Its arguments.
        moved: The bytes that it reads and writes at least.
    """

    name: str
    operator: str
    arguments: tuple[Any, ...]
    moved: int


class Sizes:
    """Makes arguments on a device; `small` divides all numbers of rows and features."""

    def __init__(self, device: torch.device, dtype: torch.dtype, small: bool) -> None:
        self.device, self.dtype, self.by = device, dtype, 16 if small else 1
        self.generator = torch.Generator(device).manual_seed(0)

    def rows(self, number: int) -> int:
        return max(2, number // self.by)

    def width(self, number: int) -> int:
        return max(16, number // self.by)

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        found = torch.randn(*shape, generator=self.generator, device=self.device)
        return found.to(dtype or self.dtype)

    def index(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), generator=self.generator, device=self.device)


def spans(*requests: Sequence[int]) -> Tensor:
    """Spans of rows that lie segment by segment."""
    out = [[0] * (2 * len(requests[0])) for _ in requests]
    at = 0
    for segment in range(len(requests[0])):
        for request, counts in enumerate(requests):
            out[request][2 * segment : 2 * segment + 2] = [at, at + counts[segment]]
            at += counts[segment]
    return torch.tensor(out)


def nbytes(*values: Any) -> int:
    return sum(v.nbytes for v in pytree.tree_leaves(values) if isinstance(v, Tensor))


def cases(make: Sizes) -> list[Case]:
    return [*products(make), *attentions(make), *pointwise(make), *row_copies(make)]


def products(make: Sizes) -> list[Case]:
    found = []
    for number, channels in ((3277, 320), (820, 1280)):
        rows, width = make.rows(number), make.width(channels)
        values, halo = make.values(rows, width), make.values(rows // 4, width)
        table = make.index(rows * 9, rows + len(halo) + 1).view(rows, 9)
        weight = make.values(width, 9 * width) / (3 * width**0.5)
        own = (values, halo, table, weight, make.values(width), "silu")
        moved = nbytes(own) + values.nbytes
        found.append(Case(f"window {rows} x 9 x {width}", "window_product", own, moved))
    rows, width, rank = make.rows(1332), make.width(3072), 16
    base, values = make.values(4 * rows, width), make.values(4 * rows, width)
    down, up = (make.values(4 * rank, width) / width**0.5 for _ in range(2))
    groups = torch.tensor([[i * rows, (i + 1) * rows, i * rank, (i + 1) * rank] for i in range(4)])
    low = (base, values, down, up, groups)
    moved = nbytes(low) + base.nbytes
    return [*found, Case(f"low rank 4 x {rows} x {width}", "add_low_rank", low, moved)]


def attentions(make: Sizes) -> list[Case]:
    found = []
    heads, depth = make.width(24), 128 if make.by == 1 else 16
    text, image, rest = make.rows(512), make.rows(820), make.rows(3276)
    q, k, v = (make.values(2 * (text + image), heads, depth) for _ in range(3))
    cached = [make.values(2 * rest, heads, depth) for _ in range(2)]
    where = spans((text, image), (text, image))
    left = torch.tensor([[0, rest], [rest, 2 * rest]])
    layout = (where, where, left, None, 1, False, None)
    name = f"2 requests, {text} + {image} of {rest + image + text} keys, {heads} x {depth}"
    own = (q, k, v, *cached, *layout)
    found.append(Case(f"attention, {name}", "attend", own, nbytes(own) + q.nbytes))
    for format in (Format.INT8, Format.INT4):
        packed = [pack(rows[None], format) for rows in cached]
        pairs: list[Tensor] = []
        for rows in packed:
            assert isinstance(rows, Packed)
            assert rows.scale is not None
            pairs += [rows.stored[0], rows.scale[0]]
        given = (q, k, v, *pairs, *layout)
        moved = nbytes(given) + q.nbytes
        found.append(Case(f"attention, {format.value}, {name}", "attend_packed", given, moved))
    rows, heads, depth = make.rows(1024), make.width(10), 64 if make.by == 1 else 16
    q, k, v = (make.values(4 * rows, heads, depth) for _ in range(3))
    where = spans(*[(rows,)] * 4)
    none = torch.zeros(4, 2, dtype=torch.long)
    own = (q, k, v, q[:0], q[:0], where, where, none, None, 1, False, None)
    name = f"attention, 4 requests of {rows}, {heads} x {depth}"
    return [*found, Case(name, "attend", own, nbytes(own) + q.nbytes)]


def pointwise(make: Sizes) -> list[Case]:
    rows, width = make.rows(3277), make.width(320)
    values, where = make.values(rows, width), spans((rows // 2,), (rows - rows // 2,))
    owner = torch.arange(2, device=make.device).repeat_interleave(
        torch.tensor([rows // 2, rows - rows // 2], device=make.device)
    )
    groups = 32 if width % 32 == 0 else 4
    rest = make.values(2, groups, 3, dtype=torch.float32).abs() + 1
    affine = make.values(width), make.values(width)
    scales = make.values(2, 2, width, dtype=torch.float32)
    wide = make.values(rows, make.width(5120) * 2)
    deep, base = (make.values(rows, make.width(3072)) for _ in range(2))
    scale, shift = (make.values(2, deep.shape[1]) for _ in range(2))
    size = f"{rows} x {width}"
    return [
        Case(f"moments {size}", "group_scale", (values, rest, where, groups, *affine, 1e-5),
             values.nbytes),
        Case(f"norm {size}", "norm_activation", (values, scales, owner, "silu"),
             2 * values.nbytes),
        Case(f"gated {rows} x {wide.shape[1]}", "gated", (wide, "gelu", False, 1),
             wide.nbytes * 3 // 2),
        Case(f"modulation {rows} x {deep.shape[1]}", "modulate", (deep, scale, shift, owner),
             2 * deep.nbytes),
        Case(f"gate {rows} x {deep.shape[1]}", "add_gated", (base, deep, scale, owner),
             3 * deep.nbytes),
    ]  # fmt: skip


def row_copies(make: Sizes) -> list[Case]:
    rows, width = make.rows(3277), make.width(320)
    values, halo = make.values(rows, width), make.values(rows // 4, width)
    table = make.index(rows * 9, rows + len(halo) + 1).view(rows, 9)
    picked = make.index(rows, rows + len(halo))
    target = make.values(4 * rows, width)
    places = torch.randperm(4 * rows, generator=make.generator, device=make.device)[:rows]
    return [
        Case(f"windows {rows} x 9 x {width}", "gather", (values, halo, table),
             nbytes(values, halo, table) + 9 * values.nbytes),
        Case(f"rows of two sources {rows} x {width}", "enter", (values, halo, picked),
             2 * values.nbytes + picked.nbytes),
        Case(f"written rows {rows} x {width}", "put_rows", (target, places, values),
             2 * values.nbytes + places.nbytes),
    ]  # fmt: skip


def measure(
    device: torch.device, dtype: torch.dtype, rounds: int, small: bool, peak: float
) -> dict[str, Any]:
    """Check and time all operators.

    Args:
        device: The device.
        dtype: The dtype of rows.
        rounds: The number of samples of each time.
        small: Whether to use sizes that a CPU computes in a moment.
        peak: The FLOPs per second of a large product on this device.
    """
    stream = peak_bytes(device, small)
    out: dict[str, Any] = {
        "kernels": ops.has_kernels(device),
        "peak_tflops": peak / 1e12,
        "peak_gbytes": stream / 1e9,
        "cases": {},
    }
    for case in cases(Sizes(device, dtype, small)):
        out["cases"][case.name] = one(case, device, dtype, rounds, peak, stream)
    found = out["cases"].values()
    worst = max(case["error"] for case in found)
    return {**out, "error": worst, "correct": all(case["correct"] for case in found)}


def one(
    case: Case, device: torch.device, dtype: torch.dtype, rounds: int, peak: float, stream: float
) -> dict[str, Any]:
    operator = getattr(torch.ops.maskfx, case.operator).default
    plain, own = plain_of(case.operator), case.arguments
    error = error_of(case, operator, plain)
    flops = count_flops(lambda: operator(*own))["total"]
    least = {"bytes": case.moved / stream, "flops": flops / peak}
    seconds = {
        "operator": device_seconds(lambda: operator(*own), device, rounds),
        "plain": device_seconds(lambda: plain(*own), device, rounds),
    }
    bound = max(least, key=least.__getitem__)
    return {
        "error": error,
        "correct": error < LIMITS[dtype],
        "bytes": case.moved,
        "flops": flops,
        "seconds": seconds,
        "times": seconds["plain"]["median"] / seconds["operator"]["median"],
        "bound": bound,
        "of_roofline": least[bound] / seconds["operator"]["median"],
    }


def error_of(case: Case, operator: Callable[..., Any], plain: Callable[..., Any]) -> float:
    """Return the relative error against the plain implementation in fp32."""

    def wide(value: Any) -> Any:
        is_wide = not isinstance(value, Tensor) or not value.is_floating_point()
        return value if is_wide or case.operator == "attend_packed" else value.float()

    own, exact = case.arguments, tuple(map(wide, case.arguments))
    if case.operator == "attend_packed":  # scales stay as they are stored
        exact = (*(value.float() for value in own[:3]), *own[3:])
    if case.operator == "put_rows":
        found, wanted = own[0].clone(), exact[0].clone()
        operator(found, *own[1:])
        plain(wanted, *exact[1:])
    else:
        found, wanted = operator(*own), plain(*exact)
    return float((found.float() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def device_seconds(run: Callable[[], Any], device: torch.device, rounds: int) -> Figure:
    """Return the seconds of one call, without the host's part where the device has its own."""
    run()
    samples = []
    for _ in range(rounds):
        if device.type != "cuda":
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(LAUNCHES):
            run()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last) / 1e3 / LAUNCHES)
    return figure(samples)


def peak_bytes(device: torch.device, small: bool) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.zeros(1 << (22 if small else 29), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source), device, 5)["min"]
