"""Masks as users draw them, and awkward ones; each from a shape and a seed alone.

A shape is (height, width), that with frames first, or (tokens,). The drawn kinds see tokens as a
grid as square as can be, and draw anew in each frame of a video.
No mask is empty but `empty`, and none but `full` (or a grid too small to leave a rest) is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

import numpy as np
import torch
from torch import Tensor

Shape = tuple[int, ...]
Maker = Callable[[Shape, int], Tensor]


def each_frame(draw: Maker) -> Maker:
    """Draw anew in each frame of a video."""

    @wraps(draw)
    def drawn(shape: Shape, seed: int) -> Tensor:
        if len(shape) < 3:
            return draw(shape, seed)
        return torch.stack([draw(shape[1:], seed + frame) for frame in range(shape[0])])

    return drawn


def random(shape: Shape, seed: int, ratio: float = 0.2) -> Tensor:
    """Sites anywhere: the given share of them, one at least."""
    count = math.prod(shape)
    mask = np.zeros(count, dtype=bool)
    chosen = min(max(round(ratio * count), 1), count)
    mask[np.random.default_rng(seed).permutation(count)[:chosen]] = True
    return torch.from_numpy(mask.reshape(shape))


def dense_random(shape: Shape, seed: int) -> Tensor:
    """Most sites active."""
    return random(shape, seed, 0.7)


@each_frame
def stroke(shape: Shape, seed: int) -> Tensor:
    """One to three thick polylines, as a brush leaves them."""
    height, width = grid(shape)
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    mask = np.zeros((height, width), dtype=bool)
    for _ in range(rng.integers(1, 4)):
        points = rng.uniform((0, 0), (height - 1, width - 1), size=(rng.integers(2, 5), 2))
        radius = rng.uniform(0.5, max(min(height, width) / 8, 0.8))
        for start, stop in zip(points, points[1:], strict=False):
            along = stop - start
            length = max(float(along @ along), 1e-9)
            place = ((y - start[0]) * along[0] + (x - start[1]) * along[1]) / length
            place = np.clip(place, 0, 1)
            off = np.hypot(y - start[0] - place * along[0], x - start[1] - place * along[1])
            mask |= off <= radius
    return torch.from_numpy(mask.reshape(shape))


def one_site(shape: Shape, seed: int) -> Tensor:
    """A single site."""
    mask = torch.zeros(math.prod(shape), dtype=torch.bool)
    mask[int(np.random.default_rng(seed).integers(len(mask)))] = True
    return mask.view(shape)


@each_frame
def border(shape: Shape, seed: int) -> Tensor:
    """The outermost sites on all sides: every window of theirs is cut off."""
    mask = torch.ones(grid(shape), dtype=torch.bool)
    mask[1:-1, 1:-1] = False
    return mask.view(shape)


@each_frame
def square(shape: Shape, seed: int) -> Tensor:
    """A rectangle of about half of each side."""
    height, width = grid(shape)
    tall, wide = max(height // 2, 1), max(width // 2, 1)
    rng = np.random.default_rng(seed)
    top, left = int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1))
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[top : top + tall, left : left + wide] = True
    return mask.view(shape)


def full(shape: Shape, seed: int) -> Tensor:
    """Everything."""
    return torch.ones(shape, dtype=torch.bool)


def empty(shape: Shape, seed: int) -> Tensor:
    """Nothing."""
    return torch.zeros(shape, dtype=torch.bool)


def grid(shape: Shape) -> tuple[int, int]:
    """Height and width of a mask, or of the squarest grid with that many tokens."""
    if len(shape) == 2:
        return shape[0], shape[1]
    (count,) = shape
    height = next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0)
    return height, count // height


MASKS: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (random, dense_random, stroke, one_site, border, square, full, empty)
}
