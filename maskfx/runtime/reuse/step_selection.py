"""Rhythm: which of a run's steps are computed, and which continue the course of those before.

Step numbers in, answers out: no tensors, no pipeline. `forecast.py` carries it
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import ceil

LEAST = 6  # of a short run so many are computed: its steps are far apart
# The last steps draw what is fine, and nothing after them mends what they miss: gaps shrink to them
BEND = 0.35
SHORTEST = 1.6  # but not below this: between gaps of one and two steps little can be continued


@dataclass(frozen=True)
class StepSelection:
    """One step in `every` is computed, more of the last than of the first ones.

    So are all of the `first` and of the `last` few, and the very first and last in any case.
    """

    every: int = 1
    first: int = 0
    last: int = 0

    @property
    def skips(self) -> bool:
        return self.every > 1

    def computes(self, step: int, steps: int | None) -> bool:
        """Is this step computed? Of a run of unknown length nobody knows the last ones."""
        if steps is None:
            return step < max(self.first, LEAST) or step % self.every == 0
        return step < self.first or step >= steps - self.last or step in spaced(steps, self.every)

    def key(self) -> list[float]:
        """All that its steps are a function of."""
        return [self.every, self.first, self.last, LEAST, BEND, SHORTEST]

    def covers(self, other: StepSelection) -> bool:
        """Are the steps that the other computes among these, however many there are?"""
        ends = self.first >= other.first and self.last >= other.last
        return not self.skips or (ends and self.every == other.every)

    def following(self, step: int, steps: int | None) -> int | None:
        """The next step that is computed."""
        found = step + 1
        while not self.computes(found, steps):
            found += 1
        return found if steps is None or found < steps else None

    def left(self, done: int, steps: int) -> int:
        """How many are still computed when so many steps are behind."""
        return sum(self.computes(step, steps) for step in range(done, steps))


EVERY_STEP = StepSelection()


@cache
def spaced(steps: int, every: int) -> frozenset[int]:
    """About one in `every` of so many steps, with the first and the last, nearer towards the end.

    All numbers from the end on are among them, so that a search for the next one ends.
    """
    last = steps - 1
    count = max(LEAST, 1 + ceil(last / every))
    if count >= steps:
        return frozenset(range(steps + 1))
    bend = max(0.0, min(BEND, 1 - SHORTEST * (count - 1) / last))
    parts = [number / (count - 1) for number in range(count)]
    places = [round(last * (u + bend * u * (1 - u))) for u in parts]
    gaps = sorted((b - a for a, b in pairwise(places)), reverse=True)
    return frozenset((*accumulate(gaps, initial=0), steps))
