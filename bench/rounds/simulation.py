"""Devices under a simulated clock: rounds, and groups of a fixed size as the baseline.

Owns how decisions are carried out; knows nothing of how they are made or of what is asked.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from maskfx.serve.scheduling.degree_costs import StepProfile
from maskfx.serve.scheduling.load import Demand
from maskfx.serve.scheduling.placement import Devices
from maskfx.serve.scheduling.round_plan import Round, RoundRequest
from maskfx.serve.scheduling.rounds import RoundScheduler

EDGE = 1e-9


@dataclass
class Outcome:
    """What became of the requests."""

    ended: dict[str, float] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    decisions: list[float] = field(default_factory=list)  # seconds of this machine
    busy: float = 0.0  # device-seconds of groups at work
    rounds: int = 0
    moves: int = 0

    def in_time(self, demands: Sequence[Demand]) -> float:
        return sum(self.ended.get(d.id, inf) <= d.due + EDGE for d in demands) / len(demands)


@dataclass(frozen=True)
class Machine:
    """What the scheduler doesn't predict.

    overhead: seconds to start a round (or a request, for the baseline): decision, messages.
    error: deviation of the logarithm of a group's seconds from the predicted ones.
    ends_late: whether requests end at their deadline, as the engine's do.
    """

    overhead: float = 2e-3
    error: float = 5e-3  # the paper: steps vary by less than 0.7 %
    ends_late: bool = False


@dataclass
class Active:
    """A request that has arrived and isn't done."""

    demand: Demand
    left: int
    home: Devices | None = None


class RoundSimulation:
    """Carries out rounds, each until all of its groups have made their steps."""

    def __init__(
        self,
        scheduler: RoundScheduler,
        demands: Sequence[Demand],
        machine: Machine,
        seed: int = 0,
    ) -> None:
        self.scheduler, self.machine = scheduler, machine
        self.outcome = Outcome()
        self._draw = np.random.default_rng(seed)
        self._coming = deque(demands)
        self._active: dict[str, Active] = {}

    def run(self) -> Outcome:
        """Until all requests are done or dropped. A round begins at once where nothing runs."""
        now = 0.0
        while self._active or self._coming:
            if not self._active:
                now = max(now, self._coming[0].arrived)
            while self._coming and self._coming[0].arrived <= now:
                demand = self._coming.popleft()
                self._active[demand.id] = Active(demand, demand.work.steps)
            if self.machine.ends_late:
                self._end_late(now)
            if not self._active:
                continue
            decided = self._timed(now)
            for id in decided.drops:
                self.outcome.dropped.add(id)
                del self._active[id]
            assert decided.groups or not self._active, f"a round without steps at {now}: {decided}"
            now = self._carry_out(now, decided)
        return self.outcome

    def _end_late(self, now: float) -> None:
        for id, request in list(self._active.items()):
            if request.demand.due < now:
                self.outcome.dropped.add(id)
                del self._active[id]

    def _timed(self, now: float) -> Round:
        requests = [_request(a) for a in self._active.values()]
        began = time.perf_counter()
        decided = self.scheduler.decide(now, requests)
        self.outcome.decisions.append(time.perf_counter() - began)
        return decided

    def _carry_out(self, now: float, decided: Round) -> float:
        """Return when all groups of a round have ended."""
        border, homes = now, dict[str, Devices]()
        for group in decided.groups:
            seconds = group.seconds * float(np.exp(self._draw.normal(0, self.machine.error)))
            begin, most = now + self.machine.overhead, max(group.steps.values())
            border = max(border, begin + seconds)
            self.outcome.busy += group.devices.size * seconds
            for id, steps in group.steps.items():
                request = self._active[id]
                request.left -= steps
                home = request.home
                self.outcome.moves += home is not None and not home.nests(group.devices)
                homes[id] = group.devices
                if not request.left:
                    self.outcome.ended[id] = begin + seconds * steps / most
                    del self._active[id]
        for id, request in self._active.items():
            request.home = homes.get(id)
        self.outcome.rounds += bool(decided.groups)
        return border


def simulate_rounds(
    scheduler: RoundScheduler, demands: Sequence[Demand], machine: Machine, seed: int = 0
) -> Outcome:
    return RoundSimulation(scheduler, demands, machine, seed).run()


def _request(active: Active) -> RoundRequest:
    demand = active.demand
    return RoundRequest(
        demand.id, demand.work, active.left, demand.arrived, demand.due, home=active.home
    )


Order = Callable[[Demand, float], float]  # a waiting request and its seconds: least goes first
ORDERS: dict[str, Order] = {
    "fcfs": lambda demand, seconds: demand.arrived,
    "edf": lambda demand, seconds: demand.due,
    "srtf": lambda demand, seconds: seconds,
}


def simulate_fixed(
    profile: StepProfile,
    devices: int,
    degree: int,
    order: str,
    demands: Sequence[Demand],
    machine: Machine,
    *,
    drop: bool,
    seed: int = 0,
) -> Outcome:
    """Groups of one size, each of which runs one request after the other to its end.

    drop: whether requests that can't meet their deadline are dropped when a group is free.
    """
    draw = np.random.default_rng(seed)
    outcome = Outcome()
    groups = [0.0] * (devices // degree)  # when each is free
    waiting: list[tuple[float, int, Demand, float]] = []
    coming = 0
    while waiting or coming < len(demands):
        free = heapq.heappop(groups)
        if not waiting:
            free = max(free, demands[coming].arrived)
        while coming < len(demands) and demands[coming].arrived <= free:
            demand = demands[coming]
            seconds = demand.work.steps * profile.step(degree, [demand.work])
            heapq.heappush(waiting, (ORDERS[order](demand, seconds), coming, demand, seconds))
            coming += 1
        _, _, demand, seconds = heapq.heappop(waiting)
        if drop and free + seconds > demand.due + EDGE:
            outcome.dropped.add(demand.id)
        else:
            seconds *= float(np.exp(draw.normal(0, machine.error)))
            if machine.ends_late and free + seconds > demand.due + EDGE:
                seconds = max(0.0, demand.due + 2 * EDGE - free)
                outcome.dropped.add(demand.id)
            outcome.busy += degree * seconds
            free += machine.overhead + seconds
            if demand.id not in outcome.dropped:
                outcome.ended[demand.id] = free
        heapq.heappush(groups, free)
    return outcome
