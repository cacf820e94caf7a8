"""The operators of compiled graphs: the only contract between a graph and the runtime.

Each one is written in plain PyTorch, takes and returns contiguous tensors, and has a fake twin for
tracing and a FLOP formula. `spans` (requests, 2 x segments) tell where a request's rows begin and
end in each segment. Registered by `torch.library.Library`, whose calls cost half of custom_op's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("maskfx", "DEF")


def _define(schema: str, plain: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"maskfx::{name}", fake, lib=_library)


def _pieces(rows: Tensor, span: Sequence[int]) -> list[Tensor]:
    """One request's rows, segments that lie side by side as one piece."""
    ranges: list[list[int]] = []
    for start, stop in zip(span[::2], span[1::2], strict=True):
        if start == stop:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1][1] = stop
        else:
            ranges.append([start, stop])
    return [rows[a:b] for a, b in ranges]


def _join(pieces: list[Tensor], like: Tensor) -> Tensor:
    if not pieces:
        return like[:0]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


# gather: the rows that a window reads, laid side by side for one matrix product.


def _gather(rows: Tensor, halo: Tensor, table: Tensor) -> Tensor:
    source = torch.cat([rows, halo, rows.new_zeros(1, rows.shape[1])])
    picked = source.index_select(0, table.reshape(-1))
    return picked.view(table.shape[0], table.shape[1] * rows.shape[1])


def _gather_fake(rows: Tensor, halo: Tensor, table: Tensor) -> Tensor:
    return rows.new_empty(table.shape[0], table.shape[1] * rows.shape[1])


_define("gather(Tensor rows, Tensor halo, Tensor table) -> Tensor", _gather, _gather_fake)


# enter: the rows of one row set out of another's and loaded ones, at a cut.


def _enter(rows: Tensor, loaded: Tensor, table: Tensor) -> Tensor:
    source = torch.cat([rows, loaded]) if loaded.shape[0] else rows
    return source.index_select(0, table)


_define(
    "enter(Tensor rows, Tensor loaded, Tensor table) -> Tensor",
    _enter,
    lambda rows, loaded, table: rows.new_empty(table.shape[0], *rows.shape[1:]),
)


# group_scale and scale_shift: group norm, in two halves.


def _group_scale(
    rows: Tensor,
    rest: Tensor,
    spans: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """(requests, 2, channels): what to multiply and add; rest is count, mean, M2 of the rest."""
    requests, channels = rest.shape[0], rows.shape[1]
    kind = wide(rows.dtype)
    fresh = rows.new_zeros(2, requests, groups, channels // groups, dtype=kind)
    moments, counts = _array(fresh), []
    for i, span in enumerate(spans.tolist()):
        own = _join(_pieces(rows, span), rows)
        counts.append(own.shape[0])
        if own.shape[0]:
            found = torch.batch_norm_update_stats(own.to(kind), None, None, 0.0)
            moments[0, i], moments[1, i] = (_array(v).reshape(groups, -1) for v in found)
    number = _array(torch.tensor(counts, dtype=kind, device=rows.device))
    scale, shift = _merge_moments(number[:, None], moments, _array(rest.to(kind)), eps)
    out = rows.new_empty(requests, 2, groups, channels // groups, dtype=kind)
    into = _array(out)
    into[:, 0], into[:, 1] = scale[:, :, None], shift[:, :, None]
    if weight is not None:
        into *= _array(weight.detach().to(kind)).reshape(groups, -1)
    if bias is not None:
        into[:, 1] += _array(bias.detach().to(kind)).reshape(groups, -1)
    return out.view(requests, 2, channels)


def _merge_moments(number: Any, fresh: Any, rest: Any, eps: float) -> tuple[Any, Any]:
    """Scale and shift, (requests, groups), from moments of each channel over some fresh rows and
    (requests, groups, 3) of the rest.
    """
    count, mean, spread = rest[..., 0], rest[..., 1], rest[..., 2]
    size = fresh.shape[-1]
    n = number * size
    total = count + n
    total += total == 0
    means, variances = fresh
    middle = means.sum(-1) / size
    around = means - middle[..., None]
    within = (variances + around * around).sum(-1) / size
    share, delta = n / total, middle - mean
    variance = spread / total + share * (within + (1 - share) * delta * delta)
    scale = (variance + eps) ** -0.5
    return scale, -(mean + share * delta) * scale


def _array(value: Tensor) -> Any:
    """The same memory in NumPy, whose calls on a few numbers are cheaper than PyTorch's."""
    return value.numpy() if value.device.type == "cpu" else value


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over many sites are kept in."""
    return dtype if dtype == torch.float64 else torch.float32


def _group_scale_fake(
    rows: Tensor,
    rest: Tensor,
    spans: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    return rows.new_empty(rest.shape[0], 2, rows.shape[1], dtype=wide(rows.dtype))


_define(
    "group_scale(Tensor rows, Tensor rest, Tensor spans, int groups, Tensor? weight, "
    "Tensor? bias, float eps) -> Tensor",
    _group_scale,
    _group_scale_fake,
)


def _scale_shift(rows: Tensor, scales: Tensor, owner: Tensor) -> Tensor:
    picked = scales if scales.shape[0] == 1 else scales.index_select(0, owner)
    scale, shift = picked.unbind(1)
    return torch.addcmul(shift, rows, scale).to(rows.dtype)


_define(
    "scale_shift(Tensor rows, Tensor scales, Tensor owner) -> Tensor",
    _scale_shift,
    lambda rows, scales, owner: torch.empty_like(rows),
)


# attend: attention of each request's rows over its own keys, the cached ones of the rest included.


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
    for piece in _pieces(out, span):
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
        queries = _pieces(q, q_span)
        if not queries:
            if bias is not None and not pairwise:
                at += bias_heads * (_length(k_span) + _length(rest_span))
            continue
        query = _join(queries, q)
        alone = query.shape[0] == q.shape[0] and len(queries) == 1
        fresh = _join(_pieces(k, k_span), k), _join(_pieces(v, k_span), v)
        rest = _pieces(rest_k, rest_span), _pieces(rest_v, rest_span)
        length = _length(rest_span)
        if bias is None and fresh[0].shape[0] and length and _merges(query, *fresh, length):
            kept = _join(rest[0], k), _join(rest[1], v)
            mixed = _attend_in_two(query, fresh, kept, scale)
            if alone:
                return mixed.contiguous()
            _scatter(out, q_span, mixed)
            continue
        keys, values = _join([fresh[0], *rest[0]], k), _join([fresh[1], *rest[1]], v)
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


_define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor rest_k, Tensor rest_v, Tensor q_spans, "
    "Tensor k_spans, Tensor rest_spans, Tensor? bias, int bias_heads, bool pairwise, "
    "float? scale) -> Tensor",
    _attend,
    _attend_fake,
)


# site_mean, site_product, owner_product: sums over sites, and what is made of them.


def _site_mean(rows: Tensor, rest: Tensor, spans: Tensor, divide: bool) -> Tensor:
    """(requests, features): sum or mean over a request's rows and the rest (sums | count)."""
    out = rows.new_empty(rest.shape[0], rows.shape[1])
    for i, span in enumerate(spans.tolist()):
        own = _join(_pieces(rows, span), rows)
        total = own.sum(0, dtype=wide(rows.dtype)) + rest[i, :-1]
        out[i] = total / (rest[i, -1] + own.shape[0]) if divide else total
    return out


_define(
    "site_mean(Tensor rows, Tensor rest, Tensor spans, bool divide) -> Tensor",
    _site_mean,
    lambda rows, rest, spans, divide: rows.new_empty(rest.shape[0], rows.shape[1]),
)


def _site_product(
    a: Tensor, b: Tensor, rest_a: Tensor, rest_b: Tensor, spans: Tensor, rest_spans: Tensor
) -> Tensor:
    """(requests, heads, Da, Db): sum over sites of a's rows times b's rows."""
    out = a.new_zeros(spans.shape[0], a.shape[1], a.shape[2], b.shape[2])
    for i, (span, rest) in enumerate(zip(spans.tolist(), rest_spans.tolist(), strict=True)):
        for x, y, where in ((a, b, span), (rest_a, rest_b, rest)):
            left, right = _join(_pieces(x, where), x), _join(_pieces(y, where), y)
            out[i] += torch.matmul(left.permute(1, 2, 0), right.transpose(0, 1))
    return out


_define(
    "site_product(Tensor a, Tensor b, Tensor rest_a, Tensor rest_b, Tensor spans, "
    "Tensor rest_spans) -> Tensor",
    _site_product,
    lambda a, b, ra, rb, spans, rs: a.new_empty(spans.shape[0], a.shape[1], a.shape[2], b.shape[2]),
)


def _owner_product(rows: Tensor, matrices: Tensor, spans: Tensor) -> Tensor:
    """(rows, heads, D'): each row (heads, D) times its request's matrix (heads, D, D')."""
    out = rows.new_empty(rows.shape[0], rows.shape[1], matrices.shape[3])
    for i, span in enumerate(spans.tolist()):
        for x, y in zip(_pieces(rows, span), _pieces(out, span), strict=True):
            y.copy_(torch.matmul(x.transpose(0, 1), matrices[i]).transpose(0, 1))
    return out


_define(
    "owner_product(Tensor rows, Tensor matrices, Tensor spans) -> Tensor",
    _owner_product,
    lambda rows, matrices, spans: rows.new_empty(rows.shape[0], rows.shape[1], matrices.shape[3]),
)

gather = torch.ops.maskfx.gather.default
enter = torch.ops.maskfx.enter.default
group_scale = torch.ops.maskfx.group_scale.default
scale_shift = torch.ops.maskfx.scale_shift.default
attend = torch.ops.maskfx.attend.default
site_mean = torch.ops.maskfx.site_mean.default
site_product = torch.ops.maskfx.site_product.default
owner_product = torch.ops.maskfx.owner_product.default

ALL = (gather, enter, group_scale, scale_shift, attend, site_mean, site_product, owner_product)


# FLOPs: two per multiply-add, as FlopCounterMode counts; only products count.


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
        queries, keys = _length(q_span), _length(k_span) + _length(rest_span)
        total += attend_flops(queries, keys, q.shape[1], q.shape[2], v.shape[2])
    return total


def _length(span: Sequence[int]) -> int:
    return sum(span[1::2]) - sum(span[::2])


@register_flop_formula(torch.ops.maskfx.site_product)
def _site_product_formula(
    a: Sequence[int], b: Sequence[int], rest_a: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return 2 * (a[0] + rest_a[0]) * a[1] * a[2] * b[2]


@register_flop_formula(torch.ops.maskfx.owner_product)
def _owner_product_formula(rows: Sequence[int], matrices: Sequence[int], *a: Any, **k: Any) -> int:
    return 2 * prod(rows) * matrices[3]
