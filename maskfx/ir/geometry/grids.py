"""Sites of grids, as far as sizes and masks alone decide: what windows read, and with what weights.

NumPy alone, for servers without torch read it too. The rules of resampling are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int]  # height and width
Bools = NDArray[np.bool_]
Index = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


def mask_shape(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a mask's shape for a call of these sizes: (tokens,), or frames, height and width."""
    if "y" not in sizes:
        return (sizes.get("tokens", 0),)
    return tuple(sizes[role] for role in ("frames", "y", "x") if role in sizes)


class LevelSpec(Protocol):
    """How the sites of a level lie on those of its parent; see `ir/geometry/pyramid.py`."""

    @property
    def times(self) -> Size: ...
    @property
    def grow(self) -> Size: ...
    @property
    def divide(self) -> Size: ...
    @property
    def extra(self) -> Size: ...
    @property
    def fill(self) -> Size: ...
    @property
    def offset(self) -> Size: ...
    @property
    def roll(self) -> Size: ...
    @property
    def roll_part(self) -> Size: ...
    @property
    def fill_front(self) -> Size: ...
    @property
    def turn(self) -> int: ...


class WindowSpec(Protocol):
    """The geometry of a window; see `maskfx.ir.geometry.pyramid.Window`."""

    @property
    def kernel(self) -> Size: ...
    @property
    def stride(self) -> Size: ...
    @property
    def before(self) -> Size: ...
    @property
    def dilation(self) -> Size: ...
    @property
    def rounding(self) -> str: ...
    @property
    def edge(self) -> str: ...
    @property
    def inserted(self) -> Size: ...
    @property
    def scale(self) -> tuple[float, ...]: ...
    @property
    def counts(self) -> str: ...
    @property
    def part(self) -> Size: ...
    @property
    def front(self) -> Size: ...
    @property
    def flat(self) -> bool: ...
    @property
    def depth(self) -> int: ...
    @property
    def early(self) -> int: ...
    @property
    def weighted(self) -> bool: ...


def level_size(level: LevelSpec, parent: Size) -> Size:
    """Return the size of a level from that of its parent."""

    def one(i: int) -> int:
        count = unfilled(level, parent[i], i)
        return -(-count // level.fill[i]) * level.fill[i]

    return one(0), one(1)


def unfilled(level: LevelSpec, parent: int, i: int) -> int:
    """Return the size of a level along an axis before it is filled up."""
    return (parent * level.times[i] + level.grow[i]) // level.divide[i] + level.extra[i]


def part_of(size: int, part: int) -> int:
    """Return a part of a size, rounded down: `size // part`, negative if `part` is; 0 for none."""
    return 0 if part == 0 else size // part if part > 0 else -(size // -part)


def front_of(added: int, front: int) -> int:
    """Return how many of the added sites lie before the picture.

    `front`: 0 for none, 1 for all, 2 for half of them, -2 for half of them rounded up.
    """
    return abs(added // front) if front else 0


def mask_at(mask: Bools, level: LevelSpec, size: Size) -> Bools:
    """Return a mask at a level derived from its own: a site is active if any it covers is.

    The mask of a video has its frames first.
    """
    if mask.ndim == 3:
        return np.roll(np.stack([mask_at(frame, level, size) for frame in mask]), level.turn, 0)
    if level.roll != (0, 0) or level.roll_part != (0, 0):
        shifts = [n + part_of(mask.shape[i], level.roll_part[i]) for i, n in enumerate(level.roll)]
        return np.roll(mask, shifts, (0, 1))
    for axis in (0, 1):
        added = size[axis] - unfilled(level, mask.shape[axis], axis)
        offset = level.offset[axis] - front_of(added, level.fill_front[axis])
        if level.times[axis] > 1:
            mask = mask.repeat(level.times[axis], axis)
        if offset:
            count = mask.shape[axis]
            places = np.arange(max(count, size[axis] * level.divide[axis])) + offset
            mask = mask.take(places.clip(0, count - 1), axis)
        if level.divide[axis] > 1:
            starts = np.arange(0, mask.shape[axis], level.divide[axis])
            mask = np.logical_or.reduceat(mask, starts, axis)
    missing = [max(0, size[axis] - mask.shape[axis]) for axis in (0, 1)]
    if any(missing):
        mask = np.pad(mask, [(0, missing[0]), (0, missing[1])], mode="edge")
    for axis in (0, 1):
        if mask.shape[axis] > size[axis] > 0:  # what lies beyond the last site counts as this one
            kept, last = np.split(mask, [size[axis] - 1], axis)
            mask = np.concatenate([kept, last.any(axis, keepdims=True)], axis)
    return mask


@lru_cache(maxsize=256)
def full_window(window: WindowSpec, source: Size, target: Size, frames: int = 1) -> Index:
    """Return the (targets, places) site indices of a window on a full grid, of each of the frames.

    Places outside of the grid have the index one past the last site.
    """
    each, sites = frame_window(window, source, target), source[0] * source[1]
    if frames == 1 and window.depth == 1:
        return each
    read = np.arange(frames)[:, None] - window.early + np.arange(window.depth)
    if window.edge == "replicate":
        read = read.clip(0, frames - 1)
    if window.edge == "circular":
        read = read % frames
    read = read[:, None, :, None]  # frames, targets, depth, places
    beyond = (read < 0) | (read >= frames) | (each[None, :, None, :] == sites)
    found = np.where(beyond, frames * sites, each[None, :, None, :] + read * sites)
    return found.reshape(frames * len(each), -1)


def frame_window(window: WindowSpec, source: Size, target: Size) -> Index:
    """Return the site indices of a window on the grid of one frame."""
    if window.flat:
        many = source[0] * source[1]
        found = axis_places(window, 1, many, target[0] * target[1])
        return np.where(found < 0, many, found)
    y, x = (axis_places(window, i, source[i], target[i]) for i in (0, 1))
    index = y[:, None, :, None] * source[1] + x[None, :, None, :]
    inside = (y >= 0)[:, None, :, None] & (x >= 0)[None, :, None, :]
    found = np.where(inside, index, source[0] * source[1])
    return found.reshape(target[0] * target[1], -1)


@lru_cache(maxsize=256)
def window_weights(window: WindowSpec, source: Size, target: Size) -> Floats:
    """Return the (targets, places) weights of a window on a full grid."""
    y, x = (axis_weights(window, i, source[i], target[i]) for i in (0, 1))
    both = y[:, None, :, None] * x[None, :, None, :]
    return both.reshape(target[0] * target[1], -1).astype(np.float32)


def axis_places(window: WindowSpec, i: int, source: int, target: int) -> Index:
    """Return the (targets, places) positions that a window reads along an axis, -1 for none."""
    if window.weighted and window.rounding:
        return resampled(window, i, source, target)[0]
    at = np.arange(target)[:, None]
    if window.rounding == "nearest-exact":  # the centre of the finer site decides
        return (2 * at + 1) * source // (2 * target)
    if window.rounding:
        return at * source // target
    at = at * window.stride[i] - beginning(window, i, source, target)
    at = at + np.arange(window.kernel[i])[None] * window.dilation[i]
    if window.edge == "circular":
        return at % source
    if window.edge == "replicate":
        return at.clip(0, source - 1)
    if window.edge == "reflect":
        return source - 1 - abs(source - 1 - abs(at))
    between = at % window.inserted[i] != 0
    at = at // window.inserted[i]
    return np.where(between | (at < 0) | (at >= source), -1, at)


def beginning(window: WindowSpec, i: int, source: int, target: int) -> int:
    """Return how many places before the first site a window begins."""
    added = target - source
    front = front_of(abs(added), window.front[i])
    return window.before[i] + part_of(source, window.part[i]) + (front if added > 0 else -front)


def axis_weights(window: WindowSpec, i: int, source: int, target: int) -> Floats:
    """Return the (targets, places) weights of what a window reads along an axis."""
    if window.rounding:
        return resampled(window, i, source, target)[1]
    inside = counted = axis_places(window, i, source, target) >= 0
    if window.counts == "padded":
        at = np.arange(target)[:, None] * window.stride[i] + np.arange(window.kernel[i])
        counted = at < source + 2 * window.before[i]
    found: Floats = inside / np.maximum(counted.sum(1, keepdims=True), 1)
    return found


def resampled(window: WindowSpec, i: int, source: int, target: int) -> tuple[Index, Floats]:
    """Return positions and weights of a resampling along an axis, as torch computes them."""
    kind, _, how = window.rounding.partition("-")
    t = np.arange(target)[:, None]
    if kind == "area":
        first, stop = t * source // target, -(-(t + 1) * source // target)
        at = first + np.arange(window.kernel[i])
        return np.where(at < stop, at, -1), (at < stop) / (stop - first)
    if "aligned" in how:
        ratio = (source - 1) / (target - 1) if target > 1 else 0.0
    else:
        ratio = window.scale[i] if window.scale else source / target
    if "antialiased" in how:
        return smoothed(kind, ratio, t, source, window.kernel[i])
    middle: Floats = t * ratio if "aligned" in how else (t + 0.5) * ratio - 0.5
    if kind == "bilinear":
        middle = np.maximum(middle, 0)
        first = np.minimum(np.floor(middle).astype(np.int64), source - 1)
        at = np.minimum(first + np.arange(2), source - 1)
        part = np.clip(middle - first, 0, 1)
        return at, np.concatenate([1 - part, part], 1)
    first = np.floor(middle).astype(np.int64)
    places = first - 1 + np.arange(4)
    return places.clip(0, source - 1), cubic(middle - places, -0.75)


def smoothed(kind: str, ratio: float, t: Index, source: int, places: int) -> tuple[Index, Floats]:
    """Return positions and weights of a resampling whose filter widens with the ratio."""
    reach = (1.0 if kind == "bilinear" else 2.0) * max(ratio, 1.0)
    centre = ratio * (t + 0.5)
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    stop = np.minimum((centre + reach + 0.5).astype(np.int64), source)
    at = first + np.arange(places)
    far = (at - centre + 0.5) / max(ratio, 1.0)
    weight = np.maximum(1 - abs(far), 0) if kind == "bilinear" else cubic(far, -0.5)
    weight = np.where(at < stop, weight, 0.0)
    total = weight.sum(1, keepdims=True)
    return np.where(at < stop, at, -1), weight / np.where(total == 0, 1, total)


def cubic(far: Floats, a: float) -> Floats:
    """Return the weights of Keys' cubic filter at these distances."""
    far = abs(far)
    near = ((a + 2) * far - (a + 3)) * far * far + 1
    wide = ((far - 5) * far + 8) * far * a - 4 * a
    return np.where(far <= 1, near, np.where(far < 2, wide, 0.0))
