"""How many workers the requests need. Pure: no clock, no workers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass
class WorkerCount:
    """Grows when requests have waited for some time, and shrinks later and one by one.

    Args:
        least: Workers that there always are.
        most: Workers that there are at most.
        slots: Requests that a worker runs at once.
        grow_seconds: Time for which more workers must be needed.
        shrink_seconds: Time for which fewer must be needed.
    """

    least: int
    most: int
    slots: int
    grow_seconds: float
    shrink_seconds: float
    since: float | None = None  # when the number began to be too small or too large
    growing: bool = False

    def needed(self, requests: int) -> int:
        return max(self.least, min(self.most, ceil(requests / self.slots)))

    def change(self, now: float, requests: int, workers: int) -> int:
        """Return the number of workers to add, or -1 to remove one.

        Args:
            now: Seconds of a monotonic clock.
            requests: Requests that wait or run.
            workers: Workers, with those that are being started.
        """
        more = self.needed(requests) - workers
        if more == 0:
            self.since = None
            return 0
        if self.since is None or self.growing != (more > 0):
            self.since, self.growing = now, more > 0
        if now - self.since < (self.grow_seconds if more > 0 else self.shrink_seconds):
            return 0
        self.since = None
        return max(more, -1)
