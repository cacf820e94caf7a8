"""PartTimes: how long each part of an export took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class PartTimes:
    """Seconds by the name of a part, in the order in which the parts began.

    Args:
        wall: seconds that passed.
        cpu: seconds of this process's processors.
    """

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part; blocks of two parts don't contain each other."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall[part] = self.wall.get(part, 0.0) + time.perf_counter() - wall
            self.cpu[part] = self.cpu.get(part, 0.0) + time.process_time() - cpu

    @property
    def seconds(self) -> float:
        return sum(self.wall.values())
