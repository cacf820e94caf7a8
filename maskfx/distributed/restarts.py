"""Restarts: limits how often failed ranks are replaced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

PER_HOUR = 8  # processes started in place of failed ones; more have a cause that restarts don't end
HOUR = 3600.0


class Restarts:
    """Counts the processes that were started within the last hour.

    Args:
        most: The number of processes that may start in an hour.
        clock: Returns seconds.
    """

    def __init__(self, most: int = PER_HOUR, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self._started: deque[float] = deque()

    def can_add(self) -> bool:
        """Return True if another process may start now."""
        while self._started and self._started[0] <= self._clock() - HOUR:
            self._started.popleft()
        return len(self._started) < self.most

    def add(self) -> None:
        self._started.append(self._clock())
