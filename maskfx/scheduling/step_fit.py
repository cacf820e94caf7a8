"""StepFit: what the figures of a batch's composition cost, fitted to the latest steps.

Owns the observations of steps; knows nothing of workers, requests or loads.
"""

from __future__ import annotations

import numpy as np

from maskfx.runtime.planner.least_squares import Floats
from maskfx.scheduling.composition import Composition
from maskfx.scheduling.regression import ObservationWindow

LATEST = 8  # steps from which the machine's present speed is estimated
TRUST = 2.0  # steps at the fitted speed that are added to them


class StepFit:
    """Predicts the seconds of a step, linear in the batch's composition.

    The coefficients are fitted to a window of steps. The machine's speed changes faster than that,
    so predictions are scaled by how much longer the latest steps took than was predicted.

    Args:
        start: The coefficients before the first observation, known up to a common factor.
        window: Number of steps that are kept.
    """

    def __init__(self, start: Composition, window: int = 256) -> None:
        self._window = ObservationWindow(start, window, relative=True)
        self._found = np.asarray(start, np.float64)  # the coefficients of the last fit
        self.r2: float | None = None  # of the last fit; None until there are enough steps

    def add(self, composition: Composition, seconds: float) -> None:
        self._window.add(composition, seconds)

    def fit(self, *, drift: bool = True) -> Composition:
        """Return the coefficients of the window; with `drift`, at the speed of its latest steps."""
        self._found, r2 = self._window.fit()
        self.r2 = self.r2 if r2 is None else r2
        return self.now() if drift else Composition(*self._found.tolist())

    def now(self) -> Composition:
        """Return the coefficients of the last fit, at the speed of the latest steps."""
        return Composition(*(self._found * self._drift(self._found)).tolist())

    def _drift(self, found: Floats) -> float:
        """Return how many times longer the latest steps took than the coefficients say."""
        rows, seconds = self._window.latest(LATEST)
        said = rows @ found
        known = (said > 0) & (seconds > 0)
        if not known.any():
            return 1.0
        ratios = np.log(seconds[known] / said[known])
        return float(np.exp(np.median(ratios) * len(ratios) / (len(ratios) + TRUST)))
