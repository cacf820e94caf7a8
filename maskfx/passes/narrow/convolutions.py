"""Narrows convolutions and pools over sites: gather the window's rows, then multiply once."""

from __future__ import annotations

from torch import fx

from maskfx.ir.geometry.lanes import Lane, Y, node_shape
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.sources import Subsites
from maskfx.passes.context import (
    Editor,
    PassContext,
    aten,
    need_lane,
    node_value,
    op_name,
)
from maskfx.passes.geometry import Geometry, patch_of, transposed_geometry, window_geometry
from maskfx.passes.operators import WINDOWS
from maskfx.passes.row_form import is_rows, mixed, pick_up


def narrow_convolutions(graph: fx.Graph, ctx: PassContext) -> int:
    """Compute a convolution at active sites only, with the cached halo around them.

    Before  y = conv2d(x, w)                       (w is [out, in, 3, 3])
    After   y = linear(gather(rows, halo, neighbours), w')   (w' is [out, 9 * in])
    and     y = conv_transpose2d(x, w, stride=2)    (w is [in, out, 2, 2])
    becomes y = index_select(linear(rows, w'), 0, sub-sites)    (w' is [2 * 2 * out, in])
    and     y = max_pool2d(x, 3)
    becomes y = amax(gather(rows, halo, neighbours), 1)
    Keeps   1x1 convolutions, which are linear layers.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if not is_rows(node) or name not in WINDOWS | {"conv_transpose2d", "conv1d"}:
            continue
        edit = Editor(graph, ctx, node)
        if name == "conv_transpose2d" and patch_of(node) is not None:
            spread_out(edit, node)
        else:
            gathered(edit, node)
        count += 1
    return count


def gathered(edit: Editor, node: fx.Node) -> None:
    """Gather what each window reads, and reduce it."""
    transposed, name = op_name(node) == "conv_transpose2d", op_name(node)
    geometry = (transposed_geometry if transposed else window_geometry)(node, need_lane)
    window = geometry.window(level_of(geometry.lane), level_of(need_lane(node)))
    apart, channels = geometry.lane.features(0), geometry.lane.features(1)
    rows = edit.reshape(edit.rows(geometry.source), geometry.lane.row_shape(), [apart * channels])
    picked = pick_up(edit, rows, apart * channels, window)
    if apart > 1:
        picked = set_apart(edit, picked, geometry, apart, channels)
    if name == "im2col":
        out = unfolded(edit, picked, geometry, channels)
    elif name in ("avg_pool2d", "max_pool2d"):
        out = pool(edit, picked, geometry, channels, window)
    else:
        out = convolve(edit, picked, geometry, transposed)
    if node_shape(node)[1] == 1:
        out = edit.emit(aten.squeeze.dims, out, [1])
    if apart > 1:
        out = edit.emit(aten.unflatten.int, out, 0, [-1, apart])
    edit.replace(out)


def set_apart(edit: Editor, picked: fx.Node, g: Geometry, apart: int, channels: int) -> fx.Node:
    """Return windows as one row for each of the features that lie along the batch.

    The same weights apply to each, as to each batch element.
    """
    places = g.depth * g.kernel[0] * g.kernel[1]
    wide = edit.emit(aten.unflatten.int, picked, 1, [places, apart, channels])
    each = edit.emit(aten.permute.default, wide, [0, 2, 1, 3])
    joined = edit.emit(aten.flatten.using_ints, each, 2, 3)
    return edit.emit(aten.flatten.using_ints, joined, 0, 1)


def unfolded(edit: Editor, picked: fx.Node, g: Geometry, channels: int) -> fx.Node:
    """Return the window of each row, channel by channel."""
    wide = edit.emit(aten.unflatten.int, picked, 1, [g.kernel[0] * g.kernel[1], channels])
    return edit.emit(aten.flatten.using_ints, edit.emit(aten.transpose.int, wide, 1, 2), 1, 2)


def spread_out(edit: Editor, node: fx.Node) -> None:
    """Compute each coarse row's patch by a linear layer, then select the patch's active sites."""
    source, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else None
    assert isinstance(source, fx.Node)
    assert isinstance(weight, fx.Node)
    patch, lane = patch_of(node), need_lane(source)
    assert patch is not None
    into, out = node_value(weight).shape[:2]
    flat = edit.derived(weight, (2, 3, 1, 0), (patch * patch * out, into))
    rows = edit.reshape(edit.rows(source), lane.row_shape(), [into])
    patches = edit.emit(aten.reshape.default, edit.emit(aten.linear.default, rows, flat), [-1, out])
    coarse, fine = level_of(lane), level_of(need_lane(node))
    table = edit.input(f"subsites_{coarse}_{fine}", Subsites(coarse, fine, patch))
    picked = edit.emit(aten.index_select.default, patches, 0, table)
    picked = picked if bias is None else edit.emit(aten.add.Tensor, picked, bias)
    edit.replace(edit.reshape(picked, [out], need_lane(node).row_shape()))


def level_of(lane: Lane) -> int:
    return next(a.level for a in lane.atoms() if isinstance(a, Y))


def pool(edit: Editor, picked: fx.Node, g: Geometry, channels: int, window: Window) -> fx.Node:
    wide = edit.emit(aten.unflatten.int, picked, 1, [g.kernel[0] * g.kernel[1], channels])
    if op_name(edit.node) == "max_pool2d":
        return edit.emit(aten.amax.default, wide, [1])
    return mixed(edit, wide, window) if g.counts else edit.emit(aten.mean.dim, wide, [1])


def convolve(edit: Editor, picked: fx.Node, g: Geometry, transposed: bool = False) -> fx.Node:
    node = edit.node
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    out, each = node_value(weight).shape[:2]
    if transposed and g.groups == 1:  # its weight is [in, out, ...]
        flat = edit.derived(weight, (1, 2, 3, 0), (each, g.kernel[0] * g.kernel[1] * out))
        return edit.linear(picked, flat, bias)
    taps = g.depth * g.kernel[0] * g.kernel[1]
    places = tuple(range(2, node_value(weight).dim()))  # frames, image rows, image columns
    if g.groups == 1:
        flat = edit.derived(weight, (0, *places, 1), (out, taps * each))
        return edit.linear(picked, flat, bias)
    if each == 1 and out == g.groups:  # depthwise
        flat = edit.derived(weight, (*places, 1, 0), (taps, out))
        wide = edit.emit(aten.unflatten.int, picked, 1, [taps, out])
        summed = edit.emit(aten.sum.dim_IntList, edit.emit(aten.mul.Tensor, wide, flat), [1])
        return summed if bias is None else edit.emit(aten.add.Tensor, summed, bias)
    if transposed:
        into = out // g.groups
        flat = edit.derived(weight, (2, 3, 0, 1), (taps, g.groups, into, each))
        flat = edit.emit(aten.permute.default, flat, [1, 0, 2, 3])
        flat = edit.emit(aten.flatten.using_ints, flat, 1, 2)
    else:
        into = each
        flat = edit.derived(weight, (0, *places, 1), (g.groups, out // g.groups, taps * each))
        flat = edit.emit(aten.transpose.int, flat, 1, 2)
    wide = edit.emit(aten.unflatten.int, picked, 1, [taps, g.groups, into])
    grouped = edit.emit(
        aten.flatten.using_ints, edit.emit(aten.permute.default, wide, [2, 0, 1, 3]), 2, 3
    )
    mixed = edit.emit(aten.bmm.default, grouped, flat)
    joined = edit.emit(aten.flatten.using_ints, edit.emit(aten.transpose.int, mixed, 0, 1), 1, 2)
    return joined if bias is None else edit.emit(aten.add.Tensor, joined, bias)
