"""Lane rules for operators between image levels: convolutions, pools, resampling, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.ir.lanes import (
    Dim,
    Feature,
    Lane,
    NotLaned,
    X,
    Y,
    at_level,
    int_hint,
    lane_of,
    node_shape,
)
from maskfx.ir.pyramid import Level, is_near
from maskfx.passes.context import argument, op_name
from maskfx.passes.geometry import (
    Geometry,
    ends_of,
    patch_of,
    transposed_geometry,
    value_of,
    window_geometry,
)
from maskfx.passes.lane_rules.marker import Marker, Rules, need_constant
from maskfx.passes.lane_rules.moved import is_rolled_back, listed
from maskfx.passes.operators import CONVOLUTIONS, PADS, RESAMPLINGS
from maskfx.passes.symbolic_sizes import is_size_of, numbers_in

rule = Rules()
NEAR = 1  # the most sites by which a roll may move a picture whose mask stays


@rule(*CONVOLUTIONS, "avg_pool2d", "max_pool2d", "im2col")
def window(m: Marker, node: fx.Node) -> Lane:
    name = op_name(node)
    if name in CONVOLUTIONS:
        need_constant(m, node.args[1:3])
    plain = lane_of(node.args[0])
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
    level = level_of_size(m, source, node.meta["val"].shape[2:])
    if level is None:
        level = pyramid.derive(scaled(source, have, (out[2], out[3])))
        if pyramid.hints[level] != (out[2], out[3]):
            raise NotLaned(f"it resamples {have} to {tuple(out[2:])}")
    return Lane((lane.dims[0], lane.dims[1], (Y(level),), (X(level),)))


def level_of_size(m: Marker, source: int, sizes: Sequence[IntLikeType]) -> int | None:
    """Return the level that a picture resized to these sizes has, or None."""
    pyramid = m.ctx.pyramid
    known = pyramid.resized(source, (int_hint(sizes[0]), int_hint(sizes[1])))
    for admitted in (False, True):
        for found in known:
            level = pyramid.levels[found]
            if all(is_size_of(m.ctx, n, level, (i,), admitted) for i, n in enumerate(sizes)):
                return found
    return None


def scaled(source: int, have: tuple[int, int], size: tuple[int, int]) -> Level:
    """Return the level that is larger or smaller by whole factors."""
    times = [max(1, size[i] // have[i]) for i in (0, 1)]
    divide = [max(1, have[i] // max(1, size[i])) for i in (0, 1)]
    return Level(parent=source, times=(times[0], times[1]), divide=(divide[0], divide[1]))


@rule(*PADS)
def pad(m: Marker, node: fx.Node) -> Lane:
    lane, out, ends = m.need(node.args[0]), node_shape(node), ends_of(m.ctx, node)
    dims, sites = list(lane.dims), dict[int, tuple[int | None, int | None]]()
    for i in range(len(ends) // 2):
        axis, own = len(dims) - 1 - i, (ends[2 * i], ends[2 * i + 1])
        if own == (0, 0):
            continue
        if is_picture_axis(lane, axis):
            sites[axis] = own
        elif not lane.is_feature_dim(axis):
            raise NotLaned(f"it pads a site axis of {lane}")
        elif None in own:
            raise NotLaned("its padding depends on the size of the picture")
        else:
            dims[axis] = (Feature(out[axis]),)
    if not sites:
        return Lane(tuple(dims))
    if tuple(dims) != lane.dims or not isinstance(value_of(node), (int, float)):
        raise NotLaned(f"it pads a site axis of {lane}")
    return at_level(lane, padded_level(m, node, lane, sites))


def padded_level(
    m: Marker, node: fx.Node, lane: Lane, sites: dict[int, tuple[int | None, int | None]]
) -> int:
    """Return the level of a padded picture, perhaps up to a multiple; `sites`: ends by axis."""
    source = next(a.level for a in lane.atoms() if isinstance(a, Y))
    level = Level(parent=source)
    for axis, (before, after) in sites.items():
        i = axis_number(lane, axis)
        if before is None:
            raise NotLaned("its padding before the picture depends on the size of the picture")
        level = replace(
            level,
            grow=placed(level.grow, i, before + (after or 0)),
            offset=placed(level.offset, i, -before),
        )
        if after is None:
            filled = filled_up(m, level, i, node.meta["val"].shape[axis])
            if filled is None:
                found = reached(m, node, lane, level)
                if found is None or found == source:
                    m.differ = True
                    size = node.meta["val"].shape[axis]
                    raise NotLaned(f"its padding to {size} depends on the size of the picture")
                return found
            level = filled
    found = m.ctx.pyramid.derive(level)
    for axis in sites:
        if m.ctx.pyramid.hints[found][axis_number(lane, axis)] != node_shape(node)[axis]:
            raise NotLaned(f"its output {node_shape(node)} fits no level")
    return found


def filled_up(m: Marker, level: Level, i: int, size: torch.SymInt) -> Level | None:
    """Return the level with sites added along an axis up to a multiple, read from the size."""
    for number in numbers_in(size):
        found = replace(level, fill=placed(level.fill, i, number))
        if is_size_of(m.ctx, size, found, (i,)):
            return found
    return None


def reached(m: Marker, node: fx.Node, lane: Lane, begins: Level) -> int | None:
    """Return the known level to whose size a picture is padded or cut; `begins`: its place."""
    pyramid, out = m.ctx.pyramid, node.meta["val"].shape
    sizes = {axis_number(lane, d): out[d] for d in range(len(out)) if is_picture_axis(lane, d)}
    moved, place = pyramid.moved_from(begins.parent or 0), pyramid.place(begins)
    for known, level in enumerate(pyramid.levels):
        alike = all(pyramid.hints[known][i] == int_hint(n) for i, n in sizes.items())
        if not alike or pyramid.moved_from(known) != moved:
            continue
        own = pyramid.place(level)
        fits = all(is_size_of(m.ctx, n, level, (i,)) for i, n in sizes.items())
        if fits and own[1] == place[1] and is_near(place, own):
            return known
    return None


def is_picture_axis(lane: Lane, axis: int) -> bool:
    """Return True for the rows or the columns of a picture."""
    dim = lane.dims[axis]
    return len(dim) == 1 and isinstance(dim[0], (Y, X)) and not lane.is_half


def axis_number(lane: Lane, axis: int) -> int:
    """Return 0 for the rows of a picture, 1 for its columns."""
    return 0 if isinstance(lane.dims[axis][0], Y) else 1


def placed(pair: tuple[int, int], i: int, number: int) -> tuple[int, int]:
    """Return a pair with another number for rows (0) or columns (1)."""
    return (number, pair[1]) if i == 0 else (pair[0], number)


@rule("roll")
def roll(m: Marker, node: fx.Node) -> Lane:
    """Move sites to a level of their own; by one site, if they aren't moved back, read others."""
    lane = m.need(node.args[0])
    shifts = site_shifts(node, lane)
    if shifts is None:
        return lane
    source = next(a.level for a in lane.atoms() if isinstance(a, Y))
    level = m.ctx.pyramid.rolled(source, shifts)
    own = m.ctx.pyramid.moved_from(source) == source and m.ctx.pyramid.levels[source].roll != (0, 0)
    near = max(map(abs, shifts)) <= NEAR and not own
    return lane if near and not is_rolled_back(node, shifts) else at_level(lane, level)


@rule("flip")
def flip(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    if not all(lane.is_feature_dim(d) for d in listed(argument(node, 1, "dims"))):
        raise NotLaned(f"it turns round {lane}")
    return lane


def site_shifts(node: fx.Node, lane: Lane) -> tuple[int, int] | None:
    """Return how far a roll moves rows and columns; None if it moves features only."""
    shifts, dims = argument(node, 1, "shifts"), argument(node, 2, "dims", [])
    pairs = zip(listed(shifts), listed(dims), strict=False)
    found: dict[int, Any] = {}
    for number, dim in pairs:
        axis = dim % len(lane.dims)
        found[axis] = found.get(axis, 0) + number if isinstance(number, int) else number
    if not found or any(not isinstance(s, int) for s in found.values()):
        raise NotLaned("it rolls by a number that depends on the picture")
    if all(lane.is_feature_dim(d) for d in found):
        return None
    moved = {type(a): found[d] for d in found for a in lane.dims[d] if len(lane.dims[d]) == 1}
    if len(moved) != len(found) or not set(moved) <= {Y, X} or lane.is_half:
        raise NotLaned(f"it rolls {lane}")
    return moved.get(Y, 0), moved.get(X, 0)
