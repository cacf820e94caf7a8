"""Schedule: how a run steps, and whether a template was recorded with the same schedule.

Latents between steps depend on the scheduler, its settings and its times: with another schedule,
those outside the mask would be another image, half denoised.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from inspect import signature
from itertools import chain, islice
from math import isclose
from typing import TypeGuard

from torch import Tensor

from maskfx.pipelines.digests import digest
from maskfx.pipelines.parts.pipeline import (
    Scheduler,
    StepOutput,
    attributes_of,
    config_of,
    nested_pipelines,
)

CLOSE = 1e-4  # times that differ by less, relative to the larger, are the same


@dataclass(frozen=True)
class Schedule:
    """The schedulers of a run, and the times of its steps."""

    schedulers: list[str]  # names of their classes
    settings: str  # a digest of their configs
    times: list[float]
    count: int | None  # number of steps that are run, if the pipeline reports it
    lengths: list[int] = field(default_factory=list)  # of the times of each scheduler

    def stored(self) -> dict[str, object]:
        return asdict(self)

    def difference(self, other: Schedule) -> str | None:
        """Return how this schedule differs from the other; None if they are the same.

        A scheduler of the other without times is not compared: its stage hasn't begun.
        """
        if self.schedulers != other.schedulers:
            return f"with {' and '.join(self.schedulers)}, not {' and '.join(other.schedulers)}"
        if None not in (self.count, other.count) and self.count != other.count:
            return f"in {self.count} steps, not {other.count}"
        stages = [(a, b) for a, b in zip(self.stages(), other.stages(), strict=False) if b]
        for times, own in stages:
            if len(times) != len(own):
                return f"in {len(times)} steps, not {len(own)}"
        if self.settings != other.settings:
            return f"with other settings of {' and '.join(self.schedulers)}"
        for times, own in stages:
            if not all(map(same_time, times, own)):
                return f"at the times {format_times(times)}, not {format_times(own)}"
        return None

    def stages(self) -> list[list[float]]:
        """Return the times of each scheduler."""
        times = iter(self.times)
        return [list(islice(times, n)) for n in self.lengths or [len(self.times)]]


class RunSchedule:
    """The schedule of a run, as far as it is set.

    A pipeline may run several schedulers in turn. Until its stage begins, a scheduler has the times
    of an earlier run.
    """

    def __init__(self, pipe: object) -> None:
        self.pipe = pipe
        self._before = [(part, getattr(part, "timesteps", None)) for part in schedulers_of(pipe)]
        self._known: list[bool] | None = None
        self._starts: dict[int, int] = {}  # the step of each denoiser's first call

    def steps(self, module: object, step: int) -> int | None:
        """Return the number of steps after which a denoiser, called at `step`, isn't called again.

        Those of a pipeline that this one runs begin at its first call. None if it isn't known.
        """
        count, start = steps_of(self.pipe), self._starts.setdefault(id(module), step)
        if count is not None:
            return count
        runs = (one for one in nested_pipelines(self.pipe)[1:] if has_part(one, module))
        own = next(map(steps_of, runs), None)
        return None if own is None else start + own

    def changes(self) -> bool:
        """Return True at the first call, and when a further scheduler was given times since."""
        now = self._set()
        known, self._known = self._known, now
        return now != known

    def has_times(self) -> bool:
        """Return True if a scheduler was given its times since the run began."""
        return any(getattr(part, "timesteps", None) is not before for part, before in self._before)

    def schedule(self) -> Schedule:
        """Return the schedule, with the times of the schedulers that were given them by now."""
        schedulers = [part for part, _ in self._before]
        times = [
            times_of(part) if is_set else []
            for part, is_set in zip(schedulers, self._set(), strict=True)
        ]
        return Schedule(
            [type(part).__name__ for part in schedulers],
            digest([config_of(part) for part in schedulers]),
            [time for stage in times for time in stage],
            getattr(self.pipe, "_num_timesteps", None),
            list(map(len, times)),
        )

    def _set(self) -> list[bool]:
        """Return for each scheduler whether this run gave it times; an only one has its times."""
        if len(self._before) == 1:
            return [True]
        return [getattr(part, "timesteps", None) is not before for part, before in self._before]


def steps_of(pipe: object) -> int | None:
    """Return the steps of the current run; None if neither pipeline nor scheduler reports them."""
    count: int | None = getattr(pipe, "_num_timesteps", None)
    if count is not None:
        return count
    match schedulers_of(pipe):
        case [only] if (times := getattr(only, "timesteps", None)) is not None:
            return len(times) - (getattr(only, "begin_index", None) or 0)
    return None


def has_part(pipe: object, module: object) -> bool:
    """Return True if a module is a component of a pipeline, or a net of one."""
    parts = list(attributes_of(pipe).values())
    nets = (net for part in parts for net in getattr(part, "nets", ()))
    return any(part is module for part in chain(parts, nets))


def schedulers_of(pipe: object) -> list[Scheduler]:
    """Return the schedulers of a pipeline and of those that it runs, each once."""
    parts = (part for one in nested_pipelines(pipe) for part in attributes_of(one).values())
    return list({id(part): part for part in parts if is_scheduler(part)}.values())


def is_scheduler(part: object) -> TypeGuard[Scheduler]:
    return callable(getattr(part, "step", None)) and hasattr(part, "set_timesteps")


def steps_read_mask(pipe: object) -> bool:
    """Return True if a step of a scheduler takes the mask, so that it decides what white means."""
    return any("mask" in signature(part.step).parameters for part in schedulers_of(pipe))


def times_of(scheduler: Scheduler) -> list[float]:
    times = getattr(scheduler, "timesteps", None)
    if isinstance(times, Tensor):
        return [float(time) for time in times.tolist()]
    return [] if times is None else [float(time) for time in times]


def same_time(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)


def format_times(times: list[float]) -> str:
    return ", ".join(f"{time:g}" for time in times[:3]) + (", ..." if len(times) > 3 else "")


def latents_of(result: StepOutput) -> Tensor:
    """Return the latents in what a scheduler's `step` returned."""
    if isinstance(result, Tensor):
        return result
    return result[0] if isinstance(result, tuple) else result.prev_sample


def with_latents(result: StepOutput, value: Tensor) -> StepOutput:
    """Return the result of a scheduler's `step` with other latents."""
    if isinstance(result, Tensor):
        return value
    if isinstance(result, tuple):
        return (value, *result[1:])
    result.prev_sample = value
    return result
