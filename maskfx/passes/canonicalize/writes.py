"""Rewrites a value that is filled part by part to the concatenation of the parts."""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.ir.geometry.other_sizes import SizeExpr
from maskfx.passes.context import PassContext, argument, aten, op_name
from maskfx.passes.drop_identity_ops import same_shape
from maskfx.passes.spelling import Speller

if TYPE_CHECKING:
    import sympy

Part = tuple[SizeExpr, SizeExpr, fx.Node]  # start, stop, and the value written there


def canonicalize_writes(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite writes that cover an axis, part after part, to a concatenation.

    Before  y = slice_scatter(zeros, text, 1, 0, n)      (n is the length of the text)
            z = slice_scatter(y, image, 1, n, n + m)
    After   z = cat([text, image], 1)
    and     y = slice_scatter(x, z, 0, 0, end)      (all of the axis is written)
    becomes z
    and     y = select_scatter(x, z, 1, 2)
    becomes y = slice_scatter(x, unsqueeze(z, 1), 1, 2, 3)
    Keeps   writes that leave a gap or overlap, and those that convert their values.
    """
    chosen = [node for node in graph.nodes if op_name(node) == "select_scatter"]
    for node in chosen:
        write_slice(graph, node)
    writes = [node for node in graph.nodes if op_name(node) == "slice_scatter"]
    complete = [node for node in writes if is_complete(node)]
    for node in complete:
        node.replace_all_uses_with(argument(node, 1, "src"))
        graph.erase_node(node)
    count = len(complete) + len(chosen)
    for node in writes:
        if node in complete or is_continued(node):
            continue
        axis = axis_of(node)
        values = in_order(parts_of(node, axis), size_of(node, axis))
        if len(values) < 2:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(aten.cat.default, (values, axis))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    return count


def write_slice(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a write to one place of an axis by a write to a slice."""
    axis, place = argument(node, 2, "dim"), argument(node, 3, "index")
    spell = Speller(graph, node)
    written = argument(node, 1, "src")
    value = source_of(written)
    if value is None or value.meta["val"].dtype != written.meta["val"].dtype:
        value = written
    wide = spell.emit(aten.unsqueeze.default, value, axis)
    following = spell.emit(operator.add, place, 1) if isinstance(place, fx.Node) else place + 1
    stop = sys.maxsize if isinstance(place, int) and place == -1 else following
    spell.replace(spell.emit(aten.slice_scatter.default, node.args[0], wide, axis, place, stop))


def axis_of(write: fx.Node) -> int:
    return int(argument(write, 2, "dim", 0)) % int(write.meta["val"].dim())


def is_complete(write: fx.Node) -> bool:
    """Return True if all of the axis is written, with values of the same type."""
    value = argument(write, 1, "src").meta["val"]
    whole = write.meta["val"]
    return same_shape(value, whole) and value.dtype == whole.dtype


def is_continued(node: fx.Node) -> bool:
    """Return True if another part is written into the value."""
    return any(op_name(user) == "slice_scatter" and user.args[0] is node for user in node.users)


def size_of(node: fx.Node, axis: int) -> SizeExpr:
    return expression(node.meta["val"].shape[axis])


def parts_of(last: fx.Node, axis: int) -> list[Part]:
    """Return what a chain of writes along this axis writes, the last write first."""
    parts: list[Part] = []
    node: fx.node.Argument = last
    while isinstance(node, fx.Node) and op_name(node) == "slice_scatter":
        if axis_of(node) != axis:
            break
        value = source_of(argument(node, 1, "src"))
        if value is None or argument(node, 5, "step", 1) != 1:
            return []
        whole = size_of(node, axis)
        start = bound(argument(node, 3, "start"), 0, whole)
        stop = bound(argument(node, 4, "end"), whole, whole)
        parts.append((start, stop, value))
        node = node.args[0]
    if any(value.meta["val"].dtype != last.meta["val"].dtype for *_, value in parts):
        return []
    return parts


def source_of(written: object) -> fx.Node | None:
    """Return what is written; of a copy into a slice, the value that is copied."""
    if not isinstance(written, fx.Node):
        return None
    if op_name(written) != "copy":
        return written
    place, value = written.args[:2]
    if not isinstance(value, fx.Node) or not isinstance(place, fx.Node):
        return None
    return value if same_shape(place.meta["val"], value.meta["val"]) else None


def in_order(parts: list[Part], whole: SizeExpr) -> list[fx.Node]:
    """Return the parts' values along the axis; [] unless they cover all of it, none of it twice."""
    at: SizeExpr = 0
    found: list[fx.Node] = []
    left = list(parts)
    while left:
        following = next((part for part in left if equal(part[0], at)), None)
        if following is None:
            return []
        left.remove(following)
        _, at, value = following
        found.append(value)
    return found if equal(at, whole) else []


def equal(one: SizeExpr, other: SizeExpr) -> bool:
    """Return True if two sizes are equal for any values of their symbols."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    difference: sympy.Expr = one - other
    return bool(difference.expand() == 0)


def bound(value: fx.Node | IntLikeType | None, default: SizeExpr, whole: SizeExpr) -> SizeExpr:
    """Return a slice's bound as a size; a bound beyond the end is the end."""
    if value is None:
        return default
    found = expression(value.meta["val"] if isinstance(value, fx.Node) else value)
    if isinstance(found, int) and isinstance(whole, int):
        return min(found, whole) if found >= 0 else whole + found
    if isinstance(found, int) and found >= 2**62:
        return whole
    return found


def expression(size: IntLikeType) -> SizeExpr:
    """Return a symbolic size's expression, and any other size as an int."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = size.node.expr
    return int(expr) if expr.is_Integer else expr
