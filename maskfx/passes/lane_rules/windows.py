"""Lane rules for operators between image levels: convolutions, pools, resampling, padding."""

from __future__ import annotations

from torch import fx

from maskfx.ir.lanes import Dim, Feature, Lane, NotLaned, X, Y, node_shape
from maskfx.ir.pyramid import Level
from maskfx.passes.context import argument
from maskfx.passes.lane_rules.marker import Marker, Rules, need_constant
from maskfx.passes.operators import CONVOLUTIONS, patch_of, window_geometry

rule = Rules()


@rule(*CONVOLUTIONS)
def convolution(m: Marker, node: fx.Node) -> Lane:
    geometry = window_geometry(node, m.need)
    need_constant(m, node.args[1:3])
    source = picture_level(geometry.lane, "it convolves")
    level = m.ctx.pyramid.derive(Level(parent=source, **geometry.level()))
    return resized(m, node, geometry.lane, level)


def picture_level(lane: Lane, what: str) -> int:
    """Return the level of a (batch, channels, rows, columns) value, perhaps with one frame."""
    *front, y, x = lane.dims
    plain = len(front) in (2, 3) and lane.is_feature_dim(1) and not any(front[2:])
    if not plain or len(y) != 1 or len(x) != 1:
        raise NotLaned(f"{what} {lane}")
    if not isinstance(y[0], Y) or not isinstance(x[0], X):
        raise NotLaned(f"{what} {lane}")
    return y[0].level


def resized(m: Marker, node: fx.Node, lane: Lane, level: int) -> Lane:
    """Return the lane of an image at another level, with the result's number of channels."""
    out = node_shape(node)
    if m.ctx.pyramid.hints[level] != (out[-2], out[-1]):
        raise NotLaned(f"its output {out} fits no level")
    channels: Dim = (Feature(out[1]),) if out[1] != 1 else ()
    return Lane((lane.dims[0], channels, *lane.dims[2:-2], (Y(level),), (X(level),)))


@rule("conv_transpose2d")
def conv_transpose2d(m: Marker, node: fx.Node) -> Lane:
    """Map each site to a separate patch; overlapping patches aren't narrowed."""
    lane = m.need(node.args[0])
    need_constant(m, node.args[1:3])
    source, patch = picture_level(lane, "it convolves"), patch_of(node)
    return resized(m, node, lane, m.ctx.pyramid.derive(Level(parent=source, times=(patch, patch))))


@rule("avg_pool2d")
def avg_pool2d(m: Marker, node: fx.Node) -> Lane:
    found: Lane = convolution(m, node)
    return found


@rule("upsample_nearest2d", "_upsample_nearest_exact2d")
def upsample(m: Marker, node: fx.Node) -> Lane:
    lane, out = m.need(node.args[0]), node_shape(node)
    if len(lane.dims) != 4 or len(lane.dims[2]) != 1 or not isinstance(lane.dims[2][0], Y):
        raise NotLaned(f"it resamples {lane}")
    source = lane.dims[2][0].level
    have = m.ctx.pyramid.hints[source]
    if have == (out[2], out[3]):
        return lane
    level = m.ctx.pyramid.level_of((out[2], out[3]))
    if level is None:
        times = (out[2] // have[0], out[3] // have[1])
        level = m.ctx.pyramid.derive(Level(parent=source, times=times))
        if m.ctx.pyramid.hints[level] != (out[2], out[3]):
            raise NotLaned(f"it resamples {have} to {tuple(out[2:])}")
    return Lane((lane.dims[0], lane.dims[1], (Y(level),), (X(level),)))


@rule("constant_pad_nd", "pad")
def pad(m: Marker, node: fx.Node) -> Lane:
    lane, pads = m.need(node.args[0]), argument(node, 1, "pad")
    dims = list(lane.dims)
    out = node_shape(node)
    for i in range(len(pads) // 2):
        axis = len(dims) - 1 - i
        if pads[2 * i] == 0 and pads[2 * i + 1] == 0:
            continue
        if not lane.is_feature_dim(axis):
            raise NotLaned(f"it pads a site axis of {lane}")
        dims[axis] = (Feature(out[axis]),)
    return Lane(tuple(dims))
