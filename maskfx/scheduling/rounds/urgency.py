"""Requests of a round as numbers: their step times, what they need until their deadline, and which
of them can be in time together.

A *round* is the time between two decisions of `rounds.py`. A request is *hopeful* while its
remaining steps at its fastest degree end before its deadline. Pure: no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from math import floor, inf
from operator import attrgetter
from typing import NamedTuple

from maskfx.scheduling.rounds.allocation import EDGE, Mix, StepTimes
from maskfx.scheduling.rounds.knapsack import Option
from maskfx.scheduling.rounds.outlook import RemainingRequest
from maskfx.scheduling.rounds.round_plan import RoundRequest

# Values of the knapsack, each outweighing the sum of the ones after it: a request that is admitted
# and stays hopeful; one that isn't admitted; device-seconds. A request that stays hopeful only if
# the round ends with its own last step counts a little less than one that has until the border.
ADMITTED, OTHER, SECONDS = 1.0, 1e-4, 1e-8
UNTIL_OWN_END = 0.9


class Rank(IntEnum):
    """The order in which requests get what the knapsack leaves."""

    ADMITTED = 0  # can be in time together with the other admitted ones
    CROWDED = 1  # hopeful, but the devices don't suffice for all
    PATIENT = 2  # without a deadline
    LATE = 3  # not hopeful any more


class Pending:
    """A request with its step times, at the start of a round.

    `due` is that of its last step; for requests without a deadline and late ones, the time after
    which they get devices of their own, so that they don't starve. `of_many` computes the same
    of many requests at once.
    """

    __slots__ = (
        "_degree", "_need", "due", "id", "latest_start", "left", "now", "overdue", "rank",
        "request", "times",
    )  # fmt: skip

    def __init__(
        self,
        request: RoundRequest,
        times: StepTimes,
        now: float,
        *,
        patience: float,
        margin: float = 0.0,
    ) -> None:
        self.request, self.times, self.now = request, times, now
        self.left, self.id = request.left, request.id
        self.due = request.due - request.after
        self.rank = Rank.CROWDED
        late = now + self.left * times.least > self.due * (1 + EDGE) + EDGE
        if late or request.due == inf:
            self.rank = Rank.LATE if late else Rank.PATIENT
            alone = max(request.work.steps, self.left) * times.least
            patient = request.arrived + patience * alone
            self.due = max(self.due, patient) if late else patient
        else:
            # the margin never makes a request late
            least = now + self.left * times.least
            self.due = min(self.due, max(least, now + (self.due - now) * (1 - margin)))
        self.overdue = self.rank >= Rank.PATIENT and now > self.due
        self.latest_start = times.latest_start(self.left, self.due)
        self._need: float | None = None
        self._degree: int | None = None

    @property
    def hopeful(self) -> bool:
        return self.rank <= Rank.CROWDED

    @property
    def need(self) -> float:
        """Device-seconds of the cheapest mix that meets the deadline."""
        if self._need is None:
            self._need = self.times.fluid(self.left, self.due - self.now)
        return self._need

    @property
    def mix(self) -> Mix | None:
        return self.times.cheapest(self.left, self.due - self.now)

    @property
    def degree(self) -> int:
        """The larger degree of the cheapest mix; the cheapest one of requests that are late."""
        if self._degree is None:
            mix = self.mix
            self._degree = mix.parts[0][0] if mix and mix.parts else self.times.hull[0]
        return self._degree

    def job(self, left: int, degree: int) -> RemainingRequest:
        """Return the request with a number of remaining steps, for the outlook."""
        return RemainingRequest(self.due, left, self.times, self.id, degree)

    def usable(self, length: float) -> tuple[int, ...]:
        """Return the degrees at which a step ends within a round; the fastest one if none does."""
        return self.times.usable(length)

    def steps(self, degree: int, length: float) -> int:
        """Return the number of steps that fit into a round, at least one."""
        return min(self.left, max(1, floor(length / self.times.seconds[degree] + EDGE)))

    def options(
        self, length: float, degrees: Iterable[int], elsewhere: float = inf
    ) -> list[RoundChoice]:
        """Return not to run, and each of the degrees, with the outcome of a round.

        Args:
            elsewhere: When other devices are expected for the request if it doesn't run.
        """
        border = self.now + length
        begin = min(border, elsewhere)
        choices = [RoundChoice(0, *self._outcome(self.left, begin, begin))]
        for degree in degrees:
            seconds = self.times.seconds[degree]
            steps = self.steps(degree, length)
            end = self.now + steps * seconds
            share, need = self._outcome(self.left - steps, max(border, end), end)
            choices.append(RoundChoice(degree, share, need + degree * max(length, steps * seconds)))
        return choices

    def _outcome(self, left: int, border: float, end: float) -> tuple[float, float]:
        """Return whether the request stays hopeful, 0 to 1, and the device-seconds it then needs.

        Args:
            left: Steps that remain.
            border: End of the round.
            end: End of the request's own steps in it, its earliest continuation.
        """
        if left == 0:
            return (1.0, 0.0) if end <= self.due * (1 + EDGE) + EDGE else (0.0, 0.0)
        for start, share in ((border, 1.0), (end, UNTIL_OWN_END)):
            need = self.times.fluid(left, self.due - start)
            if need < inf:
                return share, need
        return 0.0, left * self.times.fastest * self.times.least


class RoundChoice(NamedTuple):
    """The outcome of a round in which a request runs at a degree; 0: it doesn't run."""

    degree: int
    hopeful: float  # 1 if the request is hopeful after the round, 0 if not
    device_seconds: float  # of this round and of the remaining steps


def admit(pending: Sequence[Pending], devices: int) -> None:
    """Rank as admitted the largest number of hopeful requests that can be in time together.

    Moore's and Hodgson's rule, with device-seconds as the work of a single machine: in the order of
    the deadlines, whenever the work until a deadline exceeds what the devices do until then, the
    request with the most work is left out. It knows nothing of degrees, so it is a bound, and it is
    computed anew in each round.
    """
    heap: list[tuple[float, int]] = []
    work = 0.0
    admitted, crowded, push = Rank.ADMITTED, Rank.CROWDED, heapq.heappush
    hopeful = sorted((p for p in pending if p.rank <= crowded), key=attrgetter("due", "id"))
    for number, request in enumerate(hopeful):
        need = request.need
        request.rank = admitted
        push(heap, (-need, number))
        work += need
        if work > devices * (request.due - request.now) * (1 + EDGE) + EDGE:
            largest, left_out = heapq.heappop(heap)
            work += largest
            hopeful[left_out].rank = crowded


def by_urgency(pending: Iterable[Pending]) -> list[Pending]:
    """Sort by rank; then by the latest start, or by the least need where not all can be served."""
    ranked: dict[Rank, list[Pending]] = {rank: [] for rank in Rank}
    for request in pending:
        ranked[request.rank].append(request)
    for rank, found in ranked.items():
        found.sort(key=attrgetter("need" if rank is Rank.CROWDED else "latest_start", "id"))
    return list(chain.from_iterable(ranked.values()))


def values(
    choices: Sequence[Sequence[RoundChoice]], ranks: Sequence[Rank], footprints: Mapping[int, int]
) -> list[list[Option]]:
    """Return the knapsack's options: requests that stay hopeful first, then device-seconds."""
    total = sum(max(c.device_seconds for c in group) for group in choices)
    unit = SECONDS / max(total, EDGE)
    found = []
    for group, rank in zip(choices, ranks, strict=True):
        weight = ADMITTED if rank is Rank.ADMITTED else OTHER
        found.append(
            [Option(footprints[c.degree], weight * c.hopeful - unit * c.device_seconds)
             for c in group]
        )  # fmt: skip
    return found
