"""Schedule: how a run steps, and whether a template was recorded with the same schedule.

Latents between steps depend on the scheduler, its settings and its times: with another schedule,
those outside the mask would be another image, half denoised.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isclose
from typing import Any, TypeGuard

from torch import Tensor

from maskfx.pipelines.pipeline import Scheduler
from maskfx.pipelines.template_key import config_of, digest

CLOSE = 1e-4  # times that differ by less, relative to the larger, are the same


@dataclass(frozen=True)
class Schedule:
    """The schedulers of a run, and the times of its steps."""

    schedulers: list[str]  # names of their classes
    settings: str  # a digest of their configs
    times: list[float]
    count: int | None  # number of steps that are run, if the pipeline reports it

    def stored(self) -> dict[str, Any]:
        return asdict(self)

    def difference(self, other: Schedule) -> str | None:
        """Return how this schedule differs from the other; None if they are the same."""
        if self.schedulers != other.schedulers:
            return f"with {' and '.join(self.schedulers)}, not {' and '.join(other.schedulers)}"
        if None not in (self.count, other.count) and self.count != other.count:
            return f"in {self.count} steps, not {other.count}"
        if len(self.times) != len(other.times):
            return f"in {len(self.times)} steps, not {len(other.times)}"
        if self.settings != other.settings:
            return f"with other settings of {' and '.join(self.schedulers)}"
        if not all(map(same_time, self.times, other.times)):
            return f"at the times {format_times(self.times)}, not {format_times(other.times)}"
        return None


def schedule_of(pipe: object) -> Schedule:
    """Return the schedule of a pipeline's current run; valid from its first step on."""
    schedulers = schedulers_of(pipe)
    return Schedule(
        [type(part).__name__ for part in schedulers],
        digest([config_of(part) for part in schedulers]),
        [time for part in schedulers for time in times_of(part)],
        getattr(pipe, "_num_timesteps", None),
    )


def steps_of(pipe: object) -> int | None:
    """Return the steps of the current run; None if neither pipeline nor scheduler reports them."""
    count: int | None = getattr(pipe, "_num_timesteps", None)
    if count is not None:
        return count
    match schedulers_of(pipe):
        case [only] if (times := getattr(only, "timesteps", None)) is not None:
            return len(times) - (getattr(only, "begin_index", None) or 0)
    return None


def schedulers_of(pipe: object) -> list[Scheduler]:
    """Return the schedulers of a pipeline, each once."""
    return list({id(part): part for part in vars(pipe).values() if is_scheduler(part)}.values())


def is_scheduler(part: object) -> TypeGuard[Scheduler]:
    return callable(getattr(part, "step", None)) and hasattr(part, "set_timesteps")


def times_of(scheduler: Scheduler) -> list[float]:
    times = getattr(scheduler, "timesteps", None)
    if isinstance(times, Tensor):
        return [float(time) for time in times.tolist()]
    return [] if times is None else [float(time) for time in times]


def same_time(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)


def format_times(times: list[float]) -> str:
    return ", ".join(f"{time:g}" for time in times[:3]) + (", ..." if len(times) > 3 else "")
