"""Counters of a worker's model, read in a thread of their own.

Counting lists the cache's directory and takes locks, which may wait for a slow disk. A heartbeat
must not wait for it: without heartbeats a worker that computes would be killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

PATIENCE = 0.1  # seconds for which a heartbeat waits for fresh counters

log = structlog.get_logger(__name__)


class LatestCounts:
    """Returns counters that are fresh if counting is quick, and else those counted last.

    Args:
        count: Counts; called by this object's thread, one call at a time.
    """

    def __init__(self, count: Callable[[], dict[str, int]]) -> None:
        self._count = count
        self._asked, self._counted = threading.Event(), threading.Event()
        self._latest: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    def __call__(self) -> dict[str, int]:
        """Return the counters; called by one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="counts", daemon=True)
            self._thread.start()
        self._counted.clear()
        self._asked.set()
        self._counted.wait(PATIENCE)
        return self._latest

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            try:
                self._latest = self._count()
            except Exception:
                log.exception("cache_not_counted")
            self._counted.set()
