"""Rhythm: which of a run's steps are computed, and which continue the course of those before.

Step numbers in, answers out: no tensors, no pipeline. `maskfx/pipelines/forecast.py` carries it
out.
"""

from __future__ import annotations

from dataclasses import dataclass

WARM = 3  # computed at the start: three answers make a curve


@dataclass(frozen=True)
class Rhythm:
    """One step in `every` is computed; so are the first few, and the last, whose answer stays."""

    every: int = 1
    first: int = 0
    last: int = 0

    @property
    def skips(self) -> bool:
        return self.every > 1

    def computes(self, step: int, steps: int | None) -> bool:
        """Is this step computed? Of a run of unknown length nobody knows the last one."""
        ends = steps is not None and step >= steps - max(1, self.last)
        return step < max(WARM, self.first) or step % self.every == 0 or ends

    def covers(self, other: Rhythm) -> bool:
        """Are the steps that the other computes among these, however many there are?"""
        begins = max(WARM, self.first) >= other.first
        ends = max(1, self.last) >= other.last
        return begins and ends and other.every % self.every == 0

    def following(self, step: int, steps: int | None) -> int | None:
        """The next step that is computed."""
        found = step + 1
        while not self.computes(found, steps):
            found += 1
        return found if steps is None or found < steps else None

    def left(self, done: int, steps: int) -> int:
        """How many are still computed when so many steps are behind."""
        return sum(self.computes(step, steps) for step in range(done, steps))


EVERY_STEP = Rhythm()
