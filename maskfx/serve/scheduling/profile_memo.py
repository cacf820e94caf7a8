"""Step times by kind of request, computed once per kind, as objects and as rows of arrays. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from maskfx.runtime.planner.least_squares import Floats
from maskfx.serve.scheduling.allocation import StepTimes
from maskfx.serve.scheduling.degree_costs import BatchTotals, StepProfile
from maskfx.serve.scheduling.load import Work
from maskfx.serve.scheduling.placement import footprint


class Kind(NamedTuple):
    """What the seconds of a step depend on."""

    sites: int
    whole: int
    branches: int
    bytes: int


class KindCosts(NamedTuple):
    """What is known of a kind: the row of the memo's arrays that it has, times, and totals."""

    row: int
    times: StepTimes
    totals: BatchTotals


class ProfileMemo:
    """Step times by kind of request.

    `seconds` and `sizes` have a row per kind: the times and degrees of its hull, slowest first,
    filled up with infinite times and degree 0.

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
        self._known: dict[Kind, KindCosts] = {}
        self._make_arrays(kinds)

    def of(self, work: Work) -> KindCosts:
        kind = Kind(work.sites, work.whole, work.branches, work.bytes)
        known = self._known.get(kind)
        if known is None:
            self.make_room(1)
            totals = self.profile.totals([work])
            times = StepTimes({k: self.profile.seconds(k, totals) for k in self.degrees})
            known = self._known[kind] = KindCosts(len(self._known), times, totals)
            found = [times.seconds[k] for k in times.hull]
            self.seconds[known.row] = found + [inf] * (len(self.degrees) - len(found))
            self.sizes[known.row] = list(times.hull) + [0] * (len(self.degrees) - len(found))
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
