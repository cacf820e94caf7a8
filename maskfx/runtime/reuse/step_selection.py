"""Step selection: which steps of a run are computed, and which are extrapolated.

Pure functions of step numbers: no tensors, no pipeline. `forecast.py` extrapolates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import ceil

LEAST = 6  # computed steps, at least, by default: the steps of a short run are far apart
# Steps are evenly spaced if they are FEWEST or more, or their gaps LONGEST or shorter.
FEWEST, LONGEST = 5, 5
# Gaps shrink towards the end: the last steps draw fine detail, and no later step corrects them.
BEND = 0.35
SHORTEST = 1.6  # lower bound of the last gap: across one or two steps there's little to extrapolate


@dataclass(frozen=True)
class StepSelection:
    """Selects the steps to compute; the others are extrapolated.

    The first step is always computed, and at least `least` steps of a run. So is the last one,
    unless fewer than `LEAST` are computed, or few and far between of even ones: then the gap after
    the last computed step is shorter than those before, because one gap fewer makes all of them
    longer.

    Args:
        every: about one in `every` steps is computed, denser towards the end; 1 computes all.
        first: number of steps at the start that are all computed.
        last: number of steps at the end that are all computed.
        least: number of steps that are computed at least, however short the run.
        even: the steps of whole pictures: all gaps are alike, the shorter ones first. In an edit
            what surrounds the mask is known from the first step on, so that its early steps matter
            less than those of a picture that begins from nothing.
        chosen: of runs with some numbers of steps, those that are computed in place of as many.
    """

    every: int = 1
    first: int = 0
    last: int = 0
    least: int = LEAST
    even: bool = False
    chosen: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def skips(self) -> bool:
        return self.every > 1

    def computes(self, step: int, steps: int | None) -> bool:
        """Whether this step is computed; `last` has no effect if `steps` is unknown (None)."""
        if steps is None:
            return step < max(self.first, self.least) or step % self.every == 0
        at_ends = step < self.first or step >= steps - self.last
        return at_ends or step in self._between(steps)

    def _between(self, steps: int) -> frozenset[int]:
        usual = spaced(steps, self.every, self.least, self.even)
        for length, chosen in self.chosen:
            if length == steps and len(chosen) == len(usual) - 1:
                return frozenset((*chosen, steps))
        return usual

    def key(self) -> list[float]:
        """Return all numbers that determine the selected steps, where none are chosen."""
        return [self.every, self.first, self.last, self.least, self.even, BEND, SHORTEST]

    def covers(self, other: StepSelection) -> bool:
        """Whether this selection contains the other's steps for every length of the run."""
        ends = self.first >= other.first and self.last >= other.last
        same = replace(self, first=0, last=0) == replace(other, first=0, last=0)
        return not self.skips or (ends and same)

    def following(self, step: int, steps: int | None) -> int | None:
        """Return the next computed step after `step`, or None."""
        found = step + 1
        while not self.computes(found, steps):
            found += 1
        return found if steps is None or found < steps else None

    def selected(self, steps: int) -> tuple[int, ...]:
        """Return the computed steps of a run."""
        return tuple(step for step in range(steps) if self.computes(step, steps))

    def left(self, done: int, steps: int) -> int:
        """Return the number of steps still to compute after the first `done` of `steps`."""
        return sum(self.computes(step, steps) for step in range(done, steps))


EVERY_STEP = StepSelection()
# Names of qualities that apply to whole pictures too; points of bench.patches.
WHOLE = {
    "all-steps": EVERY_STEP,
    "half-steps": StepSelection(every=2, even=True),
    "third-steps": StepSelection(every=3, even=True),
    "fifth-steps": StepSelection(every=5, least=2, even=True),
}


@cache
def spaced(steps: int, every: int, least: int = LEAST, even: bool = False) -> frozenset[int]:
    """Return about one in `every` of `steps` steps, evenly or denser towards the end.

    Contains `steps` too, so that a search for the next selected step ends.
    """
    last = steps - 1
    count = max(least, 1 + ceil(last / every))
    if count >= steps:
        return frozenset(range(steps + 1))
    even = even and (count >= FEWEST or last / (count - 1) <= LONGEST)
    end, gaps = (last, count - 1) if even or count >= LEAST else (steps, count)
    return frozenset((*gap_ends(end, gaps, even), steps))


def gap_ends(end: int, count: int, even: bool) -> list[int]:
    """Divide the steps up to `end` into gaps, alike or shrinking; return where they begin and end.

    Of gaps that are alike the shorter ones come first: a single output has no slope to follow.
    """
    bend = 0.0 if even else max(0.0, min(BEND, 1 - SHORTEST * count / end))
    parts = [number / count for number in range(count + 1)]
    places = [round(end * (u + bend * u * (1 - u))) for u in parts]
    gaps = sorted((b - a for a, b in pairwise(places)), reverse=not even)
    return list(accumulate(gaps, initial=0))
