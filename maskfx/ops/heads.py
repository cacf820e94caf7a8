"""Exchanges of attention heads: each rank attends with all rows for its share of the heads.

A *unit* is a row's part of one head of keys: of keys and values that head, of queries the heads
that read it. Tables count units, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from maskfx.ops.base import define
from maskfx.ops.exchange import exchanged


def units_of(rows: Tensor, heads: int) -> Tensor:
    """Return (rows, heads of the value, depth) as (units, heads of a unit, depth)."""
    return rows.reshape(len(rows) * heads, rows.shape[1] // heads, *rows.shape[2:])


def _to_heads(
    values: Sequence[Tensor], heads: int, send: Tensor, counts: Tensor, order: Tensor, number: int
) -> list[Tensor]:
    """Return the units of this rank's heads, request by request and head by head.

    Args:
        values: (rows, heads, depth): queries, keys and values; they travel in one message.
        heads: The number of heads of keys.
        send: The units that other ranks read, one rank after another.
        counts: (2, ranks): the number of units for each rank, and of each.
        order: For each unit of the result, its place in [own units | received units].
        number: The exchange's number.
    """
    return exchanged([units_of(value, heads) for value in values], send, counts, order, number)


to_heads = define(
    "to_heads(Tensor[] values, int heads, Tensor send, Tensor counts, Tensor order, int number) "
    "-> Tensor[]",
    _to_heads,
    lambda values, heads, send, counts, order, number: [
        value.new_empty(order.shape[0], value.shape[1] // heads, *value.shape[2:])
        for value in values
    ],
)


def _from_heads(
    units: Tensor, heads: int, send: Tensor, counts: Tensor, order: Tensor, number: int
) -> Tensor:
    """Return (rows, heads, depth): all heads of this rank's rows."""
    (found,) = exchanged([units], send, counts, order, number)
    return found.reshape(len(order) // heads, heads * units.shape[1], *units.shape[2:])


from_heads = define(
    "from_heads(Tensor units, int heads, Tensor send, Tensor counts, Tensor order, int number) "
    "-> Tensor",
    _from_heads,
    lambda units, heads, send, counts, order, number: units.new_empty(
        order.shape[0] // heads, heads * units.shape[1], *units.shape[2:]
    ),
)
