"""Seconds of a step on several devices, as a function of its degree: the profile T(k).

The degree of a step is the number of devices that compute it together. On one device a step takes
`FittedCosts.step`. On k devices it takes

    fixed_k + (base + compute) / k * slowdown_k + per_site_k sites

where `compute` is the sum over the batch's members: the fixed part doesn't shrink with k (launches,
collectives), the slowdown is the reciprocal of the parallel efficiency, and the last term is the
time to exchange rows. Each device loads its share of the recorded rows. An edit is charged for its
masked sites, so a small edit gains little from a second device. Knows nothing of requests'
deadlines, rounds or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from maskfx.errors import InputError
from maskfx.runtime.planner.least_squares import Floats
from maskfx.scheduling.composition import expected
from maskfx.scheduling.cost_model import COEFFICIENTS, FittedCosts, PartCosts, Seconds
from maskfx.scheduling.load import Work
from maskfx.scheduling.regression import ObservationWindow, explained

DEGREES = (1, 2, 3, 4, 8)  # the sizes that a group of devices may have

_LEAST_SAMPLES = 4  # of steps on one device, that a fit needs


class DegreeCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step on several devices costs beyond an ideal division of its work."""

    fixed: Seconds = 0.0
    slowdown: Seconds = 1.0  # 1 / efficiency of the divided work
    per_site: Seconds = 0.0


class BatchTotals(NamedTuple):
    """Sums over a batch's members: seconds on one device, without the base, sites, and sizes."""

    compute: float
    load: float
    sites: int
    sizes: frozenset[int]  # of the whole pictures, each once

    def with_others(self, others: BatchTotals) -> BatchTotals:
        return BatchTotals(
            self.compute + others.compute,
            self.load + others.load,
            self.sites + others.sites,
            self.sizes if others.sizes <= self.sizes else self.sizes | others.sizes,
        )


# what `StepProfile.seconds` returns of the totals of two batches that run together
JointSeconds = Callable[[BatchTotals, BatchTotals], float]
NOTHING = BatchTotals(0.0, 0.0, 0, frozenset())


class StepProfile(Protocol):
    """Predicted seconds by degree, for the scheduler of rounds."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees that have a cost, in ascending order; the first is 1."""
        ...

    def step(self, degree: int, batch: Sequence[Work]) -> float:
        """Return the seconds of one step of a batch on a number of devices."""
        ...

    def totals(self, batch: Sequence[Work]) -> BatchTotals:
        """Return what `seconds` predicts the step of a batch from."""
        ...

    def seconds(self, degree: int, totals: BatchTotals) -> float:
        """Return the same as `step`, from the totals of the batch."""
        ...

    def joint(self, degree: int) -> JointSeconds:
        """Return the seconds of two batches in one step, at a degree."""
        ...

    def around(self, work: Work) -> float:
        """Return the seconds of a request outside its steps."""
        ...


class DegreeCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a step on one device, and how they divide over more.

    Args:
        one: Costs on one device.
        by_degree: Costs of each larger degree; a degree without an entry is not used.
    """

    one: FittedCosts
    by_degree: dict[int, DegreeCost] = {}
    origin: str = ""

    def __post_init__(self) -> None:
        if unknown := set(self.by_degree) - set(DEGREES[1:]):
            raise InputError(
                f"degree costs: by_degree has {sorted(unknown)}; a degree is one of {DEGREES[1:]}"
            )

    @property
    def degrees(self) -> tuple[int, ...]:
        return (1, *sorted(self.by_degree))

    def step(self, degree: int, batch: Sequence[Work]) -> float:
        return self.seconds(degree, self.totals(batch))

    def totals(self, batch: Sequence[Work]) -> BatchTotals:
        return totals(self.one, batch)

    def seconds(self, degree: int, totals: BatchTotals) -> float:
        return self.joint(degree)(totals, NOTHING)

    def joint(self, degree: int) -> JointSeconds:
        one = self.one
        cost = DegreeCost() if degree == 1 else self.by_degree[degree]
        base, per_size = one.base, one.per_size
        fixed, slowdown, per_site = cost.fixed, cost.slowdown, cost.per_site

        def seconds(a: BatchTotals, b: BatchTotals) -> float:
            # called for each pair of a request and a group: a tuple is read faster by place
            sizes = 0 if not per_size else len(a[3]) if b[3] <= a[3] else len(a[3] | b[3])
            compute = base + per_size * sizes + (a[0] + b[0])
            divided = fixed + compute / degree * slowdown + per_site * (a[2] + b[2])
            load = a[1] + b[1]
            return one.joint_seconds(divided, load / degree) if load else divided

        return seconds

    def around(self, work: Work) -> float:
        return self.one.around(work)

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, text: bytes | str) -> DegreeCosts:
        """Parse costs; InputError if a field is unknown, missing or out of range."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InputError(
                f"degree costs: {error}; wanted a JSON object of {', '.join(cls.__struct_fields__)}"
            ) from error


def from_efficiency(one: FittedCosts, efficiency: Mapping[int, float]) -> DegreeCosts:
    """Return costs with a constant parallel efficiency, between 0 and 1, of each degree."""
    if wrong := {k: e for k, e in efficiency.items() if not 0 < e <= 1}:
        raise InputError(f"degree costs: efficiency {wrong}; each must be above 0 and at most 1")
    costs = {k: DegreeCost(slowdown=1 / e) for k, e in efficiency.items() if k != 1}
    return DegreeCosts(one=one, by_degree=costs, origin="a given efficiency per degree")


def totals(costs: PartCosts, batch: Sequence[Work]) -> BatchTotals:
    parts = [costs.part(work) for work in batch]
    return BatchTotals(
        sum(part.compute for part in parts),
        sum(part.load for part in parts),
        sum(work.sites * work.branches for work in batch),
        frozenset(work.whole for work in batch),
    )


def alone(costs: PartCosts, totals: BatchTotals) -> float:
    """Return the seconds of a step's computing on one device."""
    return costs.base + costs.per_size * len(totals.sizes) + totals.compute


@dataclass(frozen=True)
class FitError:
    """How far a fit is from its samples: relative errors, and R2 (None if it is not defined)."""

    samples: int
    median: float
    largest: float
    r2: float | None


class ProfileFit:
    """Fits `DegreeCosts` to measured steps by robust non-negative least squares.

    Samples should not wait for loads: the bandwidth of loads is not fitted but kept from `start`.

    Args:
        start: Costs on one device before there are samples; coefficients that the samples can't
            separate keep its proportions.
        window: Number of samples per degree that are kept.
    """

    def __init__(self, start: FittedCosts, window: int = 1024) -> None:
        self.start, self._window = start, window
        self._samples: dict[int, list[tuple[tuple[Work, ...], float]]] = {}

    def add(self, degree: int, batch: Sequence[Work], seconds: float) -> None:
        """Add a measured step; InputError if the degree is unknown or the seconds are not valid."""
        if degree not in DEGREES or not batch:
            raise InputError(
                f"profile sample: degree {degree} with {len(batch)} requests; wanted a degree of "
                f"{DEGREES} and at least one request"
            )
        if not (np.isfinite(seconds) and seconds > 0):
            raise InputError(f"profile sample: {seconds} seconds; wanted a positive number")
        samples = self._samples.setdefault(degree, [])
        samples.append((tuple(batch), seconds))
        del samples[: -self._window]

    def fit(self) -> tuple[DegreeCosts, dict[int, FitError]]:
        """Return the costs, and the error per degree over the samples of that degree."""
        one = self._fit_one()
        costs = {k: self._fit_degree(k, one) for k in sorted(self._samples) if k != 1}
        found = DegreeCosts(one=one, by_degree=costs, origin="fitted to measured steps")
        return found, {k: self._error(k, found) for k in sorted(self._samples)}

    def _fit_one(self) -> FittedCosts:
        start, samples = self.start, self._samples.get(1, [])
        if len(samples) < _LEAST_SAMPLES:
            return start
        window = ObservationWindow(start.coefficients, len(samples), trust=1e-6)
        for batch, seconds in samples:
            window.add(expected(batch), seconds)
        found, r2 = window.fit()
        values = dict(zip(COEFFICIENTS, map(float, found), strict=True))
        return msgspec.structs.replace(start, **values, r2=r2, origin="fitted to measured steps")

    def _fit_degree(self, degree: int, one: FittedCosts) -> DegreeCost:
        samples = self._samples[degree]
        # ideal division as the prior, for what few samples leave open
        window = ObservationWindow((1e-9, 1.0, 1e-12), len(samples), trust=1e-6)
        for batch, seconds in samples:
            sums = totals(one, batch)
            window.add((1.0, alone(one, sums) / degree, sums.sites), seconds)
        (fixed, slowdown, per_site), _ = window.fit()
        return DegreeCost(fixed=float(fixed), slowdown=float(slowdown), per_site=float(per_site))

    def _error(self, degree: int, costs: DegreeCosts) -> FitError:
        samples = self._samples[degree]
        seen: Floats = np.array([seconds for _, seconds in samples])
        predicted: Floats = np.array([costs.step(degree, batch) for batch, _ in samples])
        off = np.abs(predicted - seen) / seen
        r2 = explained(seen, predicted, np.ones(len(seen), np.bool_))
        return FitError(len(samples), float(np.median(off)), float(off.max()), r2)
