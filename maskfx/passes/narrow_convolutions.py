"""Convolutions and pools over sites: gather the window's rows, then one matrix product."""

from __future__ import annotations

from torch import fx

from maskfx.lanes import Window, Y, node_shape
from maskfx.passes.context import (
    Editor,
    PassContext,
    Unsupported,
    aten,
    need_lane,
    node_value,
    op_name,
)
from maskfx.passes.operators import Geometry, window_geometry
from maskfx.passes.rows import is_rows, pick_up


def narrow_convolutions(graph: fx.Graph, ctx: PassContext) -> int:
    """Compute a convolution at active sites only; the cached halo stands around them.

    Before  y = conv2d(x, w)                       (w is [out, in, 3, 3])
    After   y = linear(gather(rows, halo, neighbours), w')   (w' is [out, 9 * in])
    Keeps   1x1 convolutions, which are linear layers.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in ("conv2d", "avg_pool2d") or not is_rows(node):
            continue
        edit = Editor(graph, ctx, node)
        geometry = window_geometry(node, need_lane)
        window = make_window(node, geometry)
        channels = geometry.lane.features(1)
        shape = geometry.lane.row_shape()
        rows = edit.reshape(edit.rows(geometry.source), shape, [channels])
        picked = pick_up(edit, rows, channels, window)
        out = (
            pool(edit, picked, geometry, channels)
            if op_name(node) == "avg_pool2d"
            else convolve(edit, picked, geometry)
        )
        if node_shape(node)[1] == 1:
            out = edit.emit(aten.squeeze.dims, out, [1])
        edit.replace(out)
        count += 1
    return count


def make_window(node: fx.Node, g: Geometry) -> Window:
    source, target = (
        next(a.level for a in lane.atoms() if isinstance(a, Y))
        for lane in (g.lane, need_lane(node))
    )
    return Window(source, target, g.kernel, g.stride, g.before, g.dilation)


def pool(edit: Editor, picked: fx.Node, g: Geometry, channels: int) -> fx.Node:
    wide = edit.emit(aten.unflatten.int, picked, 1, [g.kernel[0] * g.kernel[1], channels])
    return edit.emit(aten.mean.dim, wide, [1])


def convolve(edit: Editor, picked: fx.Node, g: Geometry) -> fx.Node:
    node = edit.node
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    bias = node.args[2] if len(node.args) > 2 else None
    if weight.op != "get_attr":
        raise Unsupported(node, "its weight is computed, not a parameter")
    out, each = node_value(weight).shape[:2]
    taps = g.kernel[0] * g.kernel[1]
    if g.groups == 1:
        flat = edit.derived(weight, (0, 2, 3, 1), (out, taps * each))
        return edit.emit(aten.linear.default, picked, flat, bias)
    if each == 1 and out == g.groups:  # depthwise
        flat = edit.derived(weight, (2, 3, 1, 0), (taps, out))
        wide = edit.emit(aten.unflatten.int, picked, 1, [taps, out])
        summed = edit.emit(aten.sum.dim_IntList, edit.emit(aten.mul.Tensor, wide, flat), [1])
        return summed if bias is None else edit.emit(aten.add.Tensor, summed, bias)
    per = out // g.groups
    flat = edit.derived(weight, (0, 2, 3, 1), (g.groups, per, taps * each))
    wide = edit.emit(aten.unflatten.int, picked, 1, [taps, g.groups, each])
    grouped = edit.emit(
        aten.flatten.using_ints, edit.emit(aten.permute.default, wide, [2, 0, 1, 3]), 2, 3
    )
    mixed = edit.emit(aten.bmm.default, grouped, edit.emit(aten.transpose.int, flat, 1, 2))
    joined = edit.emit(aten.flatten.using_ints, edit.emit(aten.transpose.int, mixed, 0, 1), 1, 2)
    return joined if bias is None else edit.emit(aten.add.Tensor, joined, bias)
