"""Rewrites joins of a value's own parts in another order to rolls."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from maskfx.ir.geometry.lanes import NotLaned, int_hint
from maskfx.ir.geometry.other_sizes import SizeExpr
from maskfx.passes.canonicalize.writes import equal, expression
from maskfx.passes.context import PassContext, argument, aten, node_at, op_name
from maskfx.passes.spelling import Speller

JOINS = frozenset({"cat", "concat", "concatenate"})
SPLITS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split"})
Piece = tuple[fx.Node, SizeExpr, SizeExpr]  # a value, and the part of it from start to stop


def canonicalize_rolls(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite joins of all parts of a value, of which the first follows the last, to rolls.

    Before  y = cat([slice(x, 2, s, end), slice(x, 2, 0, s)], 2)
    After   y = roll(x, [-s], [2])
    and     a, b = chunk(x, 2, 3); y = cat([b, a], 3)
    becomes y = roll(x, [-n], [3])              (n is the size of a)
    Keeps   joins that leave a part out, repeat one, or change the parts' order otherwise, and
            those of tokens or features.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in JOINS:
            continue
        axis = int(argument(node, 1, "dim", 0)) % node.meta["val"].dim()
        parts: Any = node.args[0]
        found = rolled(parts, axis)
        if found is None or node.meta["val"].dtype != found[0].meta["val"].dtype:
            continue
        value, back, moved = found
        if not is_line(ctx, value.meta["val"].shape[axis]):
            continue
        spell = Speller(graph, node)
        shift = spell.number(back if isinstance(back, int) else -moved)
        if shift is None:
            spell.drop()
            continue
        spell.replace(spell.emit(aten.roll.default, value, [shift], [axis]))
        count += 1
    return count


def is_line(ctx: PassContext, size: object) -> bool:
    """Return True for the size of the picture's rows or columns, not that of tokens or features.

    The number of a video's frames may be that of features, which are rolled then.
    """
    if not isinstance(size, torch.SymInt):
        return size == ctx.pyramid.frames > 1
    lines = [getattr(ctx.symbols.get(role), "free_symbols", None) for role in ("y", "x")]
    return size.node.expr.free_symbols in lines and "**" not in str(size.node.expr)


def rolled(parts: Sequence[fx.Node], axis: int) -> tuple[fx.Node, SizeExpr, SizeExpr] | None:
    """Return the value whose parts these are, and the sizes of those up to its end, and from there.

    Return None if the parts aren't all of the value, in a circle.
    """
    pieces = [piece for part in parts if (piece := piece_of(part, axis)) is not None]
    if len(pieces) < len(parts) or len({value for value, *_ in pieces}) != 1:
        return None
    value, begin, _ = pieces[0]
    whole = expression(value.meta["val"].shape[axis])
    ends = [number for number, (*_, stop) in enumerate(pieces, 1) if equal(stop, whole)]
    follow = [*pieces[1:], pieces[0]]
    for (*_, stop), (_, start, _) in zip(pieces, follow, strict=True):
        if not equal(start, 0 if equal(stop, whole) else stop):
            return None
    if len(ends) != 1 or equal(begin, 0):
        return None
    sizes = [expression(part.meta["val"].shape[axis]) for part in parts]
    return value, sum(sizes[: ends[0]]), sum(sizes[ends[0] :])


def piece_of(node: fx.Node, axis: int) -> Piece | None:
    """Return which part of a value along the axis a node is, or None."""
    value = node.args[0] if node.args else None
    if not isinstance(value, fx.Node):
        return None
    rank = node.meta["val"].dim()
    if node.target is operator.getitem and op_name(value) in SPLITS:
        source = node_at(value, 0)
        index = argument(node, 1, "b")
        if int(argument(value, 2, "dim", 0)) % rank != axis:
            return None
        sizes = [expression(part.shape[axis]) for part in value.meta["val"]]
        first = sum(sizes[:index])
        return source, first, first + sizes[index]
    if op_name(node) != "slice" or argument(node, 4, "step", 1) != 1:
        return None
    if int(argument(node, 1, "dim", 0)) % rank != axis:
        return None
    try:
        start = place(argument(node, 2, "start"), expression(value.meta["val"].shape[axis]))
        return value, start, start + expression(node.meta["val"].shape[axis])
    except NotLaned:  # it depends on data
        return None


def place(start: fx.Node | int | None, whole: SizeExpr) -> SizeExpr:
    """Return the place at which a slice begins; one below zero is counted from the end."""
    value = start.meta["val"] if isinstance(start, fx.Node) else start or 0
    return expression(value) + (whole if int_hint(value) < 0 else 0)
