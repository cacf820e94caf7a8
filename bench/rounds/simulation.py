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
from typing import NamedTuple, Protocol

import numpy as np

from maskfx.scheduling.degree_costs import StepProfile
from maskfx.scheduling.load import Demand
from maskfx.scheduling.rounds.block_state import BlockState
from maskfx.scheduling.rounds.placement import BLOCK, Devices
from maskfx.scheduling.rounds.round_plan import Round, RoundRequest
from maskfx.scheduling.rounds.rounds import RoundScheduler

EDGE = 1e-9


class DecisionTime(NamedTuple):
    """Processor seconds of a decision, on this machine."""

    seconds: float
    requests: int  # that it was about
    within: bool  # whether each block had a group at work


@dataclass
class Outcome:
    """What became of the requests."""

    ended: dict[str, float] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    decisions: list[DecisionTime] = field(default_factory=list)
    busy: float = 0.0  # device-seconds of groups at work
    rounds: int = 0  # of blocks
    moves: int = 0
    within: int = 0  # groups that started within the round of their block

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
    asked: RoundRequest | None = None  # the same for the scheduler, as of the last decision

    def request(self, home: Devices | None) -> RoundRequest:
        asked, demand = self.asked, self.demand
        if asked is None or asked.left != self.left or asked.home is not home:
            self.asked = asked = RoundRequest(
                demand.id, demand.work, self.left, demand.arrived, demand.due, home=home
            )
        return asked


class Decider(Protocol):
    """Decides about a round when all devices are free."""

    devices: int

    def decide(self, now: float, requests: Sequence[RoundRequest]) -> Round: ...


class RunningGroup(NamedTuple):
    """A group at work, and when it ends."""

    end: float
    number: int
    devices: Devices
    ids: frozenset[str]


class RoundSimulation:
    """Carries out decisions, which are made whenever devices are free and requests wait.

    at_borders: decides when all devices are free only.
    """

    def __init__(
        self,
        scheduler: Decider,
        demands: Sequence[Demand],
        machine: Machine,
        seed: int = 0,
        *,
        at_borders: bool = True,
    ) -> None:
        self.scheduler, self.machine, self.at_borders = scheduler, machine, at_borders
        self.outcome = Outcome()
        self._draw = np.random.default_rng(seed)
        self._coming = deque(demands)
        self._active: dict[str, Active] = {}
        self._waiting: dict[str, Active] = {}  # those that aren't in a group at work
        self._state = BlockState(scheduler.devices)
        self._running: list[RunningGroup] = []  # a heap
        self._started = 0

    def run(self) -> Outcome:
        """Until all requests are done or dropped."""
        while self._active or self._coming or self._running:
            unseen = self.at_borders and self._running
            arrival = self._coming[0].arrived if self._coming and not unseen else inf
            if self._running and self._running[0].end <= arrival:
                now = self._running[0].end
                while self._running and self._running[0].end <= now:
                    self._end(heapq.heappop(self._running))
            else:
                now = arrival
                assert now < inf, f"requests wait while all devices are free: {self._active}"
            self._arrive(now)
            if self._waiting and not (self._running if self.at_borders else self._full):
                self._carry_out(now, self._timed(now))
        return self.outcome

    @property
    def _full(self) -> bool:
        return not self._state.free.count

    def _arrive(self, now: float) -> None:
        while self._coming and self._coming[0].arrived <= now:
            demand = self._coming.popleft()
            active = Active(demand, demand.work.steps)
            self._active[demand.id] = self._waiting[demand.id] = active
        if self.machine.ends_late:
            for id in [id for id, a in self._waiting.items() if a.demand.due < now]:
                self._drop(id)

    def _drop(self, id: str) -> None:
        self.outcome.dropped.add(id)
        del self._active[id], self._waiting[id]

    def _timed(self, now: float) -> Round:
        asked = [active.request(self._state.home(id)) for id, active in self._waiting.items()]
        given = () if self.at_borders else (self._state,)
        within = not self._state.open
        began = time.process_time()  # of this process, whatever else the machine does
        decided = self.scheduler.decide(now, asked, *given)
        spent = DecisionTime(time.process_time() - began, len(asked), within)
        self.outcome.decisions.append(spent)
        return decided

    def _end(self, group: RunningGroup) -> None:
        self._state.end(group.devices)
        self.outcome.rounds += group.devices.start // BLOCK not in self._state.borders
        for id in group.ids:
            if id in self._active:
                self._waiting[id] = self._active[id]

    def _carry_out(self, now: float, decided: Round) -> None:
        """Start the groups of a decision."""
        for id in decided.drops:
            self._drop(id)
        homes = {id: self._state.home(id) for group in decided.groups for id in group.steps}
        begun = set(self._state.borders)
        for group in decided.groups:
            seconds = group.seconds * float(np.exp(self._draw.normal(0, self.machine.error)))
            begin, most = now + self.machine.overhead, max(group.steps.values())
            at = group.devices
            self.outcome.busy += at.size * seconds
            self.outcome.within += at.start // BLOCK in begun
            self._started += 1
            assert self._state.free.fits(at), f"{at} have two groups at {now}"
            self._state.begin(now, [group])
            entry = (begin + seconds, self._started, at, frozenset(group.steps))
            heapq.heappush(self._running, RunningGroup(*entry))
            for id, steps in group.steps.items():
                request = self._waiting.pop(id)
                request.left -= steps
                home = homes[id]
                self.outcome.moves += home is not None and not home.nests(at)
                if not request.left:
                    self.outcome.ended[id] = begin + seconds * steps / most
                    del self._active[id]


def simulate_rounds(
    scheduler: RoundScheduler,
    demands: Sequence[Demand],
    machine: Machine,
    seed: int = 0,
    *,
    at_borders: bool = False,
) -> Outcome:
    """Simulate the scheduler; at_borders: nothing starts within a round."""
    simulation = RoundSimulation(scheduler, demands, machine, seed, at_borders=at_borders)
    return simulation.run()


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
