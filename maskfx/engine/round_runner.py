"""RoundRunner: carries out rounds, in which groups of requests step on disjoint sets of ranks.

Each group has a thread, which runs the steps of its requests while their pipelines' code runs in
the requests' threads between them. Requests without a group stay parked. Owns which ranks compute,
which requests are in a group, and the counts of rounds; `round_policy.py` has what decides.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from maskfx.engine.admission.request_estimates import RequestEstimates
from maskfx.engine.ticket import ParkedCalls, Ticket
from maskfx.errors import DeadlineMissed
from maskfx.scheduling.rounds.round_policy import (
    RankedGroup,
    RoundCall,
    RoundDecision,
    RoundPolicy,
    check,
)

log = logging.getLogger(__name__)

GAPS = 32  # latest times between two steps of a group that count
STRAGGLER = 0.25  # share of a step for which a group waits for those of its requests that are late
PATIENCE = 0.5  # seconds for which it waits if none of them has a call


class RoundLoop(Protocol):
    """What a runner of rounds uses of the engine."""

    @property
    def rank_count(self) -> int:
        """The number of ranks that can compute now."""
        ...

    def compute(self, parked: list[ParkedCalls], ranks: tuple[int, ...]) -> float:
        """Compute calls on these ranks and answer them; return the seconds, 0 if a rank failed."""
        ...

    def take(self, tickets: Collection[Ticket], first: float, others: float) -> list[ParkedCalls]:
        """Wait for the next calls of these requests, and return them.

        Args:
            tickets: The requests; those that end or finish their steps aren't waited for.
            first: Seconds to wait for any call.
            others: Seconds to wait for further ones.
        """
        ...


@dataclass
class RoundCounts:
    """What happened so far.

    Args:
        rounds: Decisions with at least one group.
        late: Requests that were predicted to miss their deadline.
        steps: Steps by degree.
    """

    rounds: int = 0
    late: int = 0
    steps: Counter[int] = field(default_factory=Counter)


class RoundRunner:
    """Runs the rounds that a policy decides.

    Args:
        policy: Decides.
        loop: The engine.
        ended: Called when ranks become free.
    """

    def __init__(
        self,
        policy: RoundPolicy,
        loop: RoundLoop,
        ended: Callable[[], None],
    ) -> None:
        self.policy, self.counts = policy, RoundCounts()
        self.held: frozenset[Ticket] = frozenset()  # requests of groups that compute
        self._loop, self._ended = loop, ended
        self._busy: set[int] = set()
        self._lock = threading.Lock()  # guards the policy, and what is above and below
        self._estimates = RequestEstimates()
        self._late: set[Ticket] = set()
        self._between: deque[float] = deque(maxlen=GAPS)  # seconds between steps of a group

    @property
    def between(self) -> float:
        """The usual seconds between two steps of a group, in which the pipelines' code runs."""
        gaps = tuple(self._between)
        return statistics.median(gaps) if gaps else 0.0

    def can_decide(self) -> bool:
        """Return True if a decision can be taken now."""
        return not self._busy if self.policy.at_borders else bool(self._free())

    def _free(self) -> list[int]:
        return [rank for rank in range(self._loop.rank_count) if rank not in self._busy]

    def start(self, parked: Sequence[ParkedCalls]) -> list[ParkedCalls]:
        """Decide about these calls, start the groups, and return the calls that stay parked."""
        now = time.perf_counter()
        with self._lock:
            self._estimates.forget()
            self._late = {ticket for ticket in self._late if not ticket.done()}
            by_id, calls = self._calls(parked)
            if not calls:
                return []
            decision = self._decided(now, calls)
            self.counts.rounds += bool(decision.groups)
            late = {by_id[number].ticket for number in decision.late} - self._late
            self.counts.late += len(late)
            self._late |= late
            for group in decision.groups:
                self._busy.update(group.ranks)
                self.held |= {by_id[number].ticket for number in group.steps}
        for number in decision.drops:
            self._drop(by_id.pop(number))
        for group in decision.groups:
            own = {by_id.pop(number): steps for number, steps in group.steps.items()}
            threading.Thread(
                target=self._run, args=(group.ranks, own), name="maskfx-round", daemon=True
            ).start()
        return list(by_id.values())

    def _calls(
        self, parked: Sequence[ParkedCalls]
    ) -> tuple[dict[int, ParkedCalls], list[RoundCall]]:
        """Return what the policy decides about; a request that can't be estimated fails alone."""
        by_id: dict[int, ParkedCalls] = {}
        calls = []
        for one in parked:
            try:
                calls.append(call := self._estimates.call(one))
                by_id[call.id] = one
            except Exception as error:
                log.exception("a request's step can't be estimated")
                one.error = error
                one.answered.set()
        return by_id, calls

    def _decided(self, now: float, calls: Sequence[RoundCall]) -> RoundDecision:
        """Return the policy's decision; if it fails, the first request runs on the first rank."""
        free = self._free()
        try:
            decision = self.policy.decide(now, calls, free, self._loop.rank_count)
            check(decision, calls, free)
        except Exception:
            log.exception("a round can't be decided; the oldest request steps alone")
            decision = RoundDecision()
        left = [call for call in calls if call.id not in decision.drops]
        if decision.groups or not left or self._busy:
            return decision
        oldest = min(left, key=lambda call: call.arrived)
        alone = RankedGroup((free[0],), {oldest.id: 1})
        return RoundDecision((alone,), decision.late, decision.drops)

    def _drop(self, parked: ParkedCalls) -> None:
        left = parked.ticket.due - time.perf_counter()
        parked.error = DeadlineMissed(
            f"it can't be done in the {left:.3f} s until its deadline, after "
            f"{parked.ticket.steps} steps"
        )
        parked.answered.set()

    # A group's thread.

    def _run(self, ranks: tuple[int, ...], group: dict[ParkedCalls, int]) -> None:
        """Run the steps of a group: those of each request until it has made its number."""
        left = {parked.ticket: steps for parked, steps in group.items()}
        batch = list(group)
        try:
            while batch:
                began = time.perf_counter()
                seconds = self._loop.compute(batch, ranks)
                self._note(batch, ranks, seconds)
                ended = time.perf_counter()
                for parked in batch:
                    left[parked.ticket] -= 1
                going = [ticket for ticket, steps in left.items() if steps > 0]
                with self._lock:
                    self.held -= left.keys() - set(going)
                took = ended - began
                first = max(PATIENCE, took)
                batch = self._loop.take(going, first, STRAGGLER * took) if going else []
                if batch:
                    self._between.append(time.perf_counter() - ended)
        finally:
            with self._lock:
                self._busy.difference_update(ranks)
                self.held -= left.keys()
            self._ended()

    def _note(self, batch: Sequence[ParkedCalls], ranks: tuple[int, ...], seconds: float) -> None:
        """Learn from a step, if it was a usual one."""
        with self._lock:
            self.counts.steps[len(ranks)] += 1
            loads = self._estimates.note(batch, ranks)
            if loads and seconds:
                self.policy.learn(len(ranks), loads, seconds + self.between)
