"""Attention of each request's rows over that request's keys, including its cached keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.base import Ranges, define, join, pieces, ranges, wide

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_FEW = 1 << 15  # copying fewer numbers than this costs less than two kernel calls


def attend_alike(
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
    where = [[ranges(span) for span in spans.tolist()] for spans in (q_spans, k_spans, rest_spans)]
    first = at = 0
    while first < len(q_spans):
        count = _alike(where, first)
        own, new, old = (table[first] for table in where)
        first += count
        queries, outs = _batcher(q, own, count), _batcher(out, own, count)
        keys, kept = _batcher(k, new, count), _batcher(rest_k, old, count)
        mask = None
        if bias is not None:
            width = sum(piece.shape[1] for piece in (*keys, *kept))
            rows = sum(piece.shape[1] for piece in queries) if pairwise else 1
            size = count * bias_heads * rows * width
            mask = bias[at : at + size].view(count, bias_heads, rows, width)
            at += size
        if not queries:
            continue
        values, kept_values = _batcher(v, new, count), _batcher(rest_v, old, count)
        query = _side_by_side(queries, q, count)
        if mask is None and _merges(query, keys, kept, v):
            new_side, old_side = (
                (_side_by_side(x, k, count), _side_by_side(y, v, count))
                for x, y in ((keys, values), (kept, kept_values))
            )
            mixed = _attend_in_two(query, new_side, old_side, scale)
        else:
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                _side_by_side([*keys, *kept], k, count).transpose(1, 2),
                _side_by_side([*values, *kept_values], v, count).transpose(1, 2),
                attn_mask=mask,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            ).transpose(1, 2)
        if len(outs) == 1 and count * query.shape[1] == len(q):
            return mixed.flatten(0, 1).contiguous()
        start = 0
        for piece in outs:
            piece.copy_(mixed[:, start : start + piece.shape[1]])
            start += piece.shape[1]
    return out


def _alike(where: Sequence[Sequence[Ranges]], first: int) -> int:
    """Return how many requests from `first` on have equal row counts and adjacent rows.

    The branches of classifier-free guidance are such requests. One call serves them all.
    """
    count = 1
    while first + count < len(where[0]):
        for table in where:
            moved = [(a + count * (b - a), b + count * (b - a)) for a, b in table[first]]
            if table[first + count] != moved:
                return count
        count += 1
    return count


def _batcher(rows: Tensor, own: Ranges, count: int) -> list[Tensor]:
    """Return the rows of `count` alike requests, as a (count, rows, ...) tensor for each range."""
    return [rows[a : a + count * (b - a)].unflatten(0, (count, b - a)) for a, b in own]


def _side_by_side(pieces: list[Tensor], like: Tensor, count: int) -> Tensor:
    if not pieces:
        return like.new_empty(count, 0, *like.shape[1:])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _merges(query: Tensor, keys: list[Tensor], kept: list[Tensor], values: Tensor) -> bool:
    """Return True if two partial attentions can be merged, and if merging is faster.

    Only the CPU kernel returns the weights that a merge needs. Concatenating the keys copies them;
    a second partial attention costs more calls.
    """
    copied = sum(piece[0].numel() for piece in kept)  # of one request, whatever the batch
    if not keys or query.device.type != "cpu" or copied <= _FEW:
        return False
    same = query.shape[2:] == keys[0].shape[2:] == values.shape[1:]
    return same and query.stride(3) == keys[0].stride(3) == values.stride(2) == 1


def _attend_in_two(
    query: Tensor, fresh: tuple[Tensor, Tensor], rest: tuple[Tensor, Tensor], scale: float | None
) -> Tensor:
    """Attend to fresh and cached keys without concatenating them."""
    q = query.transpose(1, 2)
    parts = [
        _flash(q, k.transpose(1, 2), v.transpose(1, 2), 0.0, False, scale=scale)
        for k, v in (fresh, rest)
    ]
    (mixed, weight), (mixed_rest, weight_rest) = parts
    share = torch.sigmoid(weight_rest - weight).unsqueeze(-1).to(mixed.dtype)
    return torch.lerp(mixed, mixed_rest, share).transpose(1, 2)


attend = define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor rest_k, Tensor rest_v, Tensor q_spans, "
    "Tensor k_spans, Tensor rest_spans, Tensor? bias, int bias_heads, bool pairwise, "
    "float? scale) -> Tensor",
    attend_alike,
    lambda q, k, v, *_, **__: q.new_empty(q.shape[0], q.shape[1], v.shape[2]),
)


def attend_flops(queries: int, keys: int, heads: int, depth: int, depth_v: int) -> int:
    return 2 * queries * keys * heads * (depth + depth_v)


@register_flop_formula(torch.ops.maskfx.attend, get_raw=True)
def attend_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_v: Tensor,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    *args: object,
    out_val: object = None,
    **kwargs: object,
) -> int:
    """Return the FLOPs of each request's queries over its own keys, fresh and cached."""
    return ragged_flops(q, v, q_spans, k_spans, rest_spans)


def ragged_flops(q: Tensor, v: Tensor, q_spans: Tensor, k_spans: Tensor, rest_spans: Tensor) -> int:
    """Return the FLOPs of each request's queries over its own keys."""
    total = 0
    spans = zip(q_spans.tolist(), k_spans.tolist(), rest_spans.tolist(), strict=True)
    for q_span, k_span, rest_span in spans:
        queries, keys = _count(q_span), _count(k_span) + _count(rest_span)
        total += attend_flops(queries, keys, q.shape[1], q.shape[2], v.shape[2])
    return total


def _count(span: Sequence[int]) -> int:
    return sum(span[1::2]) - sum(span[::2])


def attend_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_v: Tensor,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend to a part of the keys; return the result and its log-sum-exps.

    Queries without keys have zeros, and a log-sum-exp of minus infinity.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    weight = torch.full((*q.shape[:2], 1), -torch.inf, dtype=wide(q.dtype), device=q.device)
    for own, new, old in zip(q_spans.tolist(), k_spans.tolist(), rest_spans.tolist(), strict=True):
        keys = join([*pieces(k, new), *pieces(rest_k, old)], k)
        if not len(keys):
            continue
        values = join([*pieces(v, new), *pieces(rest_v, old)], v)
        for start, stop in ranges(own):
            out[start:stop], weight[start:stop, :, 0] = _part(q[start:stop], keys, values, scale)
    return out, weight


def _part(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the attention of (queries, heads, depth) to one request's keys, and its weights."""
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:  # grouped queries
        key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    if query.device.type == "cpu" and query.shape[2] == value.shape[2]:
        mixed, weight = _flash(q, k, v, 0.0, False, scale=scale)
    else:
        kind = wide(query.dtype)
        factor = query.shape[2] ** -0.5 if scale is None else scale
        scores = torch.matmul(q.to(kind), k.to(kind).transpose(2, 3)) * factor
        weight = torch.logsumexp(scores, 3)
        mixed = torch.matmul(torch.exp(scores - weight[..., None]), v.to(kind)).to(v.dtype)
    return mixed[0].transpose(0, 1), weight[0].transpose(0, 1)
