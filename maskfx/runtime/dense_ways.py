"""DenseWays: whether dense members of a step run in rows or through the module, by measured cost.

Numbers only: no tensors, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isfinite

AGAIN = 32  # steps after which the slower way is measured again
SMOOTH = 0.3  # weight of the latest measurement
TRIES = 2  # measurements of each way before one is chosen; the first may include a capture


class DenseWay(StrEnum):
    """How dense members of several requests are computed."""

    ROWS = "rows"  # as one ragged batch, without padding
    MODULE = "module"  # by calls of the module, one per size


@dataclass
class MeasuredWay:
    """The seconds per site of one way."""

    seconds: float = inf
    seen: int = 0

    def add(self, seconds: float) -> None:
        """Add a measurement; the first one is replaced by the second."""
        self.seen += 1
        known = self.seen > TRIES and isfinite(self.seconds)
        self.seconds = (1 - SMOOTH) * self.seconds + SMOOTH * seconds if known else seconds


@dataclass
class DenseWays:
    """Chooses the way of dense members, per number of members and of distinct sizes.

    Each way is measured `TRIES` times, then the faster one is used; every `AGAIN` steps the other
    is measured once more. Both compute the same, to rounding.
    """

    _ways: dict[tuple[int, int], dict[DenseWay, MeasuredWay]] = field(default_factory=dict)
    _steps: dict[tuple[int, int], int] = field(default_factory=dict)

    def choose(self, members: int, sizes: int) -> DenseWay:
        """Return the way of a step of a number of members with a number of distinct sizes."""
        ways = self._of(members, sizes)
        for way, measured in ways.items():
            if measured.seen < TRIES:
                return way
        faster = min(ways, key=lambda way: ways[way].seconds)
        count = self._steps[members, sizes] = self._steps.get((members, sizes), 0) + 1
        return faster if count % AGAIN else next(way for way in ways if way is not faster)

    def add(self, members: int, sizes: int, way: DenseWay, seconds: float, sites: int) -> None:
        """Add a measured step; its seconds are infinite if it failed."""
        self._of(members, sizes)[way].add(seconds / max(1, sites))

    def _of(self, members: int, sizes: int) -> dict[DenseWay, MeasuredWay]:
        return self._ways.setdefault((members, sizes), {way: MeasuredWay() for way in DenseWay})

    def lines(self) -> Iterator[str]:
        """Yield what was measured and chosen."""
        for (members, sizes), ways in sorted(self._ways.items()):
            if any(measured.seen < TRIES for measured in ways.values()):
                continue
            faster = min(ways, key=lambda way: ways[way].seconds)
            costs = ", ".join(f"{1e6 * ways[way].seconds:.3g} us a site as {way}" for way in ways)
            plural = "" if sizes == 1 else "s"
            yield f"{members} dense requests of {sizes} size{plural}: {costs}; runs as {faster}"
