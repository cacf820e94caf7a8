"""Lane rules for operators between image levels: convolutions, pools, resampling, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.ir.geometry.lanes import (
    Dim,
    Feature,
    Frames,
    Lane,
    NotLaned,
    Tokens,
    X,
    Y,
    at_level,
    int_hint,
    lane_of,
    node_shape,
)
from maskfx.ir.geometry.pyramid import NO_SHIFT, Level, Shift, added, is_near
from maskfx.passes.context import PassContext, argument, op_name
from maskfx.passes.geometry import (
    Geometry,
    ends_of,
    has_frame_axis,
    patch_of,
    transposed_geometry,
    value_of,
    window_geometry,
)
from maskfx.passes.lane_rules.edges import is_picture_axis
from maskfx.passes.lane_rules.marker import Marker, Rules, need_constant
from maskfx.passes.lane_rules.moved import is_rolled_back, listed, shifts_by_axis
from maskfx.passes.lane_rules.token_pads import Ends, padded_tokens
from maskfx.passes.operators import CONVOLUTIONS, PADS, RESAMPLINGS
from maskfx.passes.symbolic_sizes import front_in, is_same_size, is_size_of, numbers_in

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
    if geometry.early + geometry.late != geometry.depth - 1:
        raise NotLaned(f"it makes another number of frames than it reads: {geometry.lane}")
    if has_frame_axis(geometry.lane, 2) and len(geometry.lane.dims) == 4:
        return through_frames(m, node, geometry.lane)
    level = level_after(m, geometry)
    if name == "im2col":
        batch = geometry.lane.dims[0]
        sites = m.ctx.pyramid.y(level), m.ctx.pyramid.x(level)
        return Lane((batch, (Feature(node_shape(node)[1]),), sites))
    return resized(m, node, geometry.lane, level)


def through_frames(m: Marker, node: fx.Node, lane: Lane) -> Lane:
    """Return the lane of (batch, channels, frames, sites), convolved along the frames."""
    sites = [type(atom) for atom in lane.dims[3]]
    if sites != [Y, X] or not lane.is_feature_dim(1) or lane.features(0) != 1:
        raise NotLaned(f"it convolves {lane}")
    size = node_shape(node)[1]
    return Lane((lane.dims[0], (Feature(size),) if size != 1 else (), *lane.dims[2:]))


@rule("conv1d")
def conv1d(m: Marker, node: fx.Node) -> Lane:
    """Convolve along an axis of the picture, along its sites row by row, or each token alone."""
    need_constant(m, node.args[1:3])
    source: object = node.args[0]
    plain = lane_of(source)
    if plain is not None and (found := m.of_samples(node, plain)) is not None:
        return found
    geometry, out = window_geometry(node, m.need), node_shape(node)
    lane, size = geometry.lane, out[1]
    alone = geometry.pointwise and geometry.groups == 1
    if len(lane.dims) != 3 or not lane.is_feature_dim(1) or lane.features(0) != 1 and not alone:
        raise NotLaned(f"it convolves {lane}")
    channels: Dim = (Feature(size),) if size != 1 else ()
    if geometry.pointwise:
        return Lane((lane.dims[0], channels, lane.dims[2]))
    kinds = [type(atom) for atom in lane.dims[2]]
    if lane.is_half or kinds not in ([X], [Y], [Y, X]):
        raise NotLaned(f"it convolves along {Lane(lane.dims[2:])} of {lane}")
    level = next(atom.level for atom in lane.dims[2])  # type: ignore[union-attr]
    if geometry.flat:
        whole, after = (n.meta["val"].shape[2] for n in (geometry.source, node))
        if not is_same_size(m.ctx, whole, after):
            raise NotLaned(f"it convolves {whole} sites, row after row, to {after}")
    else:
        level = m.ctx.pyramid.derive(geometry.level(level))
    found = at_level(Lane((lane.dims[0], channels, lane.dims[2])), level)
    if out[2] != prod(m.ctx.pyramid.size(atom) for atom in found.dims[2]):
        raise NotLaned(f"its output {out} fits no level")
    return found


def level_after(m: Marker, geometry: Geometry) -> int:
    return m.ctx.pyramid.derive(geometry.level(picture_level(geometry.lane, "it convolves")))


def picture_level(lane: Lane, what: str) -> int:
    """Return the level of a (batch, channels, rows, columns) value, perhaps with frames."""
    *front, y, x = lane.dims
    frames = all(isinstance(a, Frames) for d in front[2:] for a in d)
    plain = len(front) in (2, 3) and lane.is_feature_dim(1) and frames
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
    return at_level(Lane((lane.dims[0], channels, *lane.dims[2:])), level)


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
    return at_level(lane, level)


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
    dims, sites = list(lane.dims), dict[int, Ends]()
    for i in range(len(ends) // 2):
        axis, own = len(dims) - 1 - i, (ends[2 * i], ends[2 * i + 1])
        if all(isinstance(end, int) and end == 0 for end in own):  # symbols of value zero count
            continue
        if is_picture_axis(lane, axis):
            sites[axis] = own
        elif len(lane.dims[axis]) == 1 and isinstance(lane.dims[axis][0], Tokens):
            dims[axis] = (Tokens(padded_tokens(m, node, lane, own)),)
        elif not lane.is_feature_dim(axis):
            raise NotLaned(f"it pads a site axis of {lane}")
        elif not isinstance(own[0], int) or not isinstance(own[1], int):
            raise NotLaned("its padding depends on the size of the picture")
        else:
            dims[axis] = (Feature(out[axis]),)
    if not sites:
        return Lane(tuple(dims))
    if tuple(dims) != lane.dims or not isinstance(value_of(node), (int, float)):
        raise NotLaned(f"it pads a site axis of {lane}")
    return at_level(lane, padded_level(m, node, lane, sites))


def padded_level(m: Marker, node: fx.Node, lane: Lane, sites: dict[int, Ends]) -> int:
    """Return the level of a padded picture, perhaps up to a multiple; `sites`: ends by axis."""
    source = next(a.level for a in lane.atoms() if isinstance(a, Y))
    level = Level(parent=source)
    for axis, (before, after) in sites.items():
        i = axis_number(lane, axis)
        if not isinstance(before, int):
            level = filled_around(m, level, i, before, node, axis)
            continue
        level = replace(
            level,
            grow=placed(level.grow, i, before + (after if isinstance(after, int) else 0)),
            offset=placed(level.offset, i, -before),
        )
        if not isinstance(after, int):
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


def filled_around(
    m: Marker, level: Level, i: int, before: object, node: fx.Node, axis: int
) -> Level:
    """Return the level filled up along an axis to a multiple, with sites before the picture too."""
    whole, size = (n.meta["val"].shape[axis] for n in (node.args[0], node))  # type: ignore[union-attr]
    filled = filled_up(m, level, i, size)
    front = None if filled is None else front_in(m.ctx, before, whole, filled, i)
    if filled is None or front is None:
        raise NotLaned("its padding before the picture depends on the size of the picture")
    return replace(filled, fill_front=placed(filled.fill_front, i, front))


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
    shifts, turn = site_shifts(m.ctx, node, lane), frames_turned(m.ctx, node, lane)
    if shifts is None:
        return lane
    source = next(a.level for a in lane.atoms() if isinstance(a, Y))
    level = m.ctx.pyramid.rolled(source, shifts, turn)
    if turn:
        return at_level(lane, level)
    near = all(abs(number) <= NEAR and not part for number, part in shifts)
    near = near and not m.ctx.pyramid.levels[source].rolls
    return lane if near and not is_rolled_back(m.ctx, node, shifts) else at_level(lane, level)


@rule("flip")
def flip(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    if not all(lane.is_feature_dim(d) for d in listed(argument(node, 1, "dims"))):
        raise NotLaned(f"it turns round {lane}")
    return lane


def site_shifts(ctx: PassContext, node: fx.Node, lane: Lane) -> tuple[Shift, Shift] | None:
    """Return how far a roll moves rows and columns; None if it moves features only."""
    found: dict[int, Shift] = {}
    for axis, shift in shifts_by_axis(ctx, node):
        total = None if shift is None else added(found.get(axis, NO_SHIFT), shift)
        if total is None:
            raise NotLaned("it rolls by a number that is no fixed part of the picture's size")
        found[axis] = total
    if not found:
        raise NotLaned("it rolls all axes as one")
    if all(lane.is_feature_dim(d) for d in found):
        return None
    moved = {type(a): found[d] for d in found for a in lane.dims[d] if len(lane.dims[d]) == 1}
    if len(moved) != len(found) or not set(moved) <= {Frames, Y, X} or lane.is_half:
        raise NotLaned(f"it rolls {lane}")
    return moved.get(Y, NO_SHIFT), moved.get(X, NO_SHIFT)


def frames_turned(ctx: PassContext, node: fx.Node, lane: Lane) -> int:
    """Return by how many frames a roll moves those of a video on."""
    shifts = shifts_by_axis(ctx, node)
    found = [shift for d, shift in shifts if has_frame_axis(lane, d) and shift is not None]
    return sum(number for number, _ in found) % ctx.pyramid.frames
