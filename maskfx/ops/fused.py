"""Fused operators: several steps of a graph as one, which is quicker.

`maskfx.passes.fuse_kernels` puts them into graphs. Each is plain PyTorch here, in the order of the
operators that it replaces, and a kernel of `ops/kernels/` on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.attention import attend, ragged_flops
from maskfx.ops.base import define
from maskfx.ops.few_rows import linear
from maskfx.ops.norms import scale_shift
from maskfx.ops.unpack import widen
from maskfx.ops.windows import by_blocks

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda value: value,
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda value: F.gelu(value, approximate="tanh"),
}


def _window_product(
    rows: Tensor, halo: Tensor, table: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """Multiply the rows of each window by one matrix: (windows, outputs).

    Args:
        rows: (rows, channels).
        halo: (halo, channels).
        table: (windows, places): indices into [rows | halo | one row of zeros].
        weight: (outputs, places * channels).
        bias: (outputs,).
        activation: A name in `ACTIVATIONS`.
    """
    multiply = partial(linear, weight=weight, bias=bias)
    return ACTIVATIONS[activation](by_blocks(rows, halo, table, multiply))


window_product = define(
    "window_product(Tensor rows, Tensor halo, Tensor table, Tensor weight, Tensor? bias, "
    "str activation) -> Tensor",
    _window_product,
    lambda rows, halo, table, weight, *_, **__: rows.new_empty(table.shape[0], weight.shape[0]),
)


@register_flop_formula(torch.ops.maskfx.window_product)
def _window_product_formula(
    rows: Sequence[int],
    halo: Sequence[int],
    table: Sequence[int],
    weight: Sequence[int],
    *args: object,
    **kwargs: object,
) -> int:
    return 2 * table[0] * prod(weight)


def _norm_activation(rows: Tensor, scales: Tensor, owner: Tensor, activation: str) -> Tensor:
    """Apply a group norm's scales and shifts, (requests, 2, channels), and an activation."""
    return ACTIVATIONS[activation](scale_shift(rows, scales, owner))


norm_activation = define(
    "norm_activation(Tensor rows, Tensor scales, Tensor owner, str activation) -> Tensor",
    _norm_activation,
    lambda rows, *_, **__: rows.new_empty(rows.shape),
)


def _gated(rows: Tensor, activation: str, gate_first: bool, axis: int) -> Tensor:
    """Multiply one half of an axis by the activation of the other."""
    first, second = rows.chunk(2, axis)
    value, gate = (second, first) if gate_first else (first, second)
    return value * ACTIVATIONS[activation](gate)


gated = define(
    "gated(Tensor rows, str activation, bool gate_first, int axis) -> Tensor",
    _gated,
    lambda rows, activation, gate_first, axis: rows.new_empty(
        [n // 2 if i == axis % rows.dim() else n for i, n in enumerate(rows.shape)]
    ),
)


def _modulate(rows: Tensor, scale: Tensor, shift: Tensor, owner: Tensor) -> Tensor:
    """Multiply each row by its request's scale and add its request's shift."""
    return rows * scale.index_select(0, owner) + shift.index_select(0, owner)


def _broadcast(rows: Tensor, *others: Tensor) -> Tensor:
    """Return an empty result for operands that may have one value for several features."""
    shapes = [(rows.shape[0], *other.shape[1:]) for other in others]
    dtype = rows.dtype
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    return rows.new_empty(torch.broadcast_shapes(rows.shape, *shapes), dtype=dtype)


modulate = define(
    "modulate(Tensor rows, Tensor scale, Tensor shift, Tensor owner) -> Tensor",
    _modulate,
    lambda rows, scale, shift, owner: _broadcast(rows, scale, shift),
)


def _add_gated(base: Tensor, rows: Tensor, gate: Tensor, owner: Tensor) -> Tensor:
    """Add to `base` the rows, each multiplied by its request's gate."""
    return base + gate.index_select(0, owner) * rows


add_gated = define(
    "add_gated(Tensor base, Tensor rows, Tensor gate, Tensor owner) -> Tensor",
    _add_gated,
    lambda base, rows, gate, owner: _broadcast(base, rows, gate),
)


def _attend_packed(
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
    """Attend as `attend` does, to cached keys and values in 8 or 4 bits.

    Args:
        q, k, v, q_spans, k_spans, rest_spans, bias, bias_heads, pairwise, scale: see `attend`.
        rest_k, rest_v: (rows, heads * depth) in int8, or (rows, heads * depth / 2) in uint8.
        rest_k_scale, rest_v_scale: (rows, parts).
    """
    keys, values = (
        widen(stored, scales, like.dtype).view(-1, *like.shape[1:])
        for stored, scales, like in ((rest_k, rest_k_scale, k), (rest_v, rest_v_scale, v))
    )
    spans = (q_spans, k_spans, rest_spans)
    out: Tensor = attend(q, k, v, keys, values, *spans, bias, bias_heads, pairwise, scale)
    return out


attend_packed = define(
    "attend_packed(Tensor q, Tensor k, Tensor v, Tensor rest_k, Tensor rest_k_scale, "
    "Tensor rest_v, Tensor rest_v_scale, Tensor q_spans, Tensor k_spans, Tensor rest_spans, "
    "Tensor? bias, int bias_heads, bool pairwise, float? scale) -> Tensor",
    _attend_packed,
    lambda q, k, v, *_, **__: q.new_empty(q.shape[0], q.shape[1], v.shape[2]),
)


@register_flop_formula(torch.ops.maskfx.attend_packed, get_raw=True)
def _attend_packed_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_k_scale: Tensor,
    rest_v: Tensor,
    rest_v_scale: Tensor,
    *spans: Tensor,
    **kwargs: object,
) -> int:
    return ragged_flops(q, v, *spans[:3])


__all__ = [
    "ACTIVATIONS",
    "add_gated",
    "attend_packed",
    "gated",
    "modulate",
    "norm_activation",
    "window_product",
]
