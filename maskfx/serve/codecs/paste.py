"""Pixels outside a mask stay as they were: a result pasted into its original.

Pure numpy. The seam is feathered on the mask's side only, so every pixel outside is the
original's, byte for byte, and a stroke thinner than the feather still shows the result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from maskfx.serve.request import Mask, Pixels

Depth = NDArray[np.uint8]

MOST_FEATHER = 8  # pixels


def paste(result: Pixels, original: Pixels, mask: Mask) -> Pixels:
    """The result where the mask is, the original elsewhere; all of the same size."""
    if mask.all():
        return result
    whole = original.copy()
    if not mask.any():
        return whole
    box = bounds(mask, margin=1)
    inside = mask[box]
    weight = feather(inside, width_of_feather(mask.shape))[..., None]
    seen, made = original[box].astype(np.float32), result[box].astype(np.float32)
    blend = np.rint(seen + (made - seen) * weight).astype(np.uint8)
    whole[box] = np.where(inside[..., None], blend, original[box])
    return whole


def bounds(mask: Mask, margin: int = 0) -> tuple[slice, slice]:
    """The box around what is masked."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return (
        slice(max(0, int(rows[0]) - margin), int(rows[-1]) + 1 + margin),
        slice(max(0, int(columns[0]) - margin), int(columns[-1]) + 1 + margin),
    )


def width_of_feather(shape: tuple[int, ...]) -> int:
    """In pixels; none on pictures so small that it would be most of a stroke."""
    return max(1, min(MOST_FEATHER, min(shape) // 128))


def feather(mask: Mask, width: int) -> NDArray[np.float32]:
    """Weights of the result: 0 outside, rising to 1 within `width` pixels of the mask's edge.

    Measured against the depth that the mask has nearby: where a stroke is one pixel deep, that
    pixel is wholly the result's.
    """
    depth = mask.astype(np.uint8)
    inner = mask.astype(np.uint8)
    for _ in range(width - 1):
        inner = _spread(inner, np.minimum, edge=1)  # a picture's border isn't an edge of its mask
        depth += inner
    nearby = depth
    for _ in range(width - 1):
        nearby = _spread(nearby, np.maximum, edge=0)
    return np.divide(depth, nearby, out=np.zeros(mask.shape, np.float32), where=nearby > 0)


def _spread(plane: Depth, pick: np.ufunc, edge: int) -> Depth:
    """The least or largest of each pixel and its eight neighbours."""
    padded = np.pad(plane, 1, constant_values=edge)
    rows = pick(pick(padded[:-2], padded[1:-1]), padded[2:])
    found: Depth = pick(pick(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:])
    return found
