"""Queries, keys and values of attention as rows of (heads, depth)."""

from __future__ import annotations

from math import prod

from torch import fx

from maskfx.ir.geometry.lanes import Lane, fixed_segment, node_shape
from maskfx.passes.context import Editor, aten, need_lane
from maskfx.passes.row_form import fixed_rows


def few_rows(edit: Editor, value: fx.Node, heads: int) -> tuple[fx.Node, tuple[str, ...]]:
    """Return a fixed number of queries of each request as rows, and their row set."""
    lane, (count, depth) = need_lane(value), node_shape(value)[-2:]
    segments = (fixed_segment(count),)
    if lane.has_batch:
        rows, sizes = fixed_rows(edit, value, -2)
        return heads_last(edit, rows, sizes, depth), segments
    own = prod(node_shape(value)[:-2])
    each = edit.emit(aten.reshape.default, value, [own, count, depth])
    each = edit.emit(aten.transpose.int, each, 0, 1)
    requests = edit.emit(aten.sym_size.int, edit.spans(segments), 0)
    wide = edit.emit(aten.expand.default, each, [requests, count, heads, depth])
    return edit.emit(aten.reshape.default, wide, [-1, heads, depth]), segments


def node_heads(lane: Lane) -> int:
    return prod(lane.features(i) for i in range(len(lane.dims) - 1))


def heads_of_keys(lane: Lane) -> int:
    return prod(lane.features(i) for i in range(len(lane.dims) - 2))


def heads_last(edit: Editor, rows: fx.Node, shape: list[int], depth: int) -> fx.Node:
    """Merge all head axes into one: (rows, heads, depth)."""
    return edit.reshape(rows, shape, [prod(shape) // depth, depth])


def token_rows(edit: Editor, value: fx.Node) -> tuple[fx.Node, tuple[str, ...]]:
    """Return keys or values as rows, and their row set."""
    lane = need_lane(value)
    if lane.kind == "rows":
        rows, depth = edit.rows(value), node_shape(value)[-1]
        if (each := lane.features(-2)) == 1:
            return heads_last(edit, rows, lane.row_shape(), depth), lane.segments
        at = lane.row_dim(-2)
        shape = [n for i, n in enumerate(lane.row_shape(), 1) if i != at]
        parts = [edit.emit(aten.select.int, rows, at, i) for i in range(each)]
        whole = edit.emit(aten.cat.default, [heads_last(edit, p, shape, depth) for p in parts])
        return whole, lane.segments * each
    rows, sizes = fixed_rows(edit, value, -2)
    segments = (fixed_segment(node_shape(value)[-2]),)
    return heads_last(edit, rows, sizes, node_shape(value)[-1]), segments
