"""Pastes a result into its original, so that pixels outside the mask don't change.

Pure numpy. The seam is feathered inside the mask only, so every pixel outside equals the
original's, byte for byte, and a stroke thinner than the feather still shows the result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from maskfx.serve.request import Mask, Pixels

Depth = NDArray[np.uint8]

MOST_FEATHER = 8  # pixels


def paste(result: Pixels, original: Pixels, mask: Mask) -> Pixels:
    """Return the result inside the mask and the original elsewhere; all have the same size."""
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
    """Return the bounding box of the mask, with `margin` pixels added on each side."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return (
        slice(max(0, int(rows[0]) - margin), int(rows[-1]) + 1 + margin),
        slice(max(0, int(columns[0]) - margin), int(columns[-1]) + 1 + margin),
    )


def width_of_feather(shape: tuple[int, ...]) -> int:
    """Return the feather's width in pixels; 1 (no feather) if it would be most of a stroke."""
    return max(1, min(MOST_FEATHER, min(shape) // 128))


def feather(mask: Mask, width: int) -> NDArray[np.float32]:
    """Return the weights of the result: 0 outside, rising to 1 within `width` pixels of the edge.

    Weights are relative to the depth of the mask nearby: where a stroke is one pixel deep, that
    pixel has weight 1.
    """
    depth = mask.astype(np.uint8)
    inner = mask.astype(np.uint8)
    for _ in range(width - 1):
        inner = _spread(inner, np.minimum, edge=1)  # the image border isn't an edge of the mask
        depth += inner
    nearby = depth
    for _ in range(width - 1):
        nearby = _spread(nearby, np.maximum, edge=0)
    return np.divide(depth, nearby, out=np.zeros(mask.shape, np.float32), where=nearby > 0)


def _spread(plane: Depth, pick: np.ufunc, edge: int) -> Depth:
    """Return the minimum or maximum of each pixel and its eight neighbours."""
    padded = np.pad(plane, 1, constant_values=edge)
    rows = pick(pick(padded[:-2], padded[1:-1]), padded[2:])
    found: Depth = pick(pick(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:])
    return found
