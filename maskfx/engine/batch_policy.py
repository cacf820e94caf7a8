"""When a step starts, and with whose calls. Numbers in, decisions out; no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from maskfx.errors import InputError


@dataclass(frozen=True)
class WaitingRequest:
    """A request whose call waits.

    Since when; when the request was let in; how often one that was let in later went before it;
    when it is due.
    """

    parked: float
    began: float = 0.0
    overtaken: int = 0
    due: float = inf


@dataclass(frozen=True)
class BatchPolicy:
    """When the next step starts.

    A step starts when nobody is on the way to it, when it is full of those who go first anyway, or
    when its first call has waited, since the step before, for `patience` seconds or for `share` of
    what a step takes, whichever is longer. On the way are requests between two of their steps; one
    that encodes its prompt or decodes its picture isn't waited for.
    batch: so many requests share a step. Who came first stays until the picture is made, for where
    more are under way than share a step, turns would end all of them late. passes: who was
    overtaken so often goes first, whatever the deadlines of others.
    """

    patience: float = 0.002
    share: float = 0.25
    batch: int = 8
    passes: int = 2

    def __post_init__(self) -> None:
        for name in ("patience", "share"):
            if not getattr(self, name) >= 0:
                raise InputError(f"BatchPolicy: {name}={getattr(self, name)!r}: give 0 or more")
        if type(self.batch) is not int or self.batch < 1:
            raise InputError(f"BatchPolicy: batch={self.batch!r}: give 1 request or more")
        if type(self.passes) is not int or self.passes < 0:
            raise InputError(f"BatchPolicy: passes={self.passes!r}: give a whole number, 0 or more")

    def seconds(
        self,
        seats: Sequence[WaitingRequest],
        coming: Sequence[float],
        now: float,
        ended: float = -inf,
        step: float = 0.0,
    ) -> float:
        """How long the next step still waits; 0: it starts.

        coming: when those on the way were let in; ended: when the last step did; step: how long
        steps take.
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
        """Who goes: the overtaken, then the nearest deadlines, then who was let in first."""

        def rank(index: int) -> tuple[bool, float, float]:
            seat = seats[index]
            late = seat.overtaken >= self.passes
            return not late, 0.0 if late else seat.due, seat.began

        return sorted(sorted(range(len(seats)), key=rank)[: self.batch])


def admitted(
    queued: Sequence[str], active: Sequence[str], room: int, turns: Mapping[str, int]
) -> list[int]:
    """Which queued requests are let in, by whose they are.

    Who has the fewest under way is next; of those, whose last turn is longest ago.
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
