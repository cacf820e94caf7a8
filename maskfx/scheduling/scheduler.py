"""Schedulers: decide which waiting requests start now, on which worker, and which to drop as late.

Pure: no clock, no sockets. A router chooses the worker; the scheduler chooses the requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskfx.errors import InputError
from maskfx.scheduling.cost_model import PartCosts
from maskfx.scheduling.fleet import Fleet, Forecast
from maskfx.scheduling.load import Decision, Demand, Running, Scheduler, TemplateTier, Worker
from maskfx.scheduling.router import Router, candidates, choose, make_router

REFUSALS = 16  # in one decision; further requests would overtake too many refused ones
BESIDE = 4  # members of a batch that share its fixed seconds, where requests are in a queue
PROBE = 60.0  # seconds without a start, after which one request is tried although predicted late


class FcfsScheduler:
    """First come, first served, as long as there are free slots: the baseline.

    Args:
        costs: Predicted seconds of steps and requests.
        router: Chooses the worker.
        drop: Whether to drop requests that can't meet their deadline, instead of serving them
            late.
    """

    def __init__(self, costs: PartCosts, router: Router, *, drop: bool = True) -> None:
        self.costs, self.router, self.drop = costs, router, drop
        self._alone = Alone(costs)

    def decide(self, now: float, waiting: Sequence[Demand], workers: Sequence[Worker]) -> Decision:
        self._alone.prune(len(waiting))
        fleet = Fleet.of(workers, self.costs)
        late = self._alone.too_late(waiting, now, fleet) if self.drop else []
        gone = {d.id for d in late}
        starts = []
        with TrialStart(fleet) as trial:
            if trial.room:
                for demand in sorted(waiting, key=lambda d: (d.arrived, d.id)):
                    if demand.id in gone:
                        continue
                    row = choose(self.router, demand.work, trial.fleet)
                    if row is None:
                        break
                    starts.append((demand, trial.start(demand, row)))
        self._alone.started(now, len(starts))
        return Decision(tuple(starts), tuple(late))


class SlackScheduler:
    """PatchedServe's Algorithm 1: least slack first, if batching pays and no deadline is missed.

    A request's slack is the time left until its deadline minus its predicted time alone, in units
    of the latter. A request that can't meet its deadline even if it starts at once, alone, is
    dropped. A request joins a batch only if

    - it meets its deadline there, and no request in flight misses a deadline that it would meet
      otherwise;
    - the batch gains: one joint step is at least `gain` times faster than a step of the batch and
      a step of the request one after the other, (before + alone) / after. The paper's Eq. 1,
      cur cand / (new (cur + cand)) with throughputs 1 / seconds of a step, equals
      after / (before + alone). There a smaller value is a larger gain, which contradicts the
      paper's "add if it is larger than a threshold"; so its reciprocal is compared here.

    Where the requests can't all be in time, by their deadlines and the workers' seconds, the
    shorter one goes first, and of equal ones the one with more slack: those with the least allow no
    others beside them, so that batches would be small for as long as the queue lasts.

    Beyond the paper: several workers, of which the router chooses among those that fit; a refused
    request doesn't block those behind it, up to `REFUSALS`; and fairness between users. So requests
    wait here, not in batches that gain nothing from them, and an idle worker always gets one.

    A request without a deadline goes after those with one and isn't dropped. Among such requests
    the shorter one goes first, unless the other one has waited longer for it by `shorter` times the
    difference. Its slack falls for as long as it waits; after `patience` times its time alone it
    starts as soon as a slot is free, so it doesn't starve.

    Args:
        costs: Predicted seconds of steps and requests.
        router: Scores the workers.
        gain: Least speed-up of a joint step for a request to join a batch.
        share: Slack added per request that the user has in flight, so that among equally urgent
            requests the user with the fewest goes first.
        patience: Virtual deadline of requests without one, in multiples of their time alone.
        shorter: Seconds of waiting that outweigh a second of time alone, among requests without a
            deadline.
    """

    def __init__(
        self,
        costs: PartCosts,
        router: Router,
        *,
        gain: float = 1.06,
        share: float = 0.5,
        patience: float = 20.0,
        shorter: float = 3.0,
    ) -> None:
        self.costs, self.router = costs, router
        self.gain, self.share, self.patience, self.shorter = gain, share, patience, shorter
        self._alone = Alone(costs)

    def decide(self, now: float, waiting: Sequence[Demand], workers: Sequence[Worker]) -> Decision:
        self._alone.prune(len(waiting))
        fleet = Fleet.of(workers, self.costs)
        drops = tuple(self._alone.too_late(waiting, now, fleet))
        starts: list[tuple[Demand, str]] = []
        gone = {d.id for d in drops}
        with TrialStart(fleet) as trial:
            unit = self._usual(waiting) if trial.room else 0.0
            left = [demand for demand in waiting if demand.id not in gone]
            usual = self._crowd(now, left, fleet) if trial.room else None
            while trial.room:  # a start may let a request gain that was refused before it
                queue = Queue(trial.fleet.held, self.share)
                for demand in waiting:
                    if demand.id not in gone:
                        queue.add(self._urgency(demand, now, unit, usual), demand)
                started = self._start(now, queue, trial)
                if not started:
                    break
                starts += started
                gone |= {demand.id for demand, _ in started}
        self._alone.started(now, len(starts))
        return Decision(tuple(starts), drops)

    def _start(self, now: float, queue: Queue, trial: TrialStart) -> list[tuple[Demand, str]]:
        starts, refused = [], 0
        for slack, demand in queue:
            row = self._place(now, slack, demand, trial.fleet)
            if row is not None:
                starts.append((demand, trial.start(demand, row)))
                queue.started(demand)
            else:
                refused += 1
            if not trial.room or refused >= REFUSALS:
                break
        return starts

    def _usual(self, waiting: Sequence[Demand]) -> float:
        """Return the mean seconds alone of the requests without a deadline."""
        alone = [self._alone.seconds(demand) for demand in waiting if demand.due == inf]
        return max(sum(alone) / max(1, len(alone)), 1e-9)

    def _slack(self, demand: Demand, now: float, unit: float) -> float:
        """Return a request's slack; `unit` is the usual time alone of those without a deadline."""
        alone = self._alone.seconds(demand)
        due = demand.due if demand.due < inf else demand.arrived + self.patience * alone
        slack = (due - now - alone) / max(alone, 1e-9)
        if demand.due < inf or slack <= 0:
            return slack
        waited = (now - demand.arrived - self.shorter * alone) / unit
        return max(self.patience - waited, 1e-9)  # 0 would mean that it has waited long enough

    def _crowd(self, now: float, waiting: Sequence[Demand], fleet: Fleet) -> float | None:
        """Return the mean seconds alone of requests that can't all be in time; None if they can.

        The work until each deadline is compared with what the workers do until then, as if each
        step had `BESIDE` members.
        """
        costs, shared = self.costs, (self.costs.base + self.costs.per_size) / BESIDE
        due = sorted((d for d in waiting if d.due < inf), key=lambda d: d.due)
        work = float((fleet.left * (fleet.compute + shared * (fleet.left > 0))).sum())
        crowded = False
        for demand in due:
            own = costs.part(demand.work).compute + shared
            work += demand.work.steps * own
            crowded |= work > len(fleet) * (demand.due - now - costs.around(demand.work))
        alone = [self._alone.seconds(demand) for demand in due]
        return max(sum(alone) / len(alone), 1e-9) if crowded else None

    def _urgency(self, demand: Demand, now: float, unit: float, usual: float | None) -> float:
        """Return a request's place in the queue; `usual` is the mean time alone in a crowd."""
        slack = self._slack(demand, now, unit)
        if usual is None or demand.due == inf:
            return slack
        return self._alone.seconds(demand) / usual - slack / 1000

    def _place(self, now: float, slack: float, demand: Demand, fleet: Fleet) -> int | None:
        """Return the row of the best worker on which the request may start; None if none fits."""
        rows = candidates(self.router, demand.work, fleet)
        if not len(rows):
            return None
        forecast = fleet.forecast(demand.work, rows)
        scores = self.router.scores(forecast)
        patient = demand.due == inf and slack <= 0  # its virtual deadline has passed
        if not patient and demand.id != self._alone.probe:
            fits = self._fits(now, demand, forecast)
            if not fits.any():
                return None
            scores = np.where(fits, scores, inf)
        return int(rows[np.argmin(scores)])

    def _fits(self, now: float, demand: Demand, forecast: Forecast) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = forecast.gain >= self.gain
        if demand.due < inf:
            fits &= now + forecast.own + forecast.wait <= demand.due
        if fits.any():
            fits &= ~forecast.breaks(now)
        return fits


class Alone:
    """Predicts the seconds of requests alone on an idle worker, for the template's nearest tier."""

    def __init__(self, costs: PartCosts) -> None:
        self.costs = costs
        self._version = costs.version
        self._known: dict[str, tuple[float, float]] = {}
        self._since: float | None = None  # time of the last start
        self.probe: str | None = None  # id of the request that is tried although predicted late

    def too_late(self, waiting: Sequence[Demand], now: float, fleet: Fleet) -> list[Demand]:
        """Return the waiting requests that can't meet their deadline any more.

        If all of them are late, no request was started for `PROBE` seconds and all workers are
        idle, one request is left out and tried: overestimated costs would otherwise drop every
        request from then on, and dropped requests yield no observations to correct the costs.
        """
        late = [d for d in waiting if self.late(d, now, fleet)]
        self.probe = None
        if self._since is None:
            self._since = now
        idle = bool(len(fleet)) and not fleet.running.any()
        if late and len(late) == len(waiting) and idle and now - self._since > PROBE:
            tried = max(late, key=lambda d: (d.due, d.id))
            late.remove(tried)
            self.probe = tried.id
        return late

    def started(self, now: float, count: int) -> None:
        if count:
            self._since = now

    def seconds(self, demand: Demand) -> float:
        """Return the seconds of a request whose template is on the device or host."""
        return self._both(demand)[0]

    def late(self, demand: Demand, now: float, fleet: Fleet) -> bool:
        """Return True if a request misses its deadline even if it starts at once."""
        if demand.due == inf:
            return False
        near, far = self._both(demand)
        if now + near > demand.due or now + far <= demand.due:
            return now + near > demand.due  # the same for every tier of its template
        recording = self.costs.recording(demand.work, fleet.nearest(demand.work.template))
        return now + near + recording > demand.due

    def _both(self, demand: Demand) -> tuple[float, float]:
        """Return the seconds with the template at hand, and with the template in the worst tier."""
        known = self._known.get(demand.id)
        if known is None:
            work, costs = demand.work, self.costs
            near = costs.around(work) + work.steps * costs.step([work])
            far = near + max(costs.recording(work, tier) for tier in TemplateTier)
            known = self._known[demand.id] = near, far
        return known

    def prune(self, waiting: int) -> None:
        """Clear the memoised predictions if the costs changed or too many requests have left."""
        if self._version != self.costs.version or len(self._known) > 4 * waiting + 256:
            self._version = self.costs.version
            self._known.clear()


class QueueEntry(NamedTuple):
    """A waiting request, ordered by urgency."""

    slack: float
    arrived: float
    id: str
    demand: Demand


class Queue:
    """Waiting requests, ordered by slack and by the number of their user's requests in flight."""

    def __init__(self, held: dict[str, int], share: float) -> None:
        self._held, self._share = dict(held), share
        self._users: dict[str, list[QueueEntry]] = {}

    def add(self, slack: float, demand: Demand) -> None:
        entry = QueueEntry(slack, demand.arrived, demand.id, demand)
        self._users.setdefault(demand.user, []).append(entry)

    def started(self, demand: Demand) -> None:
        self._held[demand.user] = self._held.get(demand.user, 0) + 1

    def _key(self, entry: QueueEntry) -> tuple[float, int, float, str]:
        held = self._held.get(entry.demand.user, 0)
        return entry.slack + self._share * held, held, entry.arrived, entry.id

    def __iter__(self) -> Iterator[tuple[float, Demand]]:
        """Yield each request once; `started` calls in between lower the user's other requests."""
        for entries in self._users.values():
            heapq.heapify(entries)
        heads = [(self._key(entries[0]), user) for user, entries in self._users.items()]
        heapq.heapify(heads)
        while heads:
            user = heads[0][1]
            entries = self._users[user]
            entry = heapq.heappop(entries)
            yield entry.slack, entry.demand
            if entries:
                heapq.heapreplace(heads, (self._key(entries[0]), user))
            else:
                heapq.heappop(heads)


@dataclass
class TrialStart:
    """Context manager that starts requests in a fleet's figures and reverts them on exit."""

    fleet: Fleet
    _started: list[tuple[int, Demand]] = field(default_factory=list)

    @property
    def room(self) -> bool:
        return bool((self.fleet.free > 0).any())

    def start(self, demand: Demand, row: int) -> str:
        """Start a request on a worker tentatively; return the worker's name."""
        self.fleet.seat(row, Running(demand, demand.work.steps))
        self._started.append((row, demand))
        return self.fleet[row].name

    def __enter__(self) -> TrialStart:
        return self

    def __exit__(self, *_: object) -> None:
        for row, demand in self._started:
            self.fleet.unseat(row, demand)


SCHEDULERS = ("slack", "fcfs")


def make_scheduler(scheduler: str, router: str, costs: PartCosts) -> Scheduler:
    """Create a scheduler from the names of a scheduler and a router, as in the settings."""
    where = make_router(router)
    if scheduler == "slack":
        return SlackScheduler(costs, where)
    if scheduler == "fcfs":
        return FcfsScheduler(costs, where)
    raise InputError(f"scheduler {scheduler!r}: choose one of {', '.join(SCHEDULERS)}")
