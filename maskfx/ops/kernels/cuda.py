"""The implementations that operators choose on CUDA: a kernel where it serves, else the plain one.

A call is served by a kernel if Triton is installed, kernels aren't switched off, and dtypes and
sizes are among those that the kernel knows. Falling back is never an error.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from maskfx.ops.attention import attend_alike
from maskfx.ops.base import implement, plain_of
from maskfx.ops.kernels import varlen
from maskfx.ops.kernels.serves import KINDS, Result, attempt, interpreted, serves
from maskfx.ops.kernels.tuning import bucket, configured

FEW = 4  # requests; more than these are seldom alike


def window_product(
    rows: Tensor, halo: Tensor, table: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    args = (rows, halo, table, weight, bias, activation)

    def kernel() -> Tensor:
        from maskfx.ops.kernels.window_product import window_product

        return window_product(*args)

    can = serves(rows, halo, weight, bias)
    return _run("window_product", can, kernel, args, rows.dtype, *weight.shape)


def gather(rows: Tensor, halo: Tensor, table: Tensor) -> Tensor:
    def kernel() -> Tensor:
        from maskfx.ops.kernels.rows import pick_rows

        picked = pick_rows(rows, halo, table)
        return picked.view(table.shape[0], table.shape[1] * rows.shape[1])

    return _run("gather", serves(rows, halo), kernel, (rows, halo, table), rows.dtype)


def enter(rows: Tensor, loaded: Tensor, table: Tensor) -> Tensor:
    def kernel() -> Tensor:
        from maskfx.ops.kernels.rows import pick_rows

        return pick_rows(rows, loaded, table)

    return _run("enter", serves(rows, loaded), kernel, (rows, loaded, table), rows.dtype)


def put_rows(target: Tensor, index: Tensor, rows: Tensor) -> None:
    def kernel() -> bool:
        from maskfx.ops.kernels.rows import put_rows

        put_rows(target, index, rows)
        return True

    can = target.is_contiguous() and target.dtype in KINDS and serves(rows)
    _run("put_rows", can, kernel, (target, index, rows), target.dtype, rows.dtype)


def group_scale(
    rows: Tensor,
    rest: Tensor,
    spans: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    args = (rows, rest, spans, groups, weight, bias, eps)

    def kernel() -> Tensor:
        from maskfx.ops.kernels.norms import group_scale

        return group_scale(*args)

    size = rows.shape[1] // groups
    can = serves(rows) and rest.dtype == torch.float32 and size <= 1024
    return _run("group_scale", can, kernel, args, rows.dtype, size)


def norm_activation(rows: Tensor, scales: Tensor, owner: Tensor, activation: str) -> Tensor:
    args = (rows, scales, owner, activation)

    def kernel() -> Tensor:
        from maskfx.ops.kernels.norms import norm_activation

        return norm_activation(*args)

    can = serves(rows) and rows.dim() == 2
    return _run("norm_activation", can, kernel, args, rows.dtype, activation)


def scale_shift(rows: Tensor, scales: Tensor, owner: Tensor) -> Tensor:
    def kernel() -> Tensor:
        from maskfx.ops.kernels.norms import norm_activation

        return norm_activation(rows, scales, owner, "none")

    can = serves(rows) and rows.dim() == 2
    return _run("scale_shift", can, kernel, (rows, scales, owner), rows.dtype)


def gated(rows: Tensor, activation: str, gate_first: bool, axis: int) -> Tensor:
    args = (rows, activation, gate_first, axis)

    def kernel() -> Tensor:
        from maskfx.ops.kernels.pointwise import gated

        return gated(rows, activation, gate_first)

    can = serves(rows) and axis % rows.dim() == rows.dim() - 1
    return _run("gated", can, kernel, args, rows.dtype, activation)


def modulate(rows: Tensor, scale: Tensor, shift: Tensor, owner: Tensor) -> Tensor:
    args = (rows, scale, shift, owner)

    def kernel() -> Tensor:
        from maskfx.ops.kernels.pointwise import modulate

        return modulate(*args)

    can = serves(rows, scale, shift) and rows.dim() == 2
    can = can and rows.shape[1:] == scale.shape[1:] == shift.shape[1:] and len(rows) == len(owner)
    return _run("modulate", can, kernel, args, rows.dtype)


def add_gated(base: Tensor, rows: Tensor, gate: Tensor, owner: Tensor) -> Tensor:
    args = (base, rows, gate, owner)

    def kernel() -> Tensor:
        from maskfx.ops.kernels.pointwise import add_gated

        return add_gated(*args)

    can = serves(base, rows, gate) and base.shape == rows.shape and rows.dim() == 2
    can = can and gate.shape[1:] == rows.shape[1:] and len(rows) == len(owner)
    return _run("add_gated", can, kernel, args, rows.dtype)


def add_low_rank(base: Tensor, rows: Tensor, down: Tensor, up: Tensor, groups: Tensor) -> Tensor:
    table = groups.tolist()
    each = prod(rows.shape[1:-1])

    def kernel() -> Tensor | None:
        from maskfx.ops.kernels.low_rank import add_low_rank, serves_ranks

        if not serves_ranks(table):
            return None
        scaled = [[a * each, b * each, i, j] for a, b, i, j in table]
        flat, known = rows.reshape(-1, rows.shape[-1]), base.reshape(-1, base.shape[-1])
        return add_low_rank(known, flat, down, up, scaled).view(base.shape)

    args = (base, rows, down, up, groups)
    can = serves(base, rows, down, up)
    return _run("add_low_rank", can, kernel, args, rows.dtype, down.shape[1], up.shape[1])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_v: Tensor,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    bias: Tensor | None,
    bias_heads: int,
    pairwise: bool,
    scale: float | None,
) -> Tensor:
    """Attend by the kernel, or by PyTorch's attention over sequences or over alike requests.

    The kernel serves two sources of keys, rows in several segments, and masks, without copying
    rows; PyTorch's attentions are quicker where the copies are cheap. The fastest is chosen for
    each bucket of shapes, as the configurations of kernels are.
    """
    spans = (q_spans, k_spans, rest_spans)
    deepest = max(q.shape[2], v.shape[2])

    def over_alike() -> Tensor:
        return attend_alike(q, k, v, rest_k, rest_v, *spans, bias, bias_heads, pairwise, scale)

    def over_sequences() -> Tensor:
        return varlen.attend(q, k, v, rest_k, rest_v, *spans, scale)

    def kernel() -> Tensor:
        from maskfx.ops.kernels.attend import CachedOperand, attend

        return attend(
            q,
            k,
            v,
            CachedOperand(rest_k),
            CachedOperand(rest_v),
            *spans,
            bias,
            bias_heads,
            pairwise,
            scale,
        )

    ways: list[Callable[[], Tensor]] = []
    if serves(q, k, v, rest_k, rest_v) and deepest <= varlen.DEEPEST:
        ways.append(kernel)
    if bias is None and varlen.serves(q, k, v):
        ways.append(over_sequences)
    if not (ways and interpreted()):
        ways.insert(0 if len(q_spans) <= FEW else len(ways), over_alike)
    keys = bucket(len(k) + len(rest_k))
    kind = (str(q.dtype), *q.shape[1:], k.shape[1], v.shape[2], bias is not None)
    shape = (*kind, bucket(len(q)), keys, bucket(len(q_spans)), len(ways))
    with torch.cuda.device_of(q):
        configs = [{"WAY": number} for number in range(len(ways))]
        chosen = configured(q.device, "attention", shape, configs, lambda c: ways[c["WAY"]]())
        way = ways[chosen["WAY"]]
        found = None if way is over_alike else attempt((way.__name__, *kind), way)
    return over_alike() if found is None else found


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_k_scale: Tensor,
    rest_v: Tensor,
    rest_v_scale: Tensor,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    bias: Tensor | None,
    bias_heads: int,
    pairwise: bool,
    scale: float | None,
) -> Tensor:
    layout = (q_spans, k_spans, rest_spans, bias, bias_heads, pairwise, scale)
    args = (q, k, v, rest_k, rest_k_scale, rest_v, rest_v_scale, *layout)

    def kernel() -> Tensor:
        from maskfx.ops.kernels.attend import CachedOperand, attend

        keys, values = CachedOperand(rest_k, rest_k_scale), CachedOperand(rest_v, rest_v_scale)
        return attend(q, k, v, keys, values, *layout)

    can = serves(q, k, v) and max(q.shape[2], v.shape[2]) <= varlen.DEEPEST
    can &= rest_k.dtype == rest_v.dtype
    key = (q.dtype, rest_k.dtype, *q.shape[1:], *v.shape[1:], bias is not None)
    return _run("attend_packed", can, kernel, args, *key)


def _run(
    name: str,
    can: bool,
    kernel: Callable[[], Result | None],
    args: tuple[Tensor, *tuple[object, ...]],
    *key: object,
) -> Result:
    """Run the kernel if it serves the call, and else the plain operator."""
    with torch.cuda.device_of(args[0]):  # where Triton launches
        found = attempt((name, *key), kernel) if can else None
    if found is not None:
        return found
    plain: Callable[..., Result] = plain_of(name)
    return plain(*args)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(window_product, gather, enter, put_rows, group_scale, norm_activation, scale_shift),
        *(gated, modulate, add_gated, add_low_rank, attend, attend_packed),
    )
}


def register() -> None:
    """Let the operators choose these implementations for tensors on a CUDA device."""
    for name, function in IMPLEMENTATIONS.items():
        implement(name, function)
