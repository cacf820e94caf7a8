"""Robust non-negative least squares over the latest observations, for costs learnt online.

Owns a window of rows and its fit; knows nothing of requests or workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maskfx.runtime.planner.least_squares import Floats, non_negative

ROUNDS = 4  # iterations of reweighting, which reduces the weight of outliers
SPREAD = 2.5  # robust standard deviations beyond which an observation is an outlier
MADS = 1.4826  # a normal distribution's standard deviation in median absolute deviations


class ObservationWindow:
    """The latest rows of (features, seconds), and the coefficients that fit them best.

    Args:
        start: Prior of the coefficients up to a common factor, the machine's speed. Coefficients
            that the rows can't separate keep the prior's proportions.
        size: Number of rows that are kept.
        trust: Weight of the prior in rows, divided by the number of rows: the first row is
            outweighed, and after some dozens only coefficients that they can't separate follow
            the prior. A prior of constant weight makes the predictions several times worse.
        relative: Whether errors count in relation to the seconds that are predicted.
    """

    def __init__(
        self,
        start: Sequence[float],
        size: int = 256,
        trust: float = 4.0,
        *,
        relative: bool = False,
    ) -> None:
        self.start, self.trust, self.relative = np.asarray(start, np.float64), trust, relative
        self._rows = np.zeros((size, len(start)))
        self._seconds = np.zeros(size)
        self._seen = 0

    def __len__(self) -> int:
        return min(self._seen, len(self._rows))

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Add a row, replacing the oldest; ignore non-finite values and negative seconds."""
        row = np.asarray(features, np.float64)
        if not (np.isfinite(row).all() and np.isfinite(seconds) and seconds >= 0):
            return
        at = self._seen % len(self._rows)
        self._rows[at], self._seconds[at] = row, seconds
        self._seen += 1

    def latest(self, count: int) -> tuple[Floats, Floats]:
        """Return the features and seconds of the latest rows, `count` at most."""
        at = np.arange(max(0, self._seen - min(count, len(self))), self._seen) % len(self._rows)
        return self._rows[at], self._seconds[at]

    def fit(self) -> tuple[Floats, float | None]:
        """Return the coefficients, and R2 over the rows that aren't outliers (None if too few)."""
        count = len(self)
        if not count:
            return self.start.copy(), None
        rows, seconds = self._rows[:count], self._seconds[:count]
        belief = self._belief(rows, seconds)
        units = self._units(rows @ belief, seconds)  # errors count in these
        weights = np.ones(count)
        found = belief
        for _ in range(ROUNDS):
            found = self._solve(rows, seconds, weights / units**2, belief)
            units = self._units(rows @ found, seconds)
            off = np.abs(seconds - rows @ found) / units
            usual = float(np.median(seconds / units))
            # exact data have no spread; a floor keeps rounding errors from making outliers
            spread = max(MADS * float(np.median(off)), 1e-9 + 1e-6 * usual)
            weights = np.minimum(1.0, SPREAD * spread / np.maximum(off, 1e-300)) ** 2
        return found, explained(seconds, rows @ found, weights > 0.1)

    def _units(self, said: Floats, seconds: Floats) -> Floats:
        """Return what the error of each row is divided by, about 1 on average."""
        if not self.relative:
            return np.ones(len(said))
        usual = max(float(np.median(seconds)), 1e-12)
        units: Floats = np.maximum(said, usual / 100) / usual
        return units

    def _belief(self, rows: Floats, seconds: Floats) -> Floats:
        """Return the prior, scaled by the median ratio of the rows to its predictions."""
        said = rows @ self.start
        if not (said > 0).any():
            return self.start
        belief: Floats = self.start * np.median(seconds[said > 0] / said[said > 0])
        return belief

    def _solve(self, rows: Floats, seconds: Floats, weights: Floats, belief: Floats) -> Floats:
        """Solve the weighted problem, with one more row per coefficient for the prior."""
        scale = np.sqrt((weights[:, None] * rows**2).sum(0) / max(weights.sum(), 1e-12))
        scale[scale == 0] = 1.0
        prior = np.full(len(scale), self.trust / len(rows))
        return non_negative(
            np.concatenate([rows, np.diag(scale)]),
            np.concatenate([seconds, belief * scale]),
            np.concatenate([weights, prior]),
        )


def explained(seen: Floats, said: Floats, counted: NDArray[np.bool_]) -> float | None:
    """Return R2, the share of explained variance; None for constant or fewer than three values."""
    seen, said = seen[counted], said[counted]
    if len(seen) < 3 or float(np.ptp(seen)) == 0.0:
        return None
    return 1.0 - float(((seen - said) ** 2).sum() / ((seen - seen.mean()) ** 2).sum())
