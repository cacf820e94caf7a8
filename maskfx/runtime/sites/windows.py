"""Which sites a window reads on a full grid, and the weights of those that a resampling mixes.

Both follow from the two sizes alone. The rules are those of torch's operators.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ir.pyramid import Window

Size = tuple[int, int]
Index = NDArray[np.int64]
Weights = NDArray[np.float64]


@lru_cache(maxsize=256)
def full_window(window: Window, source: Size, target: Size) -> Tensor:
    """Return the (targets, places) site indices of a window on a full grid.

    Places outside of the grid have the index one past the last site.
    """
    y, x = (axis_places(window, i, source[i], target[i]) for i in (0, 1))
    index = y[:, None, :, None] * source[1] + x[None, :, None, :]
    inside = (y >= 0)[:, None, :, None] & (x >= 0)[None, :, None, :]
    found = np.where(inside, index, source[0] * source[1])
    return torch.from_numpy(found.reshape(target[0] * target[1], -1))


@lru_cache(maxsize=256)
def window_weights(window: Window, source: Size, target: Size) -> Tensor:
    """Return the (targets, places) weights of a window on a full grid."""
    y, x = (axis_weights(window, i, source[i], target[i]) for i in (0, 1))
    both = y[:, None, :, None] * x[None, :, None, :]
    return torch.from_numpy(both.reshape(target[0] * target[1], -1).astype(np.float32))


def axis_places(window: Window, i: int, source: int, target: int) -> Index:
    """Return the (targets, places) positions that a window reads along an axis, -1 for none."""
    if window.weighted and window.rounding:
        return resampled(window, i, source, target)[0]
    at = np.arange(target)[:, None]
    if window.rounding == "nearest-exact":  # the centre of the finer site decides
        return (2 * at + 1) * source // (2 * target)
    if window.rounding:
        return at * source // target
    at = at * window.stride[i] - window.before[i]
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


def axis_weights(window: Window, i: int, source: int, target: int) -> Weights:
    """Return the (targets, places) weights of what a window reads along an axis."""
    if window.rounding:
        return resampled(window, i, source, target)[1]
    inside = counted = axis_places(window, i, source, target) >= 0
    if window.counts == "padded":
        at = np.arange(target)[:, None] * window.stride[i] + np.arange(window.kernel[i])
        counted = at < source + 2 * window.before[i]
    found: Weights = inside / np.maximum(counted.sum(1, keepdims=True), 1)
    return found


def resampled(window: Window, i: int, source: int, target: int) -> tuple[Index, Weights]:
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
    middle: Any = t * ratio if "aligned" in how else (t + 0.5) * ratio - 0.5
    if kind == "bilinear":
        middle = np.maximum(middle, 0)
        first = np.minimum(np.floor(middle).astype(np.int64), source - 1)
        at = np.minimum(first + np.arange(2), source - 1)
        part = np.clip(middle - first, 0, 1)
        return at, np.concatenate([1 - part, part], 1)
    first = np.floor(middle).astype(np.int64)
    places = first - 1 + np.arange(4)
    return places.clip(0, source - 1), cubic(middle - places, -0.75)


def smoothed(kind: str, ratio: float, t: Index, source: int, places: int) -> tuple[Index, Weights]:
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


def cubic(far: Weights, a: float) -> Weights:
    """Return the weights of Keys' cubic filter at these distances."""
    far = abs(far)
    near = ((a + 2) * far - (a + 3)) * far * far + 1
    wide = ((far - 5) * far + 8) * far * a - 4 * a
    return np.where(far <= 1, near, np.where(far < 2, wide, 0.0))
