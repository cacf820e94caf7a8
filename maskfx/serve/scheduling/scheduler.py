"""Schedulers: who of those that wait starts now, where, and who can't be in time any more.

Pure: no clock, no sockets. A router says where; `SlackScheduler` says who and whether.
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
from maskfx.serve.scheduling.cost_model import PartCosts
from maskfx.serve.scheduling.fleet import Fleet, Forecast
from maskfx.serve.scheduling.load import Decision, Demand, Running, Scheduler, TemplateTier, Worker
from maskfx.serve.scheduling.router import Router, candidates, choose, make_router

REFUSALS = 16  # in one decision, then nobody else is tried: they'd overtake too many
PROBE = 60.0  # seconds without a start, after which one is tried that is predicted to be late


class FcfsScheduler:
    """First come, first served, as long as there are slots: the baseline.

    drop: whether those that can't be in time any more are dropped; without it, they are served
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
        with Trial(fleet) as trial:
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
    """PatchedServe's Algorithm 1: the most urgent first, if it pays and makes nobody late.

    A request's slack is what is left until it is due, less what it takes alone, in units of the
    latter; least slack goes first. Who can't be in time even if it starts at once, alone, is
    dropped. A request joins a batch only if

    - it is in time there, and nobody under way misses a deadline that it would meet otherwise;
    - the batch gains: one joint step is at least `gain` times faster than a step of the batch and
      a step of the request one after the other, (before + alone) / after. The paper's Eq. 1,
      cur cand / (new (cur + cand)) with throughputs 1 / seconds of a step, comes to
      after / (before + alone): the smaller, the more is gained, so "add if it is larger than a
      threshold" can't be meant. What is gained is its reciprocal, and that is compared here.

    Beyond the paper: many workers, of which the router chooses among those that fit; who is refused
    doesn't stop those behind it, up to a few; and fairness. `share` is what each request that a
    user has under way counts, in units of slack, so that of equally urgent requests that of the
    user with the fewest goes first. Requests that are due never count as due `patience` times what
    they take alone after their arrival. They aren't dropped; when that time has come, they start as
    soon as a slot is free, and since their slack falls for as long as they wait, nobody waits
    forever.
    """

    def __init__(
        self,
        costs: PartCosts,
        router: Router,
        *,
        gain: float = 1.05,
        share: float = 0.5,
        patience: float = 20.0,
    ) -> None:
        self.costs, self.router = costs, router
        self.gain, self.share, self.patience = gain, share, patience
        self._alone = Alone(costs)

    def decide(self, now: float, waiting: Sequence[Demand], workers: Sequence[Worker]) -> Decision:
        self._alone.prune(len(waiting))
        fleet = Fleet.of(workers, self.costs)
        drops = tuple(self._alone.too_late(waiting, now, fleet))
        starts: list[tuple[Demand, str]] = []
        with Trial(fleet) as trial:
            if trial.room:
                gone = {d.id for d in drops}
                queue = Queue(trial.fleet.held, self.share)
                for demand in waiting:
                    if demand.id not in gone:
                        queue.add(self._slack(demand, now), demand)
                starts = self._start(now, queue, trial)
        self._alone.started(now, len(starts))
        return Decision(tuple(starts), drops)

    def _start(self, now: float, queue: Queue, trial: Trial) -> list[tuple[Demand, str]]:
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

    def _slack(self, demand: Demand, now: float) -> float:
        alone = self._alone.seconds(demand)
        due = demand.due if demand.due < inf else demand.arrived + self.patience * alone
        return (due - now - alone) / max(alone, 1e-9)

    def _place(self, now: float, slack: float, demand: Demand, fleet: Fleet) -> int | None:
        """The best worker that fits."""
        rows = candidates(self.router, demand.work, fleet)
        if not len(rows):
            return None
        forecast = fleet.forecast(demand.work, rows)
        scores = self.router.scores(forecast)
        patient = demand.due == inf and slack <= 0  # it has waited long enough
        if not patient and demand.id != self._alone.probe:
            fits = self._fits(now, demand, forecast)
            if not fits.any():
                return None
            scores = np.where(fits, scores, inf)
        return int(rows[np.argmin(scores)])

    def _fits(self, now: float, demand: Demand, forecast: Forecast) -> NDArray[np.bool_]:
        fits: NDArray[np.bool_] = forecast.gain >= self.gain
        if demand.due < inf:
            fits &= now + forecast.own <= demand.due
        if fits.any():
            fits &= ~forecast.breaks(now)
        return fits


class Alone:
    """What requests take alone, on an idle worker to which their template is as near as to any."""

    def __init__(self, costs: PartCosts) -> None:
        self.costs = costs
        self._version = costs.version
        self._known: dict[str, tuple[float, float]] = {}
        self._since: float | None = None  # the last start
        self.probe: str | None = None  # who is tried although it is late by prediction

    def too_late(self, waiting: Sequence[Demand], now: float, fleet: Fleet) -> list[Demand]:
        """Who can't be in time any more.

        All but one where nobody was started for long and all workers are idle: costs that were
        learnt too high would drop everybody from then on, and who is dropped teaches nothing.
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
        """With the template at hand."""
        return self._both(demand)[0]

    def late(self, demand: Demand, now: float, fleet: Fleet) -> bool:
        """Whether it can't be in time even if it starts at once."""
        if demand.due == inf:
            return False
        near, far = self._both(demand)
        if now + near > demand.due or now + far <= demand.due:
            return now + near > demand.due  # wherever its template is
        recording = self.costs.recording(demand.work, fleet.nearest(demand.work.template))
        return now + near + recording > demand.due

    def _both(self, demand: Demand) -> tuple[float, float]:
        """With the template at hand, and with none."""
        known = self._known.get(demand.id)
        if known is None:
            work, costs = demand.work, self.costs
            near = costs.around(work) + work.steps * costs.step([work])
            far = near + max(costs.recording(work, tier) for tier in TemplateTier)
            known = self._known[demand.id] = near, far
        return known

    def prune(self, waiting: int) -> None:
        """Forget those that have left, and what older costs said."""
        if self._version != self.costs.version or len(self._known) > 4 * waiting + 256:
            self._version = self.costs.version
            self._known.clear()


class QueueEntry(NamedTuple):
    """A request that waits, by urgency."""

    slack: float
    arrived: float
    id: str
    demand: Demand


class Queue:
    """Those that wait, by slack and by how many requests of their user are under way."""

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
        """Each once. `started` in between puts the user's others further back."""
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
class Trial:
    """A fleet in which requests are started to see what comes next, and taken back after."""

    fleet: Fleet
    _started: list[tuple[int, Demand]] = field(default_factory=list)

    @property
    def room(self) -> bool:
        return bool((self.fleet.free > 0).any())

    def start(self, demand: Demand, row: int) -> str:
        """The worker's name."""
        self.fleet.seat(row, Running(demand, demand.work.steps))
        self._started.append((row, demand))
        return self.fleet[row].name

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        for row, demand in self._started:
            self.fleet.unseat(row, demand)


SCHEDULERS = ("slack", "fcfs")


def make_scheduler(scheduler: str, router: str, costs: PartCosts) -> Scheduler:
    """By the names that settings have."""
    where = make_router(router)
    if scheduler == "slack":
        return SlackScheduler(costs, where)
    if scheduler == "fcfs":
        return FcfsScheduler(costs, where)
    raise InputError(f"scheduler {scheduler!r}: choose one of {', '.join(SCHEDULERS)}")
