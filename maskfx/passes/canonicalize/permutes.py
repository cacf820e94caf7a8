"""Rewrites other spellings of a permute to a permute."""

from __future__ import annotations

from torch import fx

from maskfx.passes.context import PassContext, argument, node_at, node_value, op_name
from maskfx.passes.spelling import Speller

MOVES = frozenset({"movedim", "moveaxis"})
SWAPS = frozenset({"swapdims", "mT", "adjoint"})


def canonicalize_permutes(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite what moves or swaps axes to a permute.

    Before  y = movedim(x, 1, -1); z = mT(y)
    After   y = permute(x, [0, 2, 3, 1]); z = permute(y, [0, 1, 3, 2])
    Keeps   permutes and transposes, and the adjoint of complex numbers.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if name in MOVES | SWAPS:
            source = node_at(node, 0)
            if name == "adjoint" and node_value(source).is_complex():
                continue
            spell = Speller(graph, node)
            spell.replace(spell.permute(source, order_of(node)))
            count += 1
    return count


def order_of(node: fx.Node) -> list[int]:
    """Return, for each axis of the result, the axis of the source."""
    name, rank = op_name(node), node_value(node).dim()
    order = list(range(rank))
    if name in MOVES:
        sources, targets = (
            [d % rank for d in (value if isinstance(value, (list, tuple)) else [value])]
            for value in (argument(node, 1, "source"), argument(node, 2, "destination"))
        )
        left = [axis for axis in order if axis not in sources]
        pairs = dict(zip(targets, sources, strict=True))
        return [pairs[axis] if axis in pairs else left.pop(0) for axis in order]
    a, b = (
        (argument(node, 1, "dim0"), argument(node, 2, "dim1")) if name == "swapdims" else (-2, -1)
    )
    order[a], order[b] = order[b], order[a]
    return order
