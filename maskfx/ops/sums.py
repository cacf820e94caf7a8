"""Sums over a request's sites, and products with them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.base import define, join, pieces, wide


def _site_mean(rows: Tensor, rest: Tensor, spans: Tensor, divide: bool) -> Tensor:
    """(requests, features): sum or mean over a request's rows and the rest (sums | count)."""
    out = rows.new_empty(rest.shape[0], rows.shape[1])
    for i, span in enumerate(spans.tolist()):
        own = join(pieces(rows, span), rows)
        total = own.sum(0, dtype=wide(rows.dtype)) + rest[i, :-1]
        out[i] = total / (rest[i, -1] + own.shape[0]) if divide else total
    return out


site_mean = define(
    "site_mean(Tensor rows, Tensor rest, Tensor spans, bool divide) -> Tensor",
    _site_mean,
    lambda rows, rest, spans, divide: rows.new_empty(rest.shape[0], rows.shape[1]),
)


def _site_extreme(
    rows: Tensor, rest: Tensor, spans: Tensor, rest_spans: Tensor, largest: bool
) -> Tensor:
    """(requests, features): the largest or smallest of a request's rows and of the rest's rows."""
    out = rows.new_zeros(spans.shape[0], rows.shape[1])
    for i, (span, other) in enumerate(zip(spans.tolist(), rest_spans.tolist(), strict=True)):
        own = join([*pieces(rows, span), *pieces(rest, other)], rows)
        if len(own):
            out[i] = own.amax(0) if largest else own.amin(0)
    return out


site_extreme = define(
    "site_extreme(Tensor rows, Tensor rest, Tensor spans, Tensor rest_spans, bool largest) -> "
    "Tensor",
    _site_extreme,
    lambda rows, rest, spans, rest_spans, largest: rows.new_empty(spans.shape[0], rows.shape[1]),
)


def _site_logsumexp(rows: Tensor, rest: Tensor, spans: Tensor, rest_spans: Tensor) -> Tensor:
    """(requests, features): log-sum-exps of a request's rows and of the rest's rows, in wide."""
    kind = wide(rows.dtype)
    out = rows.new_zeros(spans.shape[0], rows.shape[1], dtype=kind)
    for i, (span, other) in enumerate(zip(spans.tolist(), rest_spans.tolist(), strict=True)):
        own = join([*pieces(rows, span), *pieces(rest, other)], rows)
        if len(own):
            out[i] = torch.logsumexp(own.to(kind), 0)
    return out


site_logsumexp = define(
    "site_logsumexp(Tensor rows, Tensor rest, Tensor spans, Tensor rest_spans) -> Tensor",
    _site_logsumexp,
    lambda rows, rest, spans, rest_spans: rows.new_empty(
        spans.shape[0], rows.shape[1], dtype=wide(rows.dtype)
    ),
)


def _site_product(
    a: Tensor, b: Tensor, rest_a: Tensor, rest_b: Tensor, spans: Tensor, rest_spans: Tensor
) -> Tensor:
    """(requests, heads, Da, Db): sum over sites of a's rows times b's rows."""
    out = a.new_zeros(spans.shape[0], a.shape[1], a.shape[2], b.shape[2])
    for i, (span, rest) in enumerate(zip(spans.tolist(), rest_spans.tolist(), strict=True)):
        for x, y, where in ((a, b, span), (rest_a, rest_b, rest)):
            left, right = join(pieces(x, where), x), join(pieces(y, where), y)
            out[i] += torch.matmul(left.permute(1, 2, 0), right.transpose(0, 1))
    return out


site_product = define(
    "site_product(Tensor a, Tensor b, Tensor rest_a, Tensor rest_b, Tensor spans, "
    "Tensor rest_spans) -> Tensor",
    _site_product,
    lambda a, b, ra, rb, spans, rs: a.new_empty(spans.shape[0], a.shape[1], a.shape[2], b.shape[2]),
)


def _owner_product(rows: Tensor, matrices: Tensor, spans: Tensor) -> Tensor:
    """(rows, heads, D'): each row (heads, D) times its request's matrix (heads, D, D')."""
    out = rows.new_empty(rows.shape[0], rows.shape[1], matrices.shape[3])
    for i, span in enumerate(spans.tolist()):
        for x, y in zip(pieces(rows, span), pieces(out, span), strict=True):
            y.copy_(torch.matmul(x.transpose(0, 1), matrices[i]).transpose(0, 1))
    return out


owner_product = define(
    "owner_product(Tensor rows, Tensor matrices, Tensor spans) -> Tensor",
    _owner_product,
    lambda rows, matrices, spans: rows.new_empty(rows.shape[0], rows.shape[1], matrices.shape[3]),
)


@register_flop_formula(torch.ops.maskfx.site_product)
def _site_product_formula(
    a: Sequence[int], b: Sequence[int], rest_a: Sequence[int], *args: object, **kwargs: object
) -> int:
    return 2 * (a[0] + rest_a[0]) * a[1] * a[2] * b[2]


@register_flop_formula(torch.ops.maskfx.owner_product)
def _owner_product_formula(
    rows: Sequence[int], matrices: Sequence[int], *a: object, **k: object
) -> int:
    return 2 * prod(rows) * matrices[3]
