"""Linear layers whose weight or bias is a request's own, for some of the requests of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from maskfx.ops.base import define

Group = Sequence[int]  # first row, end of rows, index of the weight, index of the bias


def _own_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    biases: Tensor,
    groups: Tensor,
) -> Tensor:
    """Multiply each row by its request's weight, and add its request's bias.

    Args:
        rows: (rows, ..., inputs).
        weight: (outputs, inputs), of requests without one of their own.
        bias: (outputs), of requests without one of their own.
        weights: (several, outputs, inputs).
        biases: (several, outputs).
        groups: (groups, 4) on the host, in the order of rows: first and end of rows that are next
            to each other, and the indices of their weight and bias. An index past the end stands
            for the common one.
    """
    table: list[Group] = groups.tolist()
    if not table:
        return F.linear(rows, weight, bias)
    out = rows.new_empty(*rows.shape[:-1], weight.shape[0])
    done = 0
    for start, stop, w, b in (*table, (len(rows), len(rows), len(weights), len(biases))):
        if done < start:
            out[done:start] = F.linear(rows[done:start], weight, bias)
        if start < stop:
            own = weights[w] if w < len(weights) else weight
            added = biases[b] if b < len(biases) else bias
            out[start:stop] = F.linear(rows[start:stop], own, added)
        done = stop
    return out


def _fake(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    biases: Tensor,
    groups: Tensor,
) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


own_linear = define(
    "own_linear(Tensor rows, Tensor weight, Tensor? bias, Tensor weights, Tensor biases, "
    "Tensor groups) -> Tensor",
    _own_linear,
    _fake,
)


@register_flop_formula(torch.ops.maskfx.own_linear, get_raw=True)
def _own_linear_formula(rows: Tensor, weight: Tensor, *args: object, **kwargs: object) -> int:
    return 2 * rows.numel() * weight.shape[0]
