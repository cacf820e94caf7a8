"""Workers with their figures in arrays, updated incrementally as requests start, step and end.

Schedulers also accept a plain list of workers: then the figures are collected anew for every
decision, which is fast enough for a handful of workers. With hundreds, keep a `Fleet` and update
it; an update takes constant time in the number of workers. Knows nothing of clocks or of the order
of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import overload

import numpy as np
from numpy.typing import NDArray

from maskfx.runtime.planner.least_squares import Floats
from maskfx.scheduling.cost_model import CostPart, PartCosts
from maskfx.scheduling.load import Demand, Running, TemplateTier, Work, Worker

Rows = NDArray[np.intp]  # indices of workers


class Fleet(Sequence[Worker]):
    """Workers by row; the columns of a row are its slots.

    The figures of an empty slot are 0, its deadline is inf.
    """

    def __init__(self, workers: Iterable[Worker], costs: PartCosts) -> None:
        self.workers, self.costs = list(workers), costs
        count = len(self.workers)
        seats = max((max(w.slots, len(w.running)) for w in self.workers), default=1)
        self.rows = {w.name: row for row, w in enumerate(self.workers)}
        self.compute, self.load, self.sites = (np.zeros((count, seats)) for _ in range(3))
        self.left, self.wholes = np.zeros((count, seats)), np.zeros((count, seats))
        self.due = np.full((count, seats), inf)
        self.steps, self.around = np.zeros((count, seats)), np.zeros((count, seats))
        self.free = np.array([w.slots for w in self.workers], np.intp)
        self.running = np.zeros(count, np.intp)
        self.warm: dict[str, dict[int, TemplateTier]] = {}
        self.everywhere: dict[str, TemplateTier] = {}  # tier that each worker reaches, if not warm
        self.held: dict[str, int] = {}  # requests in flight by user
        self.version = costs.version
        self._ids: list[list[str | None]] = [[None] * seats for _ in range(count)]
        for row, worker in enumerate(self.workers):
            for running in worker.running:
                self.seat(row, running)
            for template, tier in worker.warm.items():
                self.warm.setdefault(template, {})[row] = tier

    @staticmethod
    def of(workers: Sequence[Worker], costs: PartCosts) -> Fleet:
        """Build a fleet from a list of workers; return a given Fleet, updated to current costs."""
        if not isinstance(workers, Fleet):
            return Fleet(workers, costs)
        if workers.costs is not costs:
            raise ValueError(
                "Fleet: made with other costs than the scheduler's; give both the same"
            )
        if workers.version != costs.version:
            workers._refresh()
        return workers

    def __len__(self) -> int:
        return len(self.workers)

    @overload
    def __getitem__(self, at: int) -> Worker: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Worker]: ...

    def __getitem__(self, at: int | slice) -> Worker | Sequence[Worker]:
        return self.workers[at]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers)

    # Updates, each of one worker.

    def start(self, demand: Demand, row: int) -> int:
        """Start a request on a worker; return the index of its slot."""
        running = Running(demand, demand.work.steps)
        self.workers[row].running.append(running)
        return self.seat(row, running)

    def stepped(self, row: int, steps: int, ids: Iterable[str]) -> None:
        """Subtract a number of steps from the remaining steps of requests of a worker."""
        chosen = set(ids)
        seats = self._ids[row]
        for running in self.workers[row].running:
            if running.demand.id in chosen:
                running.left -= steps
                self.left[row, seats.index(running.demand.id)] = running.left

    def end(self, row: int, id: str) -> None:
        worker = self.workers[row]
        gone = next(r for r in worker.running if r.demand.id == id)
        worker.running.remove(gone)
        self.unseat(row, gone.demand)

    def warmed(self, row: int, template: str, tier: TemplateTier) -> None:
        worker = self.workers[row]
        if tier is TemplateTier.NONE:
            worker.warm.pop(template, None)
            self.warm.get(template, {}).pop(row, None)
        else:
            worker.warm[template] = tier
            self.warm.setdefault(template, {})[row] = tier

    # Updates of the figures only; the workers' lists of running requests stay unchanged.

    def seat(self, row: int, running: Running) -> int:
        seats = self._ids[row]
        demand, seat = running.demand, seats.index(None)
        part = self.costs.part(demand.work)
        seats[seat] = demand.id
        self.compute[row, seat], self.load[row, seat] = part
        self.sites[row, seat] = demand.work.sites * demand.work.branches
        self.left[row, seat], self.due[row, seat] = running.left, demand.due
        self.wholes[row, seat] = demand.work.whole
        self.steps[row, seat] = demand.work.steps
        self.around[row, seat] = self.costs.around(demand.work)
        self.free[row] -= 1
        self.running[row] += 1
        self.held[demand.user] = self.held.get(demand.user, 0) + 1
        return seat

    def unseat(self, row: int, demand: Demand) -> None:
        seat = self._ids[row].index(demand.id)
        self._ids[row][seat] = None
        figures = (self.compute, self.load, self.sites, self.left, self.wholes)
        for figure in (*figures, self.steps, self.around):
            figure[row, seat] = 0.0
        self.due[row, seat] = inf
        self.free[row] += 1
        self.running[row] -= 1
        self.held[demand.user] -= 1
        if not self.held[demand.user]:
            del self.held[demand.user]

    def _refresh(self) -> None:
        """Recompute the figures from the current costs."""
        self.version = self.costs.version
        for row, worker in enumerate(self.workers):
            for running in worker.running:
                seat = self._ids[row].index(running.demand.id)
                part = self.costs.part(running.demand.work)
                self.compute[row, seat], self.load[row, seat] = part
                self.around[row, seat] = self.costs.around(running.demand.work)

    def nearest(self, template: str | None) -> TemplateTier:
        """Return the cheapest tier in which any worker has the template."""
        if template is None:
            return TemplateTier.NONE
        otherwise = self.everywhere.get(template, TemplateTier.NONE)
        return min(otherwise, *self.warm.get(template, {}).values(), TemplateTier.NONE)

    # Predictions. They assume that no further request arrives; members leave after their last step.

    def forecast(self, work: Work, rows: Rows) -> Forecast:
        return Forecast(self, work, rows)

    def delay(self, work: Work, rows: Rows) -> Floats:
        """Return a request's seconds on these workers outside its steps."""
        costs, template = self.costs, work.template
        around = costs.around(work)
        if template is None:
            return np.full(len(rows), around)
        otherwise = self.everywhere.get(template, TemplateTier.NONE)
        delays = np.full(len(rows), around + costs.recording(work, otherwise))
        if holders := self.warm.get(template):
            by_tier = {t: around + costs.recording(work, t) for t in set(holders.values())}
            for at, row in enumerate(rows.tolist()):
                if (tier := holders.get(row)) is not None:
                    delays[at] = by_tier[tier]
        return delays


@dataclass
class Forecast:
    """Predictions for a request and for the requests in flight if it joins each of the workers."""

    fleet: Fleet
    work: Work
    rows: Rows

    def __post_init__(self) -> None:
        fleet, rows, steps = self.fleet, self.rows, self.work.steps
        costs = fleet.costs
        self.part: CostPart = costs.part(self.work)
        self.compute, self.load = fleet.compute[rows], fleet.load[rows]
        self.left = fleet.left[rows]
        self.shared = np.minimum(self.left, steps)  # joint steps of the request and each member
        # a size costs until the last member that has it ends
        self.last_of_size = last_of_size(fleet.wholes[rows], self.left)
        alike = (fleet.wholes[rows] == self.work.whole) & (self.left > 0)
        self.alike = np.where(alike, self.left, 0.0).max(1)  # steps for which its size stays anyway
        base, per_size = costs.base, costs.per_size
        self.alone = costs.joint(
            np.array(base + per_size + self.part.compute), np.array(self.part.load)
        )
        loading = self.load.sum(1)
        computing = base + per_size * self.last_of_size.sum(1) + self.compute.sum(1)
        self.before: Floats = costs.joint(computing, loading)  # seconds of a step
        # of a step of the request with those in flight, if they have its size, and as it is
        self._grown: Floats = costs.joint(computing + self.part.compute, loading + self.part.load)
        sized = computing + per_size * (self.alike == 0)
        self.after: Floats = costs.joint(sized + self.part.compute, loading + self.part.load)

    @property
    def own(self) -> Floats:
        """Seconds until the request is finished."""
        costs, steps = self.fleet.costs, self.work.steps
        # its own size in all of its steps, and the others' for as long as they are there
        alike = np.minimum(self.alike, steps)
        sizes = steps - alike + (self.shared * self.last_of_size).sum(1)
        computing = (self.compute * self.shared).sum(1) + costs.per_size * sizes
        computing += steps * (costs.base + self.part.compute)
        loading = (self.load * self.shared).sum(1) + steps * self.part.load
        own: Floats = self.fleet.delay(self.work, self.rows) + costs.joint(computing, loading)
        return own

    @property
    def delays(self) -> Floats:
        """Seconds by which each request in flight ends later."""
        # joint steps in which no other member has the request's size
        lone = np.maximum(0.0, self.shared - self.alike[:, None])
        grown = (self._grown - self.before)[:, None] * self.shared
        delays: Floats = grown + self.fleet.costs.per_size * lone
        return delays

    @property
    def ends(self) -> Floats:
        """Seconds until each request in flight is finished if the request doesn't join."""
        costs = self.fleet.costs
        beside = np.minimum(self.left[:, :, None], self.left[:, None, :])
        added = self.compute + costs.per_size * self.last_of_size
        computing = costs.base * self.left + (beside * added[:, None, :]).sum(2)
        ends: Floats = costs.joint(computing, (beside * self.load[:, None, :]).sum(2))
        return ends

    @property
    def harm(self) -> Floats:
        """Total seconds of delay added to the requests in flight."""
        harm: Floats = self.delays.sum(1)
        return harm

    @property
    def gain(self) -> Floats:
        """Speed-up of a joint step over two separate steps; inf on idle workers."""
        gain = (self.before + self.alone) / self.after
        return np.where(self.fleet.running[self.rows] > 0, gain, inf)

    @property
    def wait(self) -> Floats:
        """Seconds until a request can join at the latest: the step that a worker makes now."""
        return np.where(self.fleet.running[self.rows] > 0, self.before, 0.0)

    def breaks(self, now: float) -> NDArray[np.bool_]:
        """Return a mask of the workers where a request in flight could newly miss its deadline.

        It may still be prepared, if it made no step yet, and then wait for the step under way; and
        its picture is decoded afterwards.
        """
        room = self.fleet.due[self.rows] - now
        if not np.isfinite(room).any():
            return np.zeros(len(self.rows), np.bool_)
        ends = self.ends
        unmoved = (self.left > 0) & (self.left >= self.fleet.steps[self.rows])
        latest = ends + self.delays + self.fleet.around[self.rows]
        latest += np.where(unmoved, self.wait[:, None], 0.0)
        broken: NDArray[np.bool_] = np.asarray(((ends <= room) & (latest > room)).any(1))
        return broken


def last_of_size(wholes: Floats, left: Floats) -> NDArray[np.bool_]:
    """Return a mask of the members that end last of those with their size, one per size.

    Args:
        wholes: The members' sizes by worker and slot; 0 in an empty slot.
        left: Their remaining steps.
    """
    seats = wholes.shape[1]
    earlier = np.arange(seats)[:, None] > np.arange(seats)[None, :]
    later = (left[:, None, :] > left[:, :, None]) | (
        (left[:, None, :] == left[:, :, None]) & earlier[None]
    )
    outlived = ((wholes[:, None, :] == wholes[:, :, None]) & later).any(2)
    last: NDArray[np.bool_] = np.asarray((wholes > 0) & (left > 0) & ~outlived)
    return last
