"""MeasuredSteps: the way to divide a step, by predictions first and by what steps took then.

Predictions assume idle cores. Where other programs use them, an exchange waits for a rank that
waits for a core, and takes many times as long as the ranks measured. Pure: no clock, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping

COLD = 1  # steps of a kind that aren't counted: they make tables and read programs
WEIGHT = 0.3  # of the latest step in the mean
RETRY = 64  # steps of a kind, of which one is divided in a way that wasn't measured for as long
CLOSE = 2.0  # times what the best way takes: others aren't tried again

WHOLE = 0  # the degree of a step without a member that is cut


class MeasuredSteps:
    """Remembers the seconds of a FLOP of steps alike, by the degree of their division.

    Steps are alike if they have equal programs, numbers of members and of ranks, and FLOPs within a
    factor of two. Every 64th of them is divided by the degree that was measured longest ago, unless
    it takes twice as long as the best one: a degree may have been measured beside other programs.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[Hashable, int, int], tuple[int, float]] = {}
        self._steps: dict[tuple[Hashable, int], int] = {}  # steps of a kind so far
        self._last: dict[tuple[Hashable, int, int], int] = {}  # the latest of each degree
        self._retried: dict[tuple[Hashable, int], int] = {}  # when a degree was last tried again

    def note(self, kind: Hashable, flops: float, degree: int, seconds: float) -> None:
        """Note what a step of this kind took."""
        key = kind, octave(flops), degree
        alike = kind, octave(flops)
        self._steps[alike] = self._last[key] = self._steps.get(alike, 0) + 1
        count, mean = self._taken.get(key, (0, 0.0))
        each = seconds / max(flops, 1.0)
        if count > COLD:
            each = mean + WEIGHT * (each - mean)
        self._taken[key] = count + 1, each

    def seconds(self, kind: Hashable, flops: float, degree: int) -> float | None:
        """Return what a step takes; None if too few were measured."""
        count, mean = self._taken.get((kind, octave(flops), degree), (0, 0.0))
        return mean * max(flops, 1.0) if count > COLD else None

    def best(self, kind: Hashable, flops: float, predicted: Mapping[int, float]) -> int:
        """Return the degree to divide a step by.

        The first steps of a kind aren't cut, so that there is something to compare with. Degrees
        that weren't measured are assumed to differ from those by what is predicted.

        Args:
            kind: What must be equal in steps alike.
            flops: The step's FLOPs.
            predicted: Seconds by degree, `WHOLE` among them.
        """
        whole = self.seconds(kind, flops, WHOLE)
        if whole is None:
            return WHOLE
        found = {}
        for degree, seconds in predicted.items():
            measured = self.seconds(kind, flops, degree)
            found[degree] = whole + seconds - predicted[WHOLE] if measured is None else measured
        best = min(found, key=lambda degree: (found[degree], degree))
        retried = self._to_retry(kind, flops, [d for d in found if found[d] < CLOSE * found[best]])
        return best if retried is None else retried

    def _to_retry(self, kind: Hashable, flops: float, close: Iterable[int]) -> int | None:
        """Return the degree measured longest ago, if it is time to measure it again."""
        alike = kind, octave(flops)
        now = self._steps.get(alike, 0)
        if now - self._retried.get(alike, 0) < RETRY:
            return None
        last = {degree: self._last.get((kind, octave(flops), degree), 0) for degree in close}
        oldest = min(last, key=lambda degree: (last[degree], degree))
        if now - last[oldest] < RETRY:
            return None
        self._retried[alike] = now
        return oldest


def octave(flops: float) -> int:
    return int(math.log2(max(flops, 1.0)))
