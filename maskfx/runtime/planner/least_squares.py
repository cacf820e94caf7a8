"""Least squares with coefficients of at least 0, for costs: nothing takes less than no time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RIDGE = 1e-10  # added to each column's squares; columns that are equal share their effect
EDGE = 1e-12  # of the largest slope: rounding errors
ROUNDS = 3  # times the number of columns


def non_negative(rows: Floats, wanted: Floats, weights: Floats | None = None) -> Floats:
    """Return the x >= 0 that minimises the weighted sum of (rows @ x - wanted)**2.

    Lawson's and Hanson's active set: columns join while that lowers the sum, and leave where their
    coefficient would be negative. `scipy.optimize.nnls` takes up to a second to import, and costs
    are fitted in processes that start at once.
    """
    root = np.ones(len(rows)) if weights is None else np.sqrt(weights)
    scale = np.sqrt(((root[:, None] * rows) ** 2).sum(0))
    scale[scale == 0] = 1.0
    scaled = root[:, None] * rows / scale
    count = len(scale)
    left, right = scaled.T @ scaled + RIDGE * np.eye(count), scaled.T @ (root * wanted)
    found, chosen = np.zeros(count), np.zeros(count, np.bool_)
    least = EDGE * max(float(np.abs(right).max(initial=0.0)), 1e-300)
    for _ in range(ROUNDS * count):  # each round lowers the sum; the bound is for rounding errors
        slope = np.where(chosen, -np.inf, right - left @ found)
        best = int(np.argmax(slope))
        if slope[best] <= least:
            break
        chosen[best] = True
        found = _without_negative(left, right, found, chosen)
    solved: Floats = found / scale
    return solved


def _without_negative(
    left: Floats, right: Floats, found: Floats, chosen: NDArray[np.bool_]
) -> Floats:
    """Solve for the chosen columns, and unchoose those whose coefficient isn't positive."""
    while True:
        free = np.flatnonzero(chosen)
        wanted = np.zeros_like(found)
        wanted[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        negative = chosen & (wanted <= 0)
        if not negative.any():
            return wanted
        gap = found[negative] - wanted[negative]  # 0 for a new column that solves to 0
        reach = np.divide(found[negative], gap, out=np.zeros_like(gap), where=gap > 0)
        share = float(np.min(reach, initial=1.0))
        found = np.where(chosen, found + share * (wanted - found), 0.0)
        gone = np.flatnonzero(negative)[reach <= share]
        found[gone] = 0.0
        chosen[gone] = False
