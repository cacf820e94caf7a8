"""BusyCores: how many of the cores that this process may use are kept busy by other processes.

Linux counts in /proc/stat how long each core was not idle. What this process didn't use of that
time, others did: other programs, helper processes, and on a virtual machine its neighbours. Cores
that this process may not run on don't count.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

STATISTICS = Path("/proc/stat")
IDLE = slice(3, 5)  # of a core's counters: idle, and waiting for input or output
GUESTS = 8  # counters from here on are contained in others
PERIOD = 0.25  # seconds that a measurement takes at least; counters have hundredths
ENOUGH = 0.4  # of a core: less doesn't count, as an operator seldom waits for it


class BusyCores:
    """Measures the cores that others use since the measurement before.

    `total` is the number of cores that this process may use.

    Args:
        clock: Seconds that pass.
        used: Seconds of CPU time that this process has used, on all of its cores.
        busy: Seconds that these cores were busy; None where the system doesn't count them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
        busy: Callable[[], float | None] | None = None,
    ) -> None:
        self.total = len(cores_of_process())
        self._clock, self._used, self._busy = clock, used, busy or seconds_busy
        self._lock = threading.Lock()
        self._at, self._seconds_of_others = clock(), self._seconds()
        self._cores = 0

    def by_others(self) -> int:
        """Return the number of busy cores; it is measured anew at most once per `PERIOD`."""
        if self._clock() - self._at < PERIOD:
            return self._cores
        with self._lock:
            now = self._clock()
            passed = now - self._at
            if passed >= PERIOD:
                seconds = self._seconds()
                self._cores = whole_cores((seconds - self._seconds_of_others) / passed)
                self._at, self._seconds_of_others = now, seconds
        return self._cores

    def _seconds(self) -> float:
        busy = self._busy()
        return 0.0 if busy is None else busy - self._used()


def whole_cores(cores: float) -> int:
    """Return how many cores to leave to others that use this many."""
    return max(0, int(cores + 1 - ENOUGH))


def seconds_busy() -> float | None:
    """Return how long the cores that this process may use were busy since the system's start."""
    try:
        text = STATISTICS.read_text(encoding="ascii")
    except OSError:  # not Linux
        return None
    return ticks_busy(text, cores_of_process()) / os.sysconf("SC_CLK_TCK")


def cores_of_process() -> Collection[int]:
    """Return the numbers of the cores that this process may use."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return range(os.cpu_count() or 1)


def ticks_busy(statistics: str, cores: Collection[int]) -> int:
    """Return the clock ticks in which `cores` were busy, from the text of /proc/stat."""
    total = 0
    for line in statistics.splitlines():
        if not line.startswith("cpu"):
            break  # interrupts and the like, thousands of numbers on large machines
        name, *counters = line.split()
        if name[3:].isdigit() and int(name[3:]) in cores:
            ticks = [int(counter) for counter in counters[:GUESTS]]
            total += sum(ticks) - sum(ticks[IDLE])
    return total
