"""Lane rules for operators between image levels: convolutions, pools, resampling, padding."""

from __future__ import annotations

from typing import Any

from torch import fx

from maskfx.ir.lanes import Atom, Dim, Feature, Lane, NotLaned, X, Y, lane_of, node_shape
from maskfx.ir.pyramid import Level
from maskfx.passes.context import argument, op_name
from maskfx.passes.geometry import (
    Geometry,
    padding_of,
    patch_of,
    transposed_geometry,
    window_geometry,
)
from maskfx.passes.lane_rules.marker import Marker, Rules, need_constant
from maskfx.passes.operators import CONVOLUTIONS, PADS, RESAMPLINGS

rule = Rules()
NEAR = 1  # the most sites by which a roll may move a picture whose mask stays


@rule(*CONVOLUTIONS, "avg_pool2d", "max_pool2d", "im2col")
def window(m: Marker, node: fx.Node) -> Lane:
    name = op_name(node)
    if name in CONVOLUTIONS:
        need_constant(m, node.args[1:3])
    source: Any = node.args[0]
    plain = lane_of(source)
    if plain is not None and (found := m.of_samples(node, plain)) is not None:
        return found
    geometry = window_geometry(node, m.need)
    level = level_after(m, geometry)
    if name == "im2col":
        batch = geometry.lane.dims[0]
        return Lane((batch, (Feature(node_shape(node)[1]),), (Y(level), X(level))))
    return resized(m, node, geometry.lane, level)


def level_after(m: Marker, geometry: Geometry) -> int:
    return m.ctx.pyramid.derive(geometry.level(picture_level(geometry.lane, "it convolves")))


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
    """Map each site to a separate patch, or to a window of a grid with zeros between sites."""
    lane = m.need(node.args[0])
    need_constant(m, node.args[1:3])
    if (found := m.of_samples(node, lane)) is not None:
        return found
    source, patch = picture_level(lane, "it convolves"), patch_of(node)
    if patch is None:
        return resized(m, node, lane, level_after(m, transposed_geometry(node, m.need)))
    return resized(m, node, lane, m.ctx.pyramid.derive(Level(parent=source, times=(patch, patch))))


@rule(*RESAMPLINGS)
def upsample(m: Marker, node: fx.Node) -> Lane:
    lane, out = m.need(node.args[0]), node_shape(node)
    if (found := m.of_samples(node, lane)) is not None:
        return found
    if len(lane.dims) != 4 or len(lane.dims[2]) != 1 or not isinstance(lane.dims[2][0], Y):
        raise NotLaned(f"it resamples {lane}")
    source = lane.dims[2][0].level
    have, pyramid = m.ctx.pyramid.hints[source], m.ctx.pyramid
    if have == (out[2], out[3]):
        return lane
    level = pyramid.level_of((out[2], out[3]))
    if level is None:
        level = pyramid.derive(scaled(source, have, (out[2], out[3])))
        if pyramid.hints[level] != (out[2], out[3]):
            raise NotLaned(f"it resamples {have} to {tuple(out[2:])}")
    return Lane((lane.dims[0], lane.dims[1], (Y(level),), (X(level),)))


def scaled(source: int, have: tuple[int, int], size: tuple[int, int]) -> Level:
    """Return the level that is larger or smaller by whole factors."""
    times = [max(1, size[i] // have[i]) for i in (0, 1)]
    divide = [max(1, have[i] // max(1, size[i])) for i in (0, 1)]
    return Level(parent=source, times=(times[0], times[1]), divide=(divide[0], divide[1]))


@rule(*PADS)
def pad(m: Marker, node: fx.Node) -> Lane:
    lane, out = m.need(node.args[0]), node_shape(node)
    edge, pads = padding_of(node)
    dims, sites = list(lane.dims), False
    for i in range(len(pads) // 2):
        axis = len(dims) - 1 - i
        if pads[2 * i] == 0 and pads[2 * i + 1] == 0:
            continue
        if lane.is_feature_dim(axis):
            dims[axis] = (Feature(out[axis]),)
        else:
            sites = True
    if not pads:
        raise NotLaned("its padding depends on the size of the picture, or isn't zero")
    if not sites:
        return Lane(tuple(dims))
    if edge is None or any(pads[4:]):
        raise NotLaned(f"it pads a site axis of {lane}")
    level = m.ctx.pyramid.derive(pad_level(picture_level(lane, "it pads"), pads))
    return resized(m, node, lane, level)


def pad_level(source: int, pads: list[int]) -> Level:
    grow = pads[2] + pads[3], pads[0] + pads[1]
    return Level(parent=source, grow=grow, offset=(-pads[2], -pads[0]))


@rule("roll")
def roll(m: Marker, node: fx.Node) -> Lane:
    """Move sites to a level of their own if they are moved back; else read a site further away."""
    lane = m.need(node.args[0])
    shifts = site_shifts(node, lane)
    if shifts is None:
        return lane
    source = next(a.level for a in lane.atoms() if isinstance(a, Y))
    level = m.ctx.pyramid.rolled(source, shifts)
    own = m.ctx.pyramid.levels[source].parent == level
    if own or is_undone(node):
        return at_level(lane, level)
    if max(map(abs, shifts)) > NEAR:
        raise NotLaned(f"it rolls {lane} so far that its sites move")
    return lane


@rule("flip")
def flip(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    if not all(lane.is_feature_dim(d) for d in listed(argument(node, 1, "dims"))):
        raise NotLaned(f"it turns round {lane}")
    return lane


def is_undone(node: fx.Node) -> bool:
    """Return True if the opposite roll follows."""
    shifts, dims = (listed(argument(node, i, "")) for i in (1, 2))
    seen, stack = {node}, list(node.users)
    while stack:
        user = stack.pop()
        if user in seen:
            continue
        seen.add(user)
        if user.target == node.target:
            back = [-s if isinstance(s, int) else s for s in listed(argument(user, 1, ""))]
            if back == shifts and listed(argument(user, 2, "")) == dims:
                return True
        stack.extend(user.users)
    return False


def site_shifts(node: fx.Node, lane: Lane) -> tuple[int, int] | None:
    """Return how far a roll moves rows and columns; None if it moves features only."""
    shifts, dims = argument(node, 1, "shifts"), argument(node, 2, "dims", [])
    pairs = zip(listed(shifts), listed(dims), strict=False)
    found = {d % len(lane.dims): s for s, d in pairs}
    if not found or any(not isinstance(s, int) for s in found.values()):
        raise NotLaned("it rolls by a number that depends on the picture")
    if all(lane.is_feature_dim(d) for d in found):
        return None
    moved = {type(a): found[d] for d in found for a in lane.dims[d] if len(lane.dims[d]) == 1}
    if len(moved) != len(found) or not set(moved) <= {Y, X} or lane.is_half:
        raise NotLaned(f"it rolls {lane}")
    return moved.get(Y, 0), moved.get(X, 0)


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def at_level(lane: Lane, level: int) -> Lane:
    """Return the lane of an image at another level."""

    def atom(found: Atom) -> Atom:
        return type(found)(level) if isinstance(found, (Y, X)) else found

    return Lane(tuple(tuple(map(atom, dim)) for dim in lane.dims))
