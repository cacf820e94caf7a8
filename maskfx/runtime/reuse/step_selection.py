"""Step selection: which steps of a run are computed, and which are extrapolated.

Pure functions of step numbers: no tensors, no pipeline. `forecast.py` extrapolates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import ceil

LEAST = 6  # least number of computed steps: the steps of a short run are far apart
# Gaps shrink towards the end: the last steps draw fine detail, and no later step corrects them.
BEND = 0.35
SHORTEST = 1.6  # lower bound of the last gap: across one or two steps there's little to extrapolate


@dataclass(frozen=True)
class StepSelection:
    """Selects the steps to compute; the others are extrapolated.

    The first and the last step are always computed, and at least `LEAST` steps of a run.

    Args:
        every: about one in `every` steps is computed, denser towards the end; 1 computes all.
        first: number of steps at the start that are all computed.
        last: number of steps at the end that are all computed.
    """

    every: int = 1
    first: int = 0
    last: int = 0

    @property
    def skips(self) -> bool:
        return self.every > 1

    def computes(self, step: int, steps: int | None) -> bool:
        """Whether this step is computed; `last` has no effect if `steps` is unknown (None)."""
        if steps is None:
            return step < max(self.first, LEAST) or step % self.every == 0
        return step < self.first or step >= steps - self.last or step in spaced(steps, self.every)

    def key(self) -> list[float]:
        """Return all numbers that determine the selected steps."""
        return [self.every, self.first, self.last, LEAST, BEND, SHORTEST]

    def covers(self, other: StepSelection) -> bool:
        """Whether this selection contains the other's steps for every length of the run."""
        ends = self.first >= other.first and self.last >= other.last
        return not self.skips or (ends and self.every == other.every)

    def following(self, step: int, steps: int | None) -> int | None:
        """Return the next computed step after `step`, or None."""
        found = step + 1
        while not self.computes(found, steps):
            found += 1
        return found if steps is None or found < steps else None

    def left(self, done: int, steps: int) -> int:
        """Return the number of steps still to compute after the first `done` of `steps`."""
        return sum(self.computes(step, steps) for step in range(done, steps))


EVERY_STEP = StepSelection()


@cache
def spaced(steps: int, every: int) -> frozenset[int]:
    """Return about one in `every` of `steps` steps, with first and last, denser towards the end.

    Contains `steps` too, so that a search for the next selected step ends.
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
