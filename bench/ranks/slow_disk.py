"""SlowDisk: a disk that each process reads at a limited speed, such as one behind a network."""

from __future__ import annotations

import time
from dataclasses import dataclass

from maskfx.runtime.cache.stores.filesystem import Disk


@dataclass(frozen=True)
class SlowDisk(Disk):
    """Waits after each read; reads of one process don't overlap.

    Args:
        speed: Bytes per second of a process.
    """

    speed: float

    def read_at(self, file: int, into: memoryview, offset: int) -> int:
        began = time.perf_counter()
        count = super().read_at(file, into, offset)
        time.sleep(max(0.0, count / self.speed - (time.perf_counter() - began)))
        return count
