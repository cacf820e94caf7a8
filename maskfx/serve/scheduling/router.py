"""Routers: which worker a request goes to. Pure: figures of a fleet in, a score per worker out.

`CostRouter` is FlashPS's Algorithm 2: the worker on which the request has the least predicted
cost. There, a cost is the latency of the joint batch's next step; here it is that of the whole
request, with the steps that those under way still have, with what its template takes to get
there, and with how much later everybody under way gets. The other two are what it is measured
against.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from maskfx.errors import InputError
from maskfx.serve.scheduling.fleet import Fleet, Forecast, Rows
from maskfx.serve.scheduling.load import Work
from maskfx.serve.scheduling.regression import Floats

FEW = 32  # workers that are looked at closely; beyond, only the least loaded and the warm ones


class Router(Protocol):
    """Scores workers; the least score is chosen."""

    def burden(self, fleet: Fleet) -> Floats:
        """How much every worker has to do, whatever is asked: cheap."""
        ...

    def scores(self, forecast: Forecast) -> Floats: ...


class CostRouter:
    """The least predicted cost.

    others: how much a second counts by which those under way get later, for one of the request.
    """

    def __init__(self, others: float = 0.5) -> None:
        self.others = others

    def burden(self, fleet: Fleet) -> Floats:
        burden: Floats = np.einsum("rs,rs->r", fleet.compute, fleet.left)
        return burden

    def scores(self, forecast: Forecast) -> Floats:
        return forecast.own + self.others * forecast.harm


class RequestRouter:
    """The fewest requests."""

    def burden(self, fleet: Fleet) -> Floats:
        return fleet.running.astype(np.float64)

    def scores(self, forecast: Forecast) -> Floats:
        return forecast.fleet.running[forecast.rows].astype(np.float64)


class TokenRouter:
    """The fewest sites that a step computes."""

    def burden(self, fleet: Fleet) -> Floats:
        burden: Floats = fleet.sites.sum(1)
        return burden

    def scores(self, forecast: Forecast) -> Floats:
        scores: Floats = forecast.fleet.sites[forecast.rows].sum(1)
        return scores


def candidates(router: Router, work: Work, fleet: Fleet) -> Rows:
    """Workers with a free slot: all of a few; of many, the least burdened and the warm ones."""
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
    """The row of the worker that a request goes to; None: no slot is free."""
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
