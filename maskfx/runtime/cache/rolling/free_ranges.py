"""FreeRanges: which ranges of a buffer's rows are unused."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass


@dataclass
class FreeRanges:
    """The unused ranges of a number of rows, in order."""

    ranges: list[tuple[int, int]]

    def take(self, count: int) -> int | None:
        """Return the start of a range of this length, or None if no range is long enough."""
        for i, (start, stop) in enumerate(self.ranges):
            if stop - start >= count:
                self.ranges[i : i + 1] = [(start + count, stop)] if stop - start > count else []
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Take a range back and join it with its neighbours."""
        insort(self.ranges, (start, start + count))
        joined: list[tuple[int, int]] = []
        for one, other in self.ranges:
            if joined and joined[-1][1] == one:
                joined[-1] = joined[-1][0], other
            else:
                joined.append((one, other))
        self.ranges = joined
