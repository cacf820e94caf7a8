"""Rewrites places of an axis that are repeated one by one to a view of repeated values."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.spelling import Speller


def canonicalize_repeats(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite what repeats each place of an axis to an axis of its own that is joined to it.

    Before  y = repeat_interleave(x, 2, 3)                                  (x is [b, c, h, w])
    After   y = reshape(expand(unsqueeze(x, 4), [-1, -1, -1, -1, 2]), [b, c, h, 2 * w])
    and     y = repeat(x, [b, 1, 1])                                        (x is [h * w, 4, 4])
    becomes y = reshape(expand(unsqueeze(x, 0), [b, -1, -1, -1]), [b * h * w, 4, 4])
    Keeps   numbers of repeats that are values, and repeats of a fixed number of places in a row.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) == "repeat":
            count += in_a_row(Speller(graph, node), node)
            continue
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


def in_a_row(spell: Speller, node: fx.Node) -> bool:
    """Replace the repeats of an axis by an axis before it; return False if all sizes are fixed."""
    value, times = argument(node, 0, "self"), argument(node, 1, "repeats")
    shape = node_value(value).shape
    own = len(times) - len(shape)
    if not any(is_tiled(shape[axis], times[own + axis]) for axis in range(len(shape))):
        return False
    wide, sizes, joined = list[Any](times[:own]), list[Any](times[:own]), value
    for axis, size in enumerate(shape):
        many, whole = times[own + axis], spell.size(value, axis)
        if isinstance(size, int) and size == 1:
            wide.append(many)
            sizes.append(many)
        elif isinstance(many, int) and many == 1:
            wide.append(-1)
            sizes.append(whole)
        else:
            joined = spell.emit(aten.unsqueeze.default, joined, len(wide) - own)
            wide += [many, -1]
            both = isinstance(many, int) and isinstance(whole, int)
            sizes.append(many * whole if both else spell.emit(operator.mul, many, whole))
    spell.replace(
        spell.emit(aten.reshape.default, spell.emit(aten.expand.default, joined, wide), sizes)
    )
    return True


def is_tiled(size: object, times: object) -> bool:
    """Return True if an axis is repeated, and it or the number of repeats isn't fixed."""
    fixed = isinstance(size, int), isinstance(times, int)
    return not all(fixed) and not (fixed[0] and size == 1) and not (fixed[1] and times == 1)
