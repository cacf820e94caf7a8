"""How alike two pictures are, and two sets of features: numbers in, numbers out.

Pictures are (height, width, 3) in 0..255.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WINDOW, SIGMA = 11, 1.5
K1, K2, RANGE = 0.01, 0.03, 255.0
ALIKE = 100.0  # dB of two equal pictures: JSON has no infinity


def ssim(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Structural similarity: a Gaussian window that lies in the picture, mean over channels."""
    x, y = one.astype(np.float64), other.astype(np.float64)
    mean_x, mean_y = blurred(x), blurred(y)
    var_x = blurred(x * x) - mean_x**2
    var_y = blurred(y * y) - mean_y**2
    both = blurred(x * y) - mean_x * mean_y
    c1, c2 = (K1 * RANGE) ** 2, (K2 * RANGE) ** 2
    above = (2 * mean_x * mean_y + c1) * (2 * both + c2)
    below = (mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2)
    return float((above / below).mean())


def window_of(mask: NDArray[np.bool_]) -> tuple[slice, slice]:
    """Return the smallest window with the mask, at least as large as that of `ssim`."""
    found = []
    for axis in (1, 0):
        taken = np.flatnonzero(mask.any(axis))
        first = min(int(taken[0]), mask.shape[1 - axis] - WINDOW)
        found.append(slice(first, max(int(taken[-1]) + 1, first + WINDOW)))
    return found[0], found[1]


def blurred(x: Array) -> Array:
    """Means under a Gaussian window, where all of it lies in the picture."""
    offsets = np.arange(WINDOW) - WINDOW // 2
    weights = np.exp(-(offsets**2) / (2 * SIGMA**2))
    weights /= weights.sum()
    for axis in (0, 1):
        length = x.shape[axis] - WINDOW + 1
        parts = [np.take(x, np.arange(i, i + length), axis) * w for i, w in enumerate(weights)]
        x = np.sum(parts, axis=0)
    return x


def psnr(
    one: NDArray[np.uint8], other: NDArray[np.uint8], mask: NDArray[np.bool_] | None = None
) -> float:
    """Peak signal to noise in dB, of the masked pixels only if there is a mask."""
    square = (one.astype(np.float64) - other.astype(np.float64)) ** 2
    wrong = float(square.mean() if mask is None else square[mask].mean())
    return ALIKE if wrong == 0 else min(ALIKE, 10 * float(np.log10(RANGE**2 / wrong)))


def frechet(one: Array, other: Array) -> float:
    """The Frechet distance of two sets of features (one row each), taken as Gaussians."""
    gap = one.mean(0) - other.mean(0)
    a, b = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    # the trace of the root of a·b is that of the root of √a·b·√a, which is symmetric
    values, vectors = np.linalg.eigh(a)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    mixed = np.linalg.eigvalsh(root @ b @ root).clip(0)
    found = gap @ gap + np.trace(a) + np.trace(b) - 2 * np.sqrt(mixed).sum()
    return max(0.0, float(found))
