"""StepCount: numbers the steps of a run, and the calls of each denoiser within a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.utils import _pytree as pytree

from maskfx.ir.objects import holds_objects, open_objects
from maskfx.pipelines.schedules.schedule import RunSchedule
from maskfx.runtime.reuse.session import times_of

BY_TIME = "steps distinguished by their timestep, because no scheduler's step is called"


@dataclass
class StepCount:
    """A step ends with the scheduler's `step`; before its first call, with another timestep."""

    schedule: RunSchedule
    step: int = 0
    _calls: Counter[str] = field(default_factory=Counter)  # of each denoiser in this step
    _ended: bool = False  # whether the scheduler's `step` was called
    _times: frozenset[float] = frozenset()

    def precedes(self, inputs: Mapping[str, object]) -> bool:
        """Return True for a call that hands an object on before the scheduler has its times."""
        open_objects(inputs)
        if self._ended or self.schedule.has_times():
            return False
        return holds_objects(pytree.tree_structure(dict(inputs)))

    def begins_by_time(self, name: str, inputs: Mapping[str, object]) -> bool:
        """Return True if a step begins with this call, because the timestep changed."""
        if self._ended:
            return False
        now = frozenset(times_of(inputs, 0))
        begins = self._times not in (frozenset(), now) and self._calls[name] > 0
        if begins:
            self._next()
        self._times = now
        return begins

    def add(self, name: str) -> str:
        """Count a call of a denoiser; return its branch, the number of its calls before."""
        self._calls[name] += 1
        return str(self._calls[name] - 1)

    def end(self) -> None:
        """End a step after the scheduler's."""
        self._ended = True
        self._next()

    def _next(self) -> None:
        self.step += 1
        self._calls.clear()
