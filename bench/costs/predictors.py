"""Predictors of a step's seconds from its composition: what serves, and what it is compared with.

`fit` sees a history of steps; `predict` returns the seconds of others. The server's predictor is
`maskfx.scheduling.step_fit.StepFit`; the others are here only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from maskfx.runtime.planner.least_squares import Floats
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.composition import Composition
from maskfx.scheduling.cost_model import START
from maskfx.scheduling.regression import ObservationWindow
from maskfx.scheduling.step_fit import StepFit
from maskfx.scheduling.step_reports import StepMember

Members = Sequence[StepMember]


class Predictor(Protocol):
    """Predicts the seconds of steps."""

    def fit(self, steps: Sequence[Members], seconds: Floats) -> None: ...

    def predict(self, steps: Sequence[Members]) -> Floats: ...


class SitesOnly:
    """Least squares on requests and sites, as where a step reports no composition."""

    def __init__(self) -> None:
        self._found: Floats = np.zeros(3)

    @staticmethod
    def rows(steps: Sequence[Members]) -> Floats:
        return np.array([[1.0, len(step), sum(m.sites for m in step)] for step in steps])

    def fit(self, steps: Sequence[Members], seconds: Floats) -> None:
        start = (START.base, START.per_request, START.per_site)
        self._found = windowed(start, self.rows(steps), seconds)

    def predict(self, steps: Sequence[Members]) -> Floats:
        said: Floats = self.rows(steps) @ self._found
        return said


class SitesAndPairs(SitesOnly):
    """The same with the pairs of sites that attend to each other, from the batch's requests."""

    def __init__(self) -> None:
        self._found = np.zeros(4)

    @staticmethod
    def rows(steps: Sequence[Members]) -> Floats:
        pairs = [[sum(m.sites * m.whole for m in step)] for step in steps]
        return np.hstack([SitesOnly.rows(steps), np.array(pairs, np.float64)])

    def fit(self, steps: Sequence[Members], seconds: Floats) -> None:
        start = (START.base, START.per_request, START.per_site, START.per_pair)
        self._found = windowed(start, self.rows(steps), seconds)


def windowed(start: Sequence[float], rows: Floats, seconds: Floats) -> Floats:
    window = ObservationWindow(start, len(rows))
    for row, took in zip(rows, seconds, strict=True):
        window.add(row.tolist(), float(took))
    return window.fit()[0]


class Served:
    """The server's: linear in the composition.

    Args:
        firsts: Whether first steps are distinguished.
        levels: Whether sites are weighted by the FLOPs of their levels.
    """

    def __init__(self, *, firsts: bool = True, levels: bool = True) -> None:
        self._found, self._firsts, self._levels = np.zeros(0), firsts, levels

    def _row(self, step: Members) -> Composition:
        if not self._firsts:
            step = [msgspec.structs.replace(member, first=False) for member in step]
        if not self._levels:
            step = [msgspec.structs.replace(m, work=None, pairs=None) for m in step]
        return Composition.of(step)

    def fit(self, steps: Sequence[Members], seconds: Floats) -> None:
        fit = StepFit(START.coefficients, len(steps))
        for step, took in zip(steps, seconds, strict=True):
            fit.add(self._row(step), float(took))
        self._found = np.array(fit.fit(drift=False))

    def predict(self, steps: Sequence[Members]) -> Floats:
        said: Floats = np.array([self._row(step) for step in steps]) @ self._found
        return said


class WithCalls(Served):
    """The served figures, and which code runs: rows at all, a recording, calls of the module."""

    def _row(self, step: Members) -> tuple[float, ...]:  # type: ignore[override]
        computing = [member for member in step if member.sites]
        dense = {m.whole for m in computing if m.kind is StepKind.DENSE}
        rows = any(m.kind is not StepKind.DENSE for m in computing)
        recordings = any(m.kind is StepKind.RECORD for m in computing)
        return (*Composition.of(step), float(rows), float(recordings), float(len(dense)))

    def fit(self, steps: Sequence[Members], seconds: Floats) -> None:
        start = (*START.coefficients, START.base, START.base, START.base)
        window = ObservationWindow(start, len(steps), relative=True)
        for step, took in zip(steps, seconds, strict=True):
            window.add(self._row(step), float(took))
        self._found = window.fit()[0]


class SupportVectors:
    """PatchedServe's: scikit-learn's SVR on the counts by size, distinct sizes and patches.

    Args:
        sizes: The sizes that are counted.
        full: Add what each kind of member computes; else the paper's features only.
    """

    def __init__(self, sizes: Sequence[int], *, full: bool) -> None:
        self._sizes, self._full = list(sizes), full

    def _rows(self, steps: Sequence[Members]) -> Floats:
        rows = []
        for step in steps:
            counts = [sum(m.whole == size for m in step) for size in self._sizes]
            row = [*counts, len({m.whole for m in step}), sum(m.sites for m in step)]
            rows.append([*row, *Composition.of(step)[1:]] if self._full else row)
        return np.array(rows, np.float64)

    def fit(self, steps: Sequence[Members], seconds: Floats) -> None:
        from sklearn.model_selection import GridSearchCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        from sklearn.svm import SVR

        grid = {
            "svr__C": [1, 10, 100],
            "svr__gamma": [0.01, 0.1],
            "svr__epsilon": [0.01],
        }
        self._scale = float(np.mean(seconds))
        model = make_pipeline(StandardScaler(), SVR())
        self._model = GridSearchCV(model, grid, cv=4, scoring="neg_mean_absolute_percentage_error")
        self._model.fit(self._rows(steps), seconds / self._scale)

    def predict(self, steps: Sequence[Members]) -> Floats:
        said: Floats = self._scale * self._model.predict(self._rows(steps))
        return said


def predictors(sizes: Sequence[int]) -> dict[str, Callable[[], Predictor]]:
    """Return the predictors that are compared, by name."""
    return {
        "requests and sites": SitesOnly,
        "requests, sites and pairs": SitesAndPairs,
        "composition, linear": Served,
        "composition and calls": WithCalls,
        "without levels": lambda: Served(levels=False),
        "without first steps": lambda: Served(firsts=False),
        "without both": lambda: Served(firsts=False, levels=False),
        "SVR, the paper's features": lambda: SupportVectors(sizes, full=False),
        "SVR, composition": lambda: SupportVectors(sizes, full=True),
    }


def errors(seen: Floats, said: Floats) -> dict[str, float]:
    """Return the mean absolute percentage error, its 90 % quantile, and R2."""
    off = np.abs(said - seen) / seen
    spread = float(((seen - seen.mean()) ** 2).sum())
    return {
        "mape": float(off.mean()),
        "p90": float(np.quantile(off, 0.9)),
        "r2": 1.0 - float(((seen - said) ** 2).sum()) / spread,
    }
