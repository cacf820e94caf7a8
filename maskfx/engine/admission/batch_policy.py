"""When a step starts, and which requests' calls it batches. Pure functions of numbers; no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from maskfx.ir.argument_checks import check_number, check_whole


@dataclass(frozen=True)
class WaitingRequest:
    """A request whose call waits for a step; times are seconds of the engine's clock.

    Args:
        parked: time at which the call was submitted.
        began: time at which the request was admitted.
        overtaken: number of steps that ran calls of requests admitted later instead.
        due: deadline of the request.
    """

    parked: float
    began: float = 0.0
    overtaken: int = 0
    due: float = inf


@dataclass(frozen=True)
class BatchPolicy:
    """Decides when the next step starts and which waiting calls it batches.

    A step starts when (1) no running request is about to submit a call, (2) the batch is full of
    calls that have priority over those about to come, or (3) the oldest waiting call has waited,
    counted from the end of the previous step at the earliest, for
    `max(patience, share * step time)` seconds. A request is about to submit a call while it is
    between two of its steps; a step doesn't wait for a request that encodes its prompt or decodes
    its image.

    Args:
        patience: least waiting time in seconds before a step starts without the coming calls.
        share: the same as a fraction of a usual step's time; the longer of the two counts.
        batch: maximum number of requests per step. A request admitted earlier keeps its place
            until its image is done: with more running requests than places, taking turns would
            make all of them finish late.
        passes: number of times a request may be overtaken before it goes first, whatever the
            deadlines of the others.
    """

    patience: float = 0.002
    share: float = 0.25
    batch: int = 8
    passes: int = 2

    def __post_init__(self) -> None:
        for name in ("patience", "share"):
            check_number("BatchPolicy", name, getattr(self, name))
        check_whole("BatchPolicy", "batch", self.batch, 1)
        check_whole("BatchPolicy", "passes", self.passes, 0)

    def seconds(
        self,
        seats: Sequence[WaitingRequest],
        coming: Sequence[float],
        now: float,
        ended: float = -inf,
        step: float = 0.0,
    ) -> float:
        """Return the seconds that the next step still waits; 0 starts it.

        Args:
            seats: requests with a waiting call.
            coming: admission times of running requests that are about to submit a call.
            now: current time.
            ended: end of the last step.
            step: usual duration of a step.
        """
        if not seats:
            return inf
        first = [seats[i].began for i in self.choose(seats)]
        if not coming or (len(first) == self.batch and min(coming) >= max(first)):
            return 0.0
        longest = max(self.patience, self.share * step)
        since = max(ended, min(seat.parked for seat in seats))
        return max(0.0, since + longest - now)

    def choose(self, seats: Sequence[WaitingRequest]) -> list[int]:
        """Return the indices of the calls to batch.

        Priority: overtaken `passes` times, then nearest deadline, then earliest admission.
        """

        def rank(index: int) -> tuple[bool, float, float]:
            seat = seats[index]
            late = seat.overtaken >= self.passes
            return not late, 0.0 if late else seat.due, seat.began

        return sorted(sorted(range(len(seats)), key=rank)[: self.batch])


def admitted(
    queued: Sequence[str], active: Sequence[str], room: int, turns: Mapping[str, int]
) -> list[int]:
    """Return the indices of the queued requests to admit, fairly by user.

    The next request is one of the user with the fewest running requests; ties go to the user
    whose last admission is longest ago.

    Args:
        queued: user of each queued request.
        active: user of each running request.
        room: number of requests to admit at most.
        turns: number of each user's last admission.
    """
    held, last, chosen = Counter(active), dict(turns), list[int]()
    left = list(range(len(queued)))
    while left and len(chosen) < room:
        index = min(left, key=lambda i: (held[queued[i]], last.get(queued[i], 0), i))
        left.remove(index)
        chosen.append(index)
        held[queued[index]] += 1
        last[queued[index]] = max(last.values(), default=0) + 1
    return chosen
