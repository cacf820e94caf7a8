"""Routers and schedulers that serve nowhere: what those of the server are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maskfx.runtime.planner.least_squares import Floats
from maskfx.scheduling.fleet import Fleet, Forecast
from maskfx.scheduling.load import Decision, Demand, Worker


class AssignedRouter:
    """The worker that was given the fewest requests, or tokens, since the beginning."""

    def __init__(self, tokens: bool) -> None:
        self.tokens = tokens
        self._given = np.zeros(0)

    def burden(self, fleet: Fleet) -> Floats:
        return np.resize(self._given, len(fleet))

    def scores(self, forecast: Forecast) -> Floats:
        """The one with the least score is the one that is chosen: it is counted here."""
        if not len(self._given):
            self._given = np.zeros(len(forecast.fleet))
        scores: Floats = self._given[forecast.rows]
        chosen = forecast.rows[np.argmin(scores)]
        self._given[chosen] += forecast.work.sites if self.tokens else 1
        return scores


class FixedBatchScheduler:
    """First come, first served, in batches of one size that run to their end.

    An idle worker starts the request that waits longest, and with it the next ones whose pictures
    have its size, as many as it has slots. No request joins a batch under way.
    """

    def decide(self, now: float, waiting: Sequence[Demand], workers: Sequence[Worker]) -> Decision:
        queue = sorted(waiting, key=lambda demand: (demand.arrived, demand.id))
        starts: list[tuple[Demand, str]] = []
        for worker in workers:
            if worker.running or not queue:
                continue
            whole = queue[0].work.whole
            alike = [demand for demand in queue if demand.work.whole == whole][: worker.slots]
            starts += [(demand, worker.name) for demand in alike]
            gone = {demand.id for demand in alike}
            queue = [demand for demand in queue if demand.id not in gone]
        return Decision(tuple(starts))
