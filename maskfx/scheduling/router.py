"""Routers: choose the worker of a request. Pure: a fleet's figures in, a score per worker out.

`CostRouter` is FlashPS's Algorithm 2: the worker on which the request has the least predicted
cost. In the paper the cost is the latency of the joint batch's next step under the batch's plan.
Here it is the latency of the whole request under the plans of its steps (`FittedCosts.joint`),
including the remaining steps of the requests in flight, the loading or recording of its template,
and the delay that it adds to the requests in flight. The other two routers are the baselines.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from maskfx.errors import InputError
from maskfx.runtime.planner.least_squares import Floats
from maskfx.scheduling.fleet import Fleet, Forecast, Rows
from maskfx.scheduling.load import Work

FEW = 32  # with more workers than this, only the least loaded and the warm ones are scored


class Router(Protocol):
    """Scores workers; the worker with the least score is chosen."""

    def burden(self, fleet: Fleet) -> Floats:
        """Return every worker's load, independent of the request; must be cheap."""
        ...

    def scores(self, forecast: Forecast) -> Floats: ...


class CostRouter:
    """Scores by predicted cost: the request's seconds plus weighted delays of those in flight.

    `others` is the weight of a second of delay of the requests in flight, relative to a second of
    the new request.
    """

    def __init__(self, others: float = 0.5) -> None:
        self.others = others

    def burden(self, fleet: Fleet) -> Floats:
        burden: Floats = np.einsum("rs,rs->r", fleet.compute, fleet.left)
        return burden

    def scores(self, forecast: Forecast) -> Floats:
        return forecast.own + self.others * forecast.harm


class RequestRouter:
    """Scores by the number of requests in flight."""

    def burden(self, fleet: Fleet) -> Floats:
        return fleet.running.astype(np.float64)

    def scores(self, forecast: Forecast) -> Floats:
        return forecast.fleet.running[forecast.rows].astype(np.float64)


class TokenRouter:
    """Scores by the number of sites that a step computes."""

    def burden(self, fleet: Fleet) -> Floats:
        burden: Floats = fleet.sites.sum(1)
        return burden

    def scores(self, forecast: Forecast) -> Floats:
        scores: Floats = forecast.fleet.sites[forecast.rows].sum(1)
        return scores


def candidates(router: Router, work: Work, fleet: Fleet) -> Rows:
    """Return the workers with a free slot; if more than `FEW`, only the least loaded and warm ones.

    These are at most `FEW` of each.
    """
    rows: Rows = np.flatnonzero(fleet.free > 0)
    if len(rows) <= FEW:
        return rows
    least = rows[np.argpartition(router.burden(fleet)[rows], FEW)[:FEW]]
    holders = fleet.warm.get(work.template, {}) if work.template is not None else {}
    if not holders:
        return np.sort(least)
    warm = np.fromiter(holders, np.intp, len(holders))
    warm = warm[fleet.free[warm] > 0]
    if len(warm) > FEW:
        warm = warm[np.argpartition(router.burden(fleet)[warm], FEW)[:FEW]]
    return np.union1d(least, warm)


def choose(router: Router, work: Work, fleet: Fleet) -> int | None:
    """Return the row of the worker for a request; None if no slot is free."""
    rows = candidates(router, work, fleet)
    if not len(rows):
        return None
    return int(rows[np.argmin(router.scores(fleet.forecast(work, rows)))])


ROUTERS: dict[str, type[Router]] = {
    "cost": CostRouter,
    "requests": RequestRouter,
    "tokens": TokenRouter,
}


def make_router(name: str) -> Router:
    if name not in ROUTERS:
        raise InputError(f"router {name!r}: choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
