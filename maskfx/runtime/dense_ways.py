"""DenseWays: whether dense members of a step run in rows or through the module, by measured cost.

Numbers only: no tensors, no clock.
"""

from __future__ import annotations

from collections import Counter
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


@dataclass(frozen=True, order=True)
class DenseBatch:
    """Dense members whose ways are compared with those of alike batches.

    Args:
        members: The number of members.
        sizes: The number of distinct sizes among them.
        bits: The number of binary digits of the number of sites: batches of the same magnitude.
    """

    members: int
    sizes: int
    bits: int

    @classmethod
    def of(cls, members: int, sizes: int, sites: int) -> DenseBatch:
        return cls(members, sizes, sites.bit_length())

    def __str__(self) -> str:
        plural = "" if self.sizes == 1 else "s"
        least = 1 << max(0, self.bits - 1)
        return (
            f"{self.members} dense requests of {self.sizes} size{plural}, {least} to "
            f"{2 * least - 1} sites together"
        )


@dataclass
class DenseWays:
    """Chooses the way of dense members, per number of members, of distinct sizes and of sites.

    Each way is measured `TRIES` times, then the faster one is used; every `AGAIN` steps the other
    is measured once more. Both compute the same, to rounding. `steps` counts those of each way.
    """

    steps: Counter[DenseWay] = field(default_factory=Counter)
    _ways: dict[DenseBatch, dict[DenseWay, MeasuredWay]] = field(default_factory=dict)
    _steps: dict[DenseBatch, int] = field(default_factory=dict)

    def choose(self, batch: DenseBatch) -> DenseWay:
        """Return the way of a step of such dense members."""
        ways = self._of(batch)
        for way, measured in ways.items():
            if measured.seen < TRIES:
                return way
        faster = min(ways, key=lambda way: ways[way].seconds)
        count = self._steps[batch] = self._steps.get(batch, 0) + 1
        return faster if count % AGAIN else next(way for way in ways if way is not faster)

    def add(self, batch: DenseBatch, way: DenseWay, seconds: float, sites: int) -> None:
        """Add a measured step of a number of sites; its seconds are infinite if it failed."""
        self.steps[way] += isfinite(seconds)
        self._of(batch)[way].add(seconds / max(1, sites))

    def _of(self, batch: DenseBatch) -> dict[DenseWay, MeasuredWay]:
        return self._ways.setdefault(batch, {way: MeasuredWay() for way in DenseWay})

    def lines(self) -> Iterator[str]:
        """Yield what was measured and chosen."""
        for batch, ways in sorted(self._ways.items()):
            if any(measured.seen < TRIES for measured in ways.values()):
                continue
            faster = min(ways, key=lambda way: ways[way].seconds)
            costs = ", ".join(f"{1e6 * ways[way].seconds:.3g} us a site as {way}" for way in ways)
            yield f"{batch}: {costs}; runs as {faster}"
