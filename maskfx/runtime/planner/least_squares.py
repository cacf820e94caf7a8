"""Least squares with coefficients of at least 0, for costs: nothing takes less than no time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RIDGE = 1e-10  # added to each column's squares; columns that are equal share their effect


def non_negative(rows: Floats, wanted: Floats, weights: Floats | None = None) -> Floats:
    """Return the x >= 0 that minimises the weighted sum of (rows @ x - wanted)**2.

    It tries every set of positive coefficients, which is exact and fast for a handful of columns.
    `scipy.optimize.nnls` takes up to a second to import, and costs are fitted in processes that
    start at once.
    """
    root = np.ones(len(rows)) if weights is None else np.sqrt(weights)
    scale = np.sqrt(((root[:, None] * rows) ** 2).sum(0))
    scale[scale == 0] = 1.0
    scaled = root[:, None] * rows / scale
    left, right = scaled.T @ scaled + RIDGE * np.eye(len(scale)), scaled.T @ (root * wanted)
    best, least = np.zeros(len(scale)), 0.0
    for chosen in supports(len(scale)):
        found = np.linalg.solve(left[np.ix_(chosen, chosen)], right[chosen])
        value = -0.5 * float(right[chosen] @ found)
        if value < least and (found >= 0).all():
            best, least = np.zeros(len(scale)), value
            best[chosen] = found
    solved: Floats = best / scale
    return solved


def supports(count: int) -> Iterator[list[int]]:
    """Yield all non-empty sets of columns."""
    for size in range(count, 0, -1):
        for chosen in combinations(range(count), size):
            yield list(chosen)
