"""ReadTime: the bytes that were read so far, and the seconds in which at least one read ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock


class ReadTime:
    """Counts reads that may overlap; thread-safe. Bytes over seconds is the speed of all readers.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self._clock, self._lock = clock, Lock()
        self._running, self._since = 0, 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time within the context."""
        with self._lock:
            if not self._running:
                self._since = self._clock()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self.seconds += self._clock() - self._since

    def add(self, nbytes: int) -> None:
        """Count the bytes of a read."""
        with self._lock:
            self.nbytes += nbytes
