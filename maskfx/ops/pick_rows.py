"""Picks rows by numbers that are data: tokens of the text, and the sites that an expert chose."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.types import IntLikeType
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.base import define, join, pieces, ranges


def _pick_tokens(rows: Tensor, numbers: Tensor, spans: Tensor, out_spans: Tensor) -> Tensor:
    """Return for each row of the result the row of its request with this number."""
    table = torch.empty_like(numbers)
    for span, target in zip(spans.tolist(), out_spans.tolist(), strict=True):
        own = [torch.arange(a, b, device=rows.device) for a, b in ranges(span)]
        source = join(own, table)
        for start, stop in ranges(target):
            table[start:stop] = source[numbers[start:stop]]
    return rows.index_select(0, table)


pick_tokens = define(
    "pick_tokens(Tensor rows, Tensor numbers, Tensor spans, Tensor out_spans) -> Tensor",
    _pick_tokens,
    lambda rows, numbers, spans, out_spans: rows.new_empty(len(numbers), *rows.shape[1:]),
)


def _choose(scores: Tensor, kept: Tensor, spans: Tensor, rest_spans: Tensor, count: int) -> Tensor:
    """Return (rows, experts): one where an expert chooses the row, zero elsewhere.

    An expert chooses the `count` rows of a request with the highest scores. A request with inactive
    sites keeps what was chosen when its step was recorded, `kept`, one request after another.
    """
    out, at = torch.zeros_like(scores), 0
    for span, rest in zip(spans.tolist(), rest_spans.tolist(), strict=True):
        own = pieces(out, span)
        number = sum(len(piece) for piece in own)
        if sum(rest[1::2]) > sum(rest[::2]):
            for piece in own:
                piece.copy_(kept[at : at + len(piece)])
                at += len(piece)
        elif number:
            chosen = join(pieces(scores, span), scores).topk(min(count, number), 0).indices
            whole = scores.new_zeros(number, scores.shape[1]).scatter_(0, chosen, 1)
            for piece, part in zip(own, whole.split([len(p) for p in own]), strict=True):
                piece.copy_(part)
    return out


choose = define(
    "choose(Tensor scores, Tensor kept, Tensor spans, Tensor rest_spans, int count) -> Tensor",
    _choose,
    lambda scores, *_: torch.empty_like(scores),
)


def _chosen(choice: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row and the expert of each choice, expert by expert, and each expert's end.

    `share` is the expected number of experts that choose a row.
    """
    picked = choice > 0.5
    expert, row = picked.t().nonzero().unbind(1)
    return row.clone(), expert.clone(), picked.sum(0).cumsum(0, dtype=torch.int32)


def _chosen_fake(choice: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    known = not isinstance(choice, FakeTensor)  # on the meta device the expected number is
    count = ceil(choice.shape[0] * share) if known else torch.library.get_ctx().new_dynamic_size()
    rows = choice.new_empty(count, dtype=torch.long)
    return rows, torch.empty_like(rows), choice.new_empty(choice.shape[1], dtype=torch.int32)


chosen = define(
    "chosen(Tensor choice, float share) -> (Tensor, Tensor, Tensor)", _chosen, _chosen_fake
)


def _counts(ends: Tensor) -> list[int]:
    """Return the number of rows of each expert."""
    stops = ends.tolist()
    return [b - a for a, b in zip([0, *stops], stops, strict=False)]


def _by_expert(rows: Tensor, ends: Tensor) -> list[Tensor]:
    """Return the rows of each expert."""
    return [part.clone() for part in rows.split(_counts(ends))]


def _by_expert_fake(rows: Tensor, ends: Tensor) -> list[Tensor]:
    if isinstance(ends, FakeTensor):
        context = torch.library.get_ctx()
        counts: list[IntLikeType] = [context.new_dynamic_size() for _ in range(len(ends))]
    else:  # on the meta device: equal ones
        first, more = divmod(len(rows), len(ends))
        counts = [first + (i < more) for i in range(len(ends))]
    return [rows.new_empty(count, *rows.shape[1:]) for count in counts]


by_expert = define("by_expert(Tensor rows, Tensor ends) -> Tensor[]", _by_expert, _by_expert_fake)


def _expert_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """(rows, D'): each row (D) times the matrix (D, D') of its expert."""
    out = rows.new_empty(len(rows), weights.shape[2])
    start = 0
    for expert, count in enumerate(_counts(ends)):
        if count:
            torch.mm(rows[start : start + count], weights[expert], out=out[start : start + count])
        start += count
    return out


expert_product = define(
    "expert_product(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
    _expert_product,
    lambda rows, weights, ends: rows.new_empty(rows.shape[0], weights.shape[2]),
)


@register_flop_formula(torch.ops.maskfx.expert_product)
def _expert_product_formula(
    rows: Sequence[int], weights: Sequence[int], *args: object, **kwargs: object
) -> int:
    return 2 * prod(rows) * weights[2]
