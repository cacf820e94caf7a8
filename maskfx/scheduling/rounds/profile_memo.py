"""Step times by kind of request, computed once per kind, as objects and as rows of arrays. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from maskfx.runtime.planner.least_squares import Floats
from maskfx.scheduling.degree_costs import BatchTotals, JointSeconds, StepProfile
from maskfx.scheduling.load import Work
from maskfx.scheduling.rounds.allocation import StepTimes
from maskfx.scheduling.rounds.placement import footprint

# what the seconds of a step depend on
KIND = attrgetter("sites", "whole", "branches", "bytes", "kind", "weighted", "pairs")


class KindCosts(NamedTuple):
    """What is known of a kind: the row of the memo's arrays that it has, times, and totals."""

    row: int
    times: StepTimes
    totals: BatchTotals


class ProfileMemo:
    """Step times by kind of request.

    `seconds` and `sizes` have a row per kind: the times and degrees of its hull, slowest first,
    filled up with infinite times and degree 0. `least` is the shortest of these times, `widest`
    its degree.

    Args:
        degrees: Degrees that may be used.
        kinds: Number of kinds after which all are forgotten.
    """

    def __init__(
        self, profile: StepProfile, degrees: Sequence[int], devices: int, kinds: int = 4096
    ) -> None:
        self.profile = profile
        self.degrees = tuple(k for k in degrees if k <= devices)
        self.footprints = {k: footprint(k, devices) for k in (0, *self.degrees)}
        self._known: dict[tuple[object, ...], KindCosts] = {}
        self._joint: dict[int, JointSeconds] = {}
        self._make_arrays(kinds)

    def of(self, work: Work) -> KindCosts:
        return self._known.get(KIND(work)) or self._added(work)

    def of_all(self, works: Sequence[Work]) -> list[KindCosts]:
        """Return what is known of each; their rows stay as they are meanwhile."""
        self.make_room(len(works))
        found = map(self._known.get, map(KIND, works))
        return [known or self.of(work) for known, work in zip(found, works, strict=True)]

    def joint(self, degree: int) -> JointSeconds:
        """Return the seconds of joint steps at a degree."""
        found = self._joint.get(degree)
        if found is None:
            found = self._joint[degree] = self.profile.joint(degree)
        return found

    def _added(self, work: Work) -> KindCosts:
        self.make_room(1)
        totals = self.profile.totals([work])
        times = StepTimes({k: self.profile.seconds(k, totals) for k in self.degrees})
        known = self._known[KIND(work)] = KindCosts(len(self._known), times, totals)
        found = [times.seconds[k] for k in times.hull]
        self.seconds[known.row] = found + [inf] * (len(self.degrees) - len(found))
        self.sizes[known.row] = list(times.hull) + [0] * (len(self.degrees) - len(found))
        self.least[known.row], self.widest[known.row] = times.least, times.fastest
        return known

    def make_room(self, kinds: int) -> None:
        """Forget all kinds if that many further ones have no room."""
        room = len(self.seconds)
        if len(self._known) + kinds > room:
            self._known.clear()
            if kinds > room:
                self._make_arrays(kinds)

    def _make_arrays(self, kinds: int) -> None:
        self.seconds: Floats = np.full((kinds, len(self.degrees)), inf)
        self.sizes: Floats = np.zeros((kinds, len(self.degrees)))
        self.least: Floats = np.zeros(kinds)
        self.widest: Floats = np.zeros(kinds)
