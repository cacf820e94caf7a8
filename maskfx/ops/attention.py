"""Attention of each request's rows over its own keys, the cached ones of the rest included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.base import count, define, join, pieces

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _merges(q: Tensor, k: Tensor, v: Tensor, rest: int) -> bool:
    """Can two partial attentions be merged (the CPU's kernel tells their weights), and does it pay?

    Laying the keys side by side copies them, a second partial attention is more calls.
    """
    same = q.shape[1] == k.shape[1] and q.shape[2] == v.shape[2]
    dense = q.stride(2) == k.stride(2) == v.stride(2) == 1
    return same and dense and q.device.type == "cpu" and rest * q.shape[1] * q.shape[2] > _FEW


_FEW = 1 << 15  # numbers that are copied faster than two calls are made


def _attend_in_two(
    query: Tensor, fresh: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor], scale: float | None
) -> Tensor:
    """Attention over fresh and cached keys without laying them side by side."""
    q = query.transpose(0, 1).unsqueeze(0)
    parts = [
        _flash(
            q,
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            0.0,
            False,
            scale=scale,
        )
        for k, v in (fresh, rest)
    ]
    (mixed, weight), (mixed_rest, weight_rest) = parts
    share = torch.sigmoid(weight_rest - weight).unsqueeze(-1).to(mixed.dtype)
    return torch.lerp(mixed, mixed_rest, share)[0].transpose(0, 1)


def _scatter(out: Tensor, span: Sequence[int], rows: Tensor) -> None:
    start = 0
    for piece in pieces(out, span):
        piece.copy_(rows[start : start + piece.shape[0]])
        start += piece.shape[0]


def _attend(
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
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    at = 0
    spans = zip(q_spans.tolist(), k_spans.tolist(), rest_spans.tolist(), strict=True)
    for q_span, k_span, rest_span in spans:
        queries = pieces(q, q_span)
        if not queries:
            if bias is not None and not pairwise:
                at += bias_heads * (count(k_span) + count(rest_span))
            continue
        query = join(queries, q)
        alone = query.shape[0] == q.shape[0] and len(queries) == 1
        fresh = join(pieces(k, k_span), k), join(pieces(v, k_span), v)
        rest = pieces(rest_k, rest_span), pieces(rest_v, rest_span)
        length = count(rest_span)
        if bias is None and fresh[0].shape[0] and length and _merges(query, *fresh, length):
            kept = join(rest[0], k), join(rest[1], v)
            mixed = _attend_in_two(query, fresh, kept, scale)
            if alone:
                return mixed.contiguous()
            _scatter(out, q_span, mixed)
            continue
        keys, values = join([fresh[0], *rest[0]], k), join([fresh[1], *rest[1]], v)
        mask = None
        if bias is not None:
            rows = query.shape[0] if pairwise else 1
            size = bias_heads * rows * keys.shape[0]
            mask = bias[at : at + size].view(bias_heads, rows, keys.shape[0])
            at += size
        mixed = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )[0].transpose(0, 1)
        if alone:
            return mixed.contiguous()
        _scatter(out, q_span, mixed)
    return out


def _attend_fake(
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
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


attend = define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor rest_k, Tensor rest_v, Tensor q_spans, "
    "Tensor k_spans, Tensor rest_spans, Tensor? bias, int bias_heads, bool pairwise, "
    "float? scale) -> Tensor",
    _attend,
    _attend_fake,
)


def attend_flops(queries: int, keys: int, heads: int, depth: int, depth_v: int) -> int:
    return 2 * queries * keys * heads * (depth + depth_v)


@register_flop_formula(torch.ops.maskfx.attend, get_raw=True)
def _attend_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_v: Tensor,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    *args: Any,
    out_val: Any = None,
    **kwargs: Any,
) -> int:
    total = 0
    spans = zip(q_spans.tolist(), k_spans.tolist(), rest_spans.tolist(), strict=True)
    for q_span, k_span, rest_span in spans:
        queries, keys = count(q_span), count(k_span) + count(rest_span)
        total += attend_flops(queries, keys, q.shape[1], q.shape[2], v.shape[2])
    return total
