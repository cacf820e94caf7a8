"""Rewrites places of an axis that are repeated one by one to a view of repeated values."""

from __future__ import annotations

import operator

from torch import fx

from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.spelling import Speller


def canonicalize_repeats(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite what repeats each place of an axis to an axis of its own that is joined to it.

    Before  y = repeat_interleave(x, 2, 3)                                  (x is [b, c, h, w])
    After   y = reshape(expand(unsqueeze(x, 4), [-1, -1, -1, -1, 2]), [b, c, h, 2 * w])
    Keeps   numbers of repeats that are values, and repeats of all places in a row.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) != "repeat_interleave":
            continue
        value, axis = argument(node, 0, "self"), argument(node, 2, "dim")
        times = argument(node, 1, "repeats")
        if not isinstance(times, int) or axis is None:
            continue
        rank = node_value(value).dim()
        axis %= rank
        spell = Speller(graph, node)
        sizes = [spell.size(value, i) for i in range(rank)]
        whole = sizes[axis]
        joined = whole * times if isinstance(whole, int) else spell.emit(operator.mul, whole, times)
        apart = spell.emit(aten.unsqueeze.default, value, axis + 1)
        shape = [-1] * (axis + 1) + [times] + [-1] * (rank - axis - 1)
        repeated = spell.emit(aten.expand.default, apart, shape)
        sizes[axis] = joined
        spell.replace(spell.emit(aten.reshape.default, repeated, sizes))
        count += 1
    return count
