"""The devices that a request needs: the cheapest degrees that meet its deadline.

The device-seconds of a step are its degree times its seconds. A mix runs some of the remaining
steps at one degree and the others at the next larger one that is worth it; for a given time, no
other division of the steps over degrees takes fewer device-seconds, up to the rounding of one step
(TetriServe's deadline-aware allocation, in closed form). Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

EDGE = 1e-9  # relative slack for rounding


@dataclass(frozen=True)
class Mix:
    """Remaining steps divided over degrees: (degree, steps), the larger degree first."""

    parts: tuple[tuple[int, int], ...]
    seconds: float
    device_seconds: float

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(degree for degree, _ in self.parts)


class StepTimes:
    """The seconds of a request's step by degree, and what follows from them.

    Args:
        seconds: By degree; of degrees that the request may use.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self.seconds = dict(sorted(seconds.items()))
        self.hull = lower_hull(self.seconds)
        self.fastest = self.hull[-1]
        self.least = self.seconds[self.fastest]
        self._usable: tuple[float, tuple[int, ...]] = (inf, self.hull)  # the last answer

    def latest_start(self, steps: int, due: float) -> float:
        """Return the time after which the steps can't end by `due` at any degree."""
        return due - steps * self.least

    def usable(self, length: float) -> tuple[int, ...]:
        """Return the degrees at which a step ends within a time; the fastest one if none does."""
        known, degrees = self._usable
        if known != length:
            within = length * (1 + EDGE)
            degrees = tuple(k for k in self.hull if self.seconds[k] <= within) or (self.fastest,)
            self._usable = length, degrees
        return degrees

    def cheapest(self, steps: int, slack: float) -> Mix | None:
        """Return the mix of least device-seconds that ends within `slack`; None if none does."""
        if steps <= 0:
            return Mix((), 0.0, 0.0)
        room = slack * (1 + EDGE) + EDGE
        if steps * self.least > room:
            return None
        previous = None
        for degree in self.hull:
            if steps * self.seconds[degree] <= room:
                return self._mixed(steps, room, previous, degree)
            previous = degree
        raise AssertionError("the last degree of the hull is the fastest one")

    def fluid(self, steps: int, slack: float) -> float:
        """Return the device-seconds of the cheapest mix with steps that can be split; inf if late.

        It is convex and decreasing in `slack`, unlike that of whole steps.
        """
        if steps <= 0:
            return 0.0
        if steps * self.least > slack * (1 + EDGE) + EDGE:
            return inf
        each = slack / steps
        for below, above in zip(self.hull, self.hull[1:], strict=False):
            slow, fast = self.seconds[below], self.seconds[above]
            if each >= slow:
                return steps * below * slow
            if each >= fast:
                share = (slow - each) / (slow - fast)
                return steps * (share * above * fast + (1 - share) * below * slow)
        return steps * self.fastest * self.least

    def _mixed(self, steps: int, room: float, below: int | None, degree: int) -> Mix:
        """Return the mix of `degree` with as many steps as possible at the degree before it."""
        fast = self.seconds[degree]
        if below is None:
            return Mix(((degree, steps),), steps * fast, steps * degree * fast)
        slow = self.seconds[below]
        upper = min(steps, max(1, ceil((steps * slow - room) / (slow - fast) - EDGE)))
        lower = steps - upper
        parts = ((degree, upper), (below, lower)) if lower else ((degree, upper),)
        cost = upper * degree * fast + lower * below * slow
        return Mix(parts, upper * fast + lower * slow, cost)


def lower_hull(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Return the degrees on the lower convex hull of (seconds, device-seconds), slowest first.

    The first degree has the least device-seconds, the last one the least seconds; the others are
    neither slower and dearer than another one nor dearer than a mix of two others.
    """
    points = sorted((t, k * t, k) for k, t in seconds.items())  # fastest first
    useful: list[tuple[float, float, int]] = []
    for point in points:
        if not useful or point[1] < useful[-1][1] * (1 - EDGE):
            useful.append(point)
    hull: list[tuple[float, float, int]] = []
    for point in useful:
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(k for _, _, k in reversed(hull))


def _above(
    first: tuple[float, float, int],
    middle: tuple[float, float, int],
    last: tuple[float, float, int],
) -> bool:
    """Return True if the middle point lies on or above the line between the others."""
    share = (middle[0] - first[0]) / (last[0] - first[0])
    return middle[1] >= (first[1] + share * (last[1] - first[1])) * (1 - EDGE)
