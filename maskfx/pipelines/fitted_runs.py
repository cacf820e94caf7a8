"""Runs of a compiled pipeline on which the weights of forecasts are fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any

from torch import Tensor

from maskfx.errors import InputError
from maskfx.pipelines.call_policy import CallPosition
from maskfx.pipelines.compile import call_of
from maskfx.pipelines.handlers.call_handler import CallPart, SelectedStepsHandler
from maskfx.pipelines.parts.pipeline import Pipeline, StepOutput
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.schedules.schedule import latents_of, schedulers_of
from maskfx.runtime.reuse.clean import latents_like
from maskfx.runtime.reuse.fitted_forecast import FittedRun, ForecastTable
from maskfx.runtime.reuse.forecast_fitting import RunLog, fit_gap
from maskfx.runtime.reuse.step_selection import EVERY_STEP, StepSelection
from maskfx.runtime.steps import AnyStep

ALIKE = 1e-3  # relative difference of the latents that the denoiser reads from a multiple of them


@dataclass
class LoggingHandler(SelectedStepsHandler):
    """Computes the selected steps, and notes what the first denoiser is called with."""

    names: list[str] = field(default_factory=list)  # of all denoisers, in the order of their calls
    times: dict[int, float] = field(default_factory=dict)  # by step
    given: dict[int, Tensor] = field(default_factory=dict)  # latents of the computed steps
    _parts: dict[CallPosition, CallPart] = field(default_factory=dict)

    def choose(self, part: CallPart) -> AnyStep:
        self._parts[part.position] = part
        return super().choose(part)

    def take(self, position: CallPosition, result: object) -> object:
        part = self._parts.pop(position)
        latents = latents_like(list(part.inputs.values()), result)
        if latents is not None and part.times:
            self.names.append(position.name)
            self.times[position.step] = part.times[0]
            self.given.setdefault(position.step, latents.clone())
        return result


def logged_step(original: Callable[..., StepOutput], log: RunLog) -> Callable[..., StepOutput]:
    """Return a scheduler's `step` that writes a log."""

    @wraps(original)
    def step(*args: Any, **kwargs: Any) -> StepOutput:
        named = signature(original).bind(*args, **kwargs).arguments
        log.outputs.append(named["model_output"].clone())
        log.before.append(named["sample"].clone())
        result = original(*args, **kwargs)
        log.after.append(latents_of(result).clone())
        return result

    return step


@dataclass
class FitReport:
    """What was fitted, and how close its runs come.

    Args:
        denoiser: Its name.
        run: The weights.
        errors: The relative difference of the latents from those of the full runs, by the first
            step that is computed after a gap.
    """

    denoiser: str
    run: FittedRun
    errors: dict[int, float]


def fit_forecasts(
    pipe: Pipeline,
    calls: Sequence[Callable[[], Mapping[str, object]]],
    selection: StepSelection,
    report: Callable[[str], None] = lambda _: None,
) -> FitReport:
    """Fit the forecasts of a selection of steps.

    Every call runs once with all steps, and once for each gap of the selection.

    Args:
        pipe: A compiled pipeline.
        calls: Each returns the arguments of one call, which makes a whole picture, with a generator
            in the same state each time. All have one schedule.
        selection: The steps that are computed.
        report: Receives lines on what has been done.

    Raises:
        InputError: The forecasts of this pipeline can't be fitted.
    """
    if not selection.skips:
        raise InputError("fit-forecast: every step is computed: give --every 2 or more")
    full, handlers = [], []
    for number, call in enumerate(calls):
        handler = LoggingHandler(EVERY_STEP)
        full.append(logged(pipe, call(), handler))
        handlers.append(handler)
        report(f"run {number + 1} of {len(calls)}")
    name = check_runs(type(pipe).__name__, full, handlers)
    steps = len(full[0].times)
    computed = [step for step in range(steps) if selection.computes(step, steps)]
    table, errors = ForecastTable(name), dict[int, float]()
    run = FittedRun(tuple(full[0].times), tuple(computed), {})
    for gap in gaps(computed, steps):
        fitted = table.with_run(run)
        own = [logged(pipe, call(), LoggingHandler(selection, fitted)) for call in calls]
        before = [step for step in computed if step < gap.start]
        weights, errors[gap.stop] = fit_gap(full, own, before, gap)
        run = FittedRun(run.times, run.computed, {**run.weights, **weights})
        report(f"steps {gap.start} to {gap.stop - 1}: latents differ by {errors[gap.stop]:.1%}")
    return FitReport(name, run, errors)


def gaps(computed: Sequence[int], steps: int) -> list[range]:
    """Return the ranges of steps between those that are computed, and behind the last."""
    ends = zip(computed, [*computed[1:], steps], strict=True)
    return [range(a + 1, b) for a, b in ends if b > a + 1]


def logged(pipe: Pipeline, call: Mapping[str, object], handler: LoggingHandler) -> RunLog:
    """Run a call; return the log of its scheduler."""
    schedulers = schedulers_of(pipe)
    if len(schedulers) != 1:
        raise InputError(
            f"fit-forecast: {type(pipe).__name__} has {len(schedulers)} schedulers; forecasts are "
            "fitted for pipelines with one"
        )
    [scheduler], log = schedulers, RunLog()
    before = vars(scheduler).get("step")
    vars(scheduler)["step"] = logged_step(scheduler.step, log)
    try:
        call_of(pipe, (), call, Quality(unmasked=True)).run(handler)
    finally:
        del vars(scheduler)["step"]
        if before is not None:
            vars(scheduler)["step"] = before
    log.times = [handler.times[step] for step in sorted(handler.times)]
    for step, latents in enumerate(log.before):
        given = handler.given.get(step)
        log.scales.append(1.0 if given is None else scale_of(given, latents))
    return log


def scale_of(given: Tensor, latents: Tensor) -> float:
    """Return how much larger the latents are that a denoiser reads than those of the scheduler."""
    first = given[: len(latents)].double()
    if first.shape != latents.shape:
        raise InputError(
            f"fit-forecast: the denoiser reads latents {tuple(given.shape)}, the scheduler steps "
            f"{tuple(latents.shape)}: forecasts can't be fitted where they have other forms"
        )
    own = latents.double()
    scale = (first * own).sum() / (own * own).sum()
    if (first - scale * own).norm() > ALIKE * first.norm():
        raise InputError(
            "fit-forecast: the denoiser reads latents that aren't a multiple of the scheduler's: "
            "forecasts can't be fitted"
        )
    return float(scale)


def check_runs(pipe: str, logs: Sequence[RunLog], handlers: Sequence[LoggingHandler]) -> str:
    """Return the denoiser's name; raise InputError where its forecasts can't be fitted."""
    names = {name for handler in handlers for name in handler.names}
    if len(names) != 1:
        raise InputError(
            f"fit-forecast: {pipe} has {len(names)} denoisers whose output is of their latents' "
            f"form ({', '.join(sorted(names)) or 'none'}); forecasts are fitted for one"
        )
    for log in logs:
        if len(log.before) != len(log.times) or len(set(log.times)) != len(log.times):
            raise InputError(
                f"fit-forecast: {pipe}'s scheduler takes {len(log.before)} steps at "
                f"{len(set(log.times))} times: forecasts are fitted where each step has its own"
            )
        if log.times != logs[0].times or log.before[0].shape != logs[0].before[0].shape:
            raise InputError(
                "fit-forecast: the calls have several schedules or sizes; give alike ones"
            )
    return names.pop()
