"""Narrows linear layers, 1x1 convolutions and embeddings to rows."""

from __future__ import annotations

from torch import fx

from maskfx.ir.geometry.lanes import node_shape
from maskfx.passes.context import (
    Editor,
    PassContext,
    aten,
    need_lane,
    node_value,
    op_name,
)
from maskfx.passes.geometry import window_geometry
from maskfx.passes.operators import CONVOLUTIONS
from maskfx.passes.row_form import is_rows


def narrow_linear(graph: fx.Graph, ctx: PassContext) -> int:
    """Run linear layers on rows.

    Before  y = conv2d(x, w)           (w is [out, in, 1, 1])
    After   y = linear(rows, w')       (w' is [out, in])
    and     y = embedding(w, numbers)  (numbers are [b, h, w])
    becomes y = embedding(w, rows)
    Keeps   larger, strided or grouped convolutions.
    """
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_rows(node):
            continue
        edit = Editor(graph, ctx, node)
        if op_name(node) == "linear":
            lane = need_lane(node.args[0])
            rows = edit.rows(node.args[0])
            if lane.features(-1) == 1:
                rows = edit.emit(aten.unsqueeze.default, rows, -1)
            bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
            out = edit.linear(rows, node.args[1], bias)
            if need_lane(node).features(-1) == 1:
                out = edit.emit(aten.squeeze.dims, out, [-1])
            edit.replace(out)
            count += 1
        elif op_name(node) == "embedding":
            found = edit.emit(node.target, node.args[0], edit.rows(node.args[1]))
            edit.replace(edit.reshape(found, embedded(node), need_lane(node).row_shape()))
            count += 1
        elif op_name(node) == "conv1d":
            geometry = window_geometry(node, need_lane)
            if not geometry.pointwise or geometry.groups != 1:
                continue
            edit.replace(along_tokens(edit, node))
            count += 1
        elif op_name(node) in CONVOLUTIONS:
            geometry = window_geometry(node, need_lane)
            if not geometry.pointwise or geometry.groups != 1:
                continue
            weight = node.args[1]
            assert isinstance(weight, fx.Node)
            wout, win = node_value(weight).shape[:2]
            rows = edit.rows(geometry.source)
            if geometry.lane.features(1) == 1:
                rows = edit.emit(aten.unsqueeze.default, rows, 1)
            flat = edit.derived(weight, tuple(range(node_value(weight).dim())), (wout, win))
            out = edit.linear(rows, flat, node.args[2] if len(node.args) > 2 else None)
            if node_shape(node)[1] == 1:
                out = edit.emit(aten.squeeze.dims, out, [1])
            edit.replace(out)
            count += 1
    return count


def along_tokens(edit: Editor, node: fx.Node) -> fx.Node:
    """Multiply the features of each token: a conv1d of kernel size one."""
    source, weight = node.args[:2]
    rows, lane = edit.rows(source), need_lane(source)  # type: ignore[arg-type]
    out, into = node_value(weight).shape[:2]  # type: ignore[arg-type]
    rows = edit.reshape(rows, lane.row_shape(), [into])
    flat = edit.derived(weight, (0, 1, 2), (out, into))  # type: ignore[arg-type]
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return edit.reshape(edit.linear(rows, flat, bias), [out], need_lane(node).row_shape())


def embedded(node: fx.Node) -> list[int]:
    """Return the row shape of embedded vectors, with their axis even if its size is one."""
    return [*need_lane(node.args[1]).row_shape(), node_shape(node)[-1]]
