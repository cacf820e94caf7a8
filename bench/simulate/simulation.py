"""Workers under a simulated clock, with the scheduler and the router that serve.

Between two changes of a worker's batch all its steps take the same time, so that a batch is moved
on by as many steps as there are until one leaves or joins: one event per change. `plain` makes
one event per step instead: the twin that tests compare with.

What is simulated: a request waits, starts on a worker (takes a slot), is prepared beside the batch
(its template is read or recorded, encoders run) and joins the batch when the step under way ends;
after its last step it leaves the batch, is decoded beside it, and gives its slot back. What
is prepared or decoded makes steps slower, and steps make it slower, by the costs' factors. With
`expire`, a request that isn't done at its deadline ends then, as in an engine: one that waits at
the next decision, one in a batch after the step under way.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, floor, inf

import numpy as np

from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.fleet import Fleet
from maskfx.scheduling.load import Demand, Scheduler, TemplateTier, Worker

EDGE = 1e-9  # of a step: rounding at its end


@dataclass
class Served:
    """What became of the requests, in the order in which it did."""

    latency: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    met: int = 0
    dropped: int = 0
    refused: int = 0  # the queue was full
    came: int = 0
    steps: int = 0
    ended: float = 0.0
    decisions: list[float] = field(default_factory=list)  # seconds of this machine


@dataclass
class Member:
    """A request in a batch."""

    demand: Demand
    seat: int
    compute: float  # seconds that it really adds to a step
    load: float
    left: int


class Batch:
    """A worker's batch between two changes."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.joining: list[Member] = []
        self.since, self.pace = 0.0, inf
        self.turn = 0  # it changes after this number of steps
        self.version = 0
        self.around = 0  # requests that are prepared or decoded beside it
        self.host: OrderedDict[str, None] = OrderedDict()  # templates, least recently used first

    def steps_until(self, now: float) -> int:
        return floor((now - self.since) / self.pace + EDGE) if self.pace < inf else 0


class Simulation:
    """host: templates that a worker's memory holds. error: of predictions, see `_member`."""

    def __init__(
        self,
        scheduler: Scheduler,
        costs: FittedCosts,
        workers: int,
        slots: int,
        *,
        queue: int = 256,
        host: int = 100,
        recorded: Iterable[str] = (),
        error: float = 0.0,
        plain: bool = False,
        expire: bool = False,
        seed: int = 0,
    ) -> None:
        self.scheduler, self.costs, self.queue, self.host = scheduler, costs, queue, host
        self.error, self.plain, self.expire = error, plain, expire
        self.fleet = Fleet([Worker(f"w{n}", slots) for n in range(workers)], costs)
        for template in recorded:
            self.fleet.everywhere[template] = TemplateTier.DISK
        self.batches = [Batch() for _ in range(workers)]
        self.served = Served()
        self._draw = np.random.default_rng(seed)
        self._waiting: dict[str, Demand] = {}
        self._events: list[tuple[float, int, int, int, Member | None]] = []
        self._count = itertools.count()
        # of the steps that are made: since when, how long each takes, and which requests make them
        self._since, self._pace = np.zeros(workers), np.full(workers, inf)
        self._stepping = np.zeros_like(self.fleet.left)
        self._left = np.zeros_like(self.fleet.left)  # at `since`

    def run(self, demands: Iterable[Demand]) -> Served:
        """Until all that come are done or dropped."""
        coming = iter(demands)
        following = next(coming, None)
        while following is not None or self._events:
            if following is not None and (
                not self._events or following.arrived <= self._events[0][0]
            ):
                self._arrive(following)
                following = next(coming, None)
            else:
                at, _, row, version, member = heapq.heappop(self._events)
                if member is not None and member.left > 0:
                    self._ready(at, row, member)
                elif member is not None:
                    self._decoded(at, row, member)
                    if self._waiting:
                        self._decide(at)
                elif version == self.batches[row].version:
                    self._turn(at, row)
        left = list(self._waiting)
        assert not left, f"{len(left)} requests were never started: {left[:5]}"
        return self.served

    # Events.

    def _arrive(self, demand: Demand) -> None:
        self.served.came += 1
        if len(self._waiting) >= self.queue:
            self.served.refused += 1
            return
        self._waiting[demand.id] = demand
        self._decide(demand.arrived)

    def _ready(self, now: float, row: int, member: Member) -> None:
        """A request is prepared. It joins when the step under way ends."""
        batch = self.batches[row]
        batch.around -= 1
        if (template := member.demand.work.template) is not None:
            self._warm(row, template)
        batch.joining.append(member)
        if not batch.members:
            batch.since, batch.turn = now, 0
            self._turn(now, row)
        else:
            self._turn_soon(now, row)

    def _turn_soon(self, now: float, row: int) -> None:
        """Let the batch change when the step under way ends."""
        batch = self.batches[row]
        if not batch.members:
            return
        steps = ceil((now - batch.since) / batch.pace - EDGE)
        if steps < batch.turn:
            batch.turn = steps
            self._schedule(row)

    def _turn(self, now: float, row: int) -> None:
        """Make a number of steps; requests that are done leave, prepared ones join."""
        batch = self.batches[row]
        self.served.steps += batch.turn
        for member in batch.members:
            member.left -= batch.turn
        done = [m for m in batch.members if m.left <= 0]
        late = [m for m in batch.members if m.left > 0 and self._is_late(now, m.demand)]
        late += [m for m in batch.joining if self._is_late(now, m.demand)]
        if done or late or batch.joining:
            stay = [m for m in batch.members if m.left > 0] + batch.joining
            batch.members = [m for m in stay if m not in late]
            batch.joining = []
            for member in done:
                self._leave(now, row, member)
            for member in late:
                self._end(row, member)
                self.served.dropped += 1
        sizes = len({m.demand.work.whole for m in batch.members})
        compute = self.costs.base + self.costs.per_size * sizes
        compute += sum(m.compute for m in batch.members)
        compute *= 1 + self.costs.steps_beside * batch.around
        pace = max(compute, sum(m.load for m in batch.members)) if batch.members else inf
        batch.since, batch.pace = now, pace
        self._since[row], self._pace[row] = now, pace
        self._stepping[row] = 0.0
        for member in batch.members:
            self._stepping[row, member.seat] = 1.0
            self._left[row, member.seat] = member.left
        if batch.members:
            batch.turn = (
                1 if self.plain else min(self._steps_of(m, now, pace) for m in batch.members)
            )
            self._schedule(row)
        if (done or late) and self._waiting:
            self._decide(now)

    def _is_late(self, now: float, demand: Demand) -> bool:
        return self.expire and now >= demand.due

    def _steps_of(self, member: Member, now: float, pace: float) -> int:
        """Return how many steps a member makes from now on, until it is done or late."""
        if not self.expire or member.demand.due == inf:
            return member.left
        return min(member.left, max(1, ceil((member.demand.due - now) / pace - EDGE)))

    def _schedule(self, row: int) -> None:
        batch = self.batches[row]
        batch.version += 1
        self._push(batch.since + batch.turn * batch.pace, row, batch.version, None)

    def _push(self, at: float, row: int, version: int, member: Member | None) -> None:
        heapq.heappush(self._events, (at, next(self._count), row, version, member))

    def _leave(self, now: float, row: int, member: Member) -> None:
        """Out of the batch. Its slot is free when its picture is there."""
        self._stop(row, member)
        decoding = self.costs.decode_share * self._around(row, member.demand)
        if decoding:
            self.batches[row].around += 1
            self._push(now + decoding, row, 0, member)
        else:
            self._finish(now, row, member)

    def _decoded(self, now: float, row: int, member: Member) -> None:
        self.batches[row].around -= 1
        self._finish(now, row, member)
        self._slow(now, row)

    def _slow(self, now: float, row: int) -> None:
        """Steps take another time from now on, as other requests are prepared or decoded."""
        if self.costs.steps_beside:
            self._turn_soon(now, row)

    def _stop(self, row: int, member: Member) -> None:
        self._left[row, member.seat] = 0.0
        self._stepping[row, member.seat] = 0.0

    def _end(self, row: int, member: Member) -> None:
        """A request that is late leaves at once."""
        self._stop(row, member)
        self.fleet.end(row, member.demand.id)

    def _finish(self, now: float, row: int, member: Member) -> None:
        demand, served = member.demand, self.served
        self.fleet.end(row, demand.id)
        if self._is_late(now - EDGE, demand):
            served.dropped += 1
            return
        served.latency.append(now - demand.arrived)
        served.ids.append(demand.id)
        served.met += now <= demand.due + 1e-9
        served.ended = now

    def _warm(self, row: int, template: str) -> None:
        """In this worker's memory from now on, and on everybody's disk."""
        kept = self.batches[row].host
        if template not in kept:
            self.fleet.warmed(row, template, TemplateTier.HOST)
            self.fleet.everywhere.setdefault(template, TemplateTier.DISK)
        kept[template] = None
        kept.move_to_end(template)
        if len(kept) > self.host:
            oldest, _ = kept.popitem(last=False)
            self.fleet.warmed(row, oldest, TemplateTier.NONE)

    # Decisions.

    def _decide(self, now: float) -> None:
        made = np.floor((now - self._since) / self._pace + EDGE)
        np.subtract(self._left, made[:, None] * self._stepping, out=self.fleet.left)
        for demand in [one for one in self._waiting.values() if self._is_late(now, one)]:
            del self._waiting[demand.id]
            self.served.dropped += 1
        began = time.perf_counter()
        waiting = list(self._waiting.values())
        decision = self.scheduler.decide(now, waiting, self.fleet)
        self.served.decisions.append(time.perf_counter() - began)
        for demand in decision.drops:
            del self._waiting[demand.id]
            self.served.dropped += 1
        for demand, name in decision.starts:
            del self._waiting[demand.id]
            self._start(now, self.fleet.rows[name], demand)

    def _start(self, now: float, row: int, demand: Demand) -> None:
        work, costs = demand.work, self.costs
        tier = TemplateTier.NONE
        if work.template is not None:
            everywhere = self.fleet.everywhere.get(work.template, TemplateTier.NONE)
            tier = self.fleet.warm.get(work.template, {}).get(row, everywhere)
        encoding = (1 - costs.decode_share) * self._around(row, demand)
        ready = now + encoding + costs.recording(work, tier)
        member = self._member(demand, self.fleet.start(demand, row))
        self._left[row, member.seat] = work.steps
        self.served.queued.append(now - demand.arrived)
        self.batches[row].around += 1
        self._push(ready, row, 0, member)
        self._slow(now, row)

    def _around(self, row: int, demand: Demand) -> float:
        """What is around a request's steps, as long as it takes beside the worker's batch."""
        seconds = self.costs.around(demand.work)
        return seconds * self.costs.around_beside if self.batches[row].members else seconds

    def _member(self, demand: Demand, seat: int) -> Member:
        """What it really takes: what is predicted, times a log-normal factor of deviation error."""
        compute, load = self.costs.part(demand.work)
        if self.error:
            compute *= float(np.exp(self._draw.normal(-(self.error**2) / 2, self.error)))
        return Member(demand, seat, compute, load, demand.work.steps)
