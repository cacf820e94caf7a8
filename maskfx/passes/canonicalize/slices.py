"""Rewrites attention that is computed slice by slice to one attention."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from maskfx.ir.geometry.lanes import NotLaned, int_hint, node_shape
from maskfx.passes.context import PassContext, argument, aten, node_at, op_name

ATTENTION = "scaled_dot_product_attention"
Part = tuple[int, int]  # start and stop
Arguments = tuple[tuple[fx.node.Argument, ...], dict[str, fx.node.Argument]]


def canonicalize_slices(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite attention in slices of its batch and heads to one attention over all of them.

    Before  y = slice_scatter(zeros, attention(q[0:2], k[0:2], v[0:2]), 0, 0, 2)
            z = slice_scatter(y, attention(q[2:4], k[2:4], v[2:4]), 0, 2, 4)
    After   z = attention(q, k, v)
    Keeps   slices that leave a gap, lie elsewhere in q, k, v and z, or differ in scale or mask.
    """
    count, parts = 0, list[fx.Node]()
    for node in list(graph.nodes):
        if op_name(node) != "slice_scatter" or any(map(is_written, node.users)):
            continue
        found = whole_of(node)
        if found is None:
            continue
        parts += [written for _, written in writes(node)]
        with graph.inserting_before(node):
            new = graph.call_function(aten.scaled_dot_product_attention.default, *found)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        new.name = node.name
        count += 1
    if count:  # attention counts as random, so dead-code elimination keeps it
        graph.eliminate_dead_code()
    for part in parts:
        if not part.users:
            graph.erase_node(part)
    return count


def is_written(user: fx.Node) -> bool:
    """Return True if the user continues the chain of writes."""
    return op_name(user) == "slice_scatter"


def whole_of(last: fx.Node) -> Arguments | None:
    """Return the arguments of the one attention that this chain of writes computes, or None."""
    parts: list[Part] = []
    whole: Arguments | None = None
    for part, written in writes(last):
        read = sources(written, part, node_shape(last)[0])
        if read is None or whole is not None and read != whole:
            return None
        whole = read
        parts.append(part)
    at = 0
    for start, stop in sorted(parts):
        if start != at:
            return None
        at = stop
    return whole if at == node_shape(last)[0] else None


def writes(node: fx.Node) -> Iterator[tuple[Part, fx.Node]]:
    """Yield the range and the value of each write along the first axis, the last write first."""
    while op_name(node) == "slice_scatter":
        part = part_of(node, 2)
        if part is None:
            return
        written = node_at(node, 1)
        yield part, node_at(written, 1) if op_name(written) == "copy" else written
        node = node_at(node, 0)


def sources(node: fx.Node, part: Part, size: int) -> Arguments | None:
    """Return the arguments whose slices `part` this attention reads, or None."""
    if op_name(node) != ATTENTION or any(value is not None for value in node.args[3:]):
        return None
    found = []
    for place in range(3):
        cut = untransposed(node_at(node, place))
        if op_name(cut) != "slice" or part_of(cut, 1) != part:
            return None
        if node_shape(node_at(cut, 0))[0] != size:
            return None
        found.append(node_at(cut, 0))
    scale = node.kwargs.get("scale")
    if any(value is not None for name, value in node.kwargs.items() if name != "scale"):
        return None
    return tuple(found), {"scale": scale}


def untransposed(node: fx.Node) -> fx.Node:
    """Skip pairs of transposes that cancel each other."""
    while op_name(node) == "transpose" and op_name(inner := node_at(node, 0)) == "transpose":
        axes = [
            {argument(n, place, "dim") % len(node_shape(n)) for place in (1, 2)}
            for n in (node, inner)
        ]
        if axes[0] != axes[1]:
            break
        node = node_at(inner, 0)
    return node


def part_of(node: fx.Node, first: int) -> Part | None:
    """Return the range of a slice of the first axis, or None if it isn't constant."""
    start, stop = argument(node, first + 1, "start"), argument(node, first + 2, "end")
    sliced = node if op_name(node) == "slice_scatter" else node.args[0]
    try:
        whole = node_shape(sliced)[0]  # type: ignore[arg-type]
    except NotLaned:  # its length depends on data
        return None
    start, stop = 0 if start is None else start, whole if stop is None else stop
    if argument(node, first, "dim", 0) != 0 or argument(node, first + 3, "step", 1) != 1:
        return None
    if isinstance(start, fx.Node) or isinstance(stop, fx.Node):
        return None
    begin, end = int_hint(start), min(int_hint(stop), whole)
    return (begin, end) if 0 <= begin < end else None
