"""Rewrites `narrow`, a part of an axis by its first place and its length, to a slice."""

from __future__ import annotations

import operator

from torch import fx

from maskfx.passes.context import PassContext, argument, aten, op_name
from maskfx.passes.spelling import Speller

Size = fx.Node | int  # a number, or the node of a symbolic size


def canonicalize_narrows(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite parts of an axis to slices.

    Before  y = narrow(x, 3, a, n)
    After   y = slice(x, 3, a, a + n)
    Keeps   slices.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) != "narrow":
            continue
        value, axis = argument(node, 0, "self"), argument(node, 1, "dim")
        start, length = argument(node, 2, "start"), argument(node, 3, "length")
        spell = Speller(graph, node)
        if isinstance(start, int) and start < 0:  # counted from the end
            start = total(spell, spell.size(value, axis), start)
        stop = total(spell, start, length)
        spell.replace(spell.emit(aten.slice.Tensor, value, axis, start, stop))
        count += 1
    return count


def total(spell: Speller, one: Size, other: Size) -> Size:
    """Return the sum of two sizes, each a number or the node of a symbolic one."""
    if one == 0:
        return other
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    return spell.emit(operator.add, one, other)
