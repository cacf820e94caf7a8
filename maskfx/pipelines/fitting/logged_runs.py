"""Runs of a compiled pipeline that note what its denoiser and its scheduler were given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from maskfx.errors import InputError
from maskfx.pipelines.call import PipelineCall
from maskfx.pipelines.call_policy import CallPosition
from maskfx.pipelines.compile import call_of
from maskfx.pipelines.handlers.call_handler import CallPart, SelectedStepsHandler
from maskfx.pipelines.handlers.edit_handler import EditHandler
from maskfx.pipelines.handlers.template_reader import TemplateReader
from maskfx.pipelines.parts.pipeline import Pipeline, StepOutput
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.recording import find_template
from maskfx.pipelines.schedules.schedule import latents_of, schedulers_of
from maskfx.pipelines.serve_call import masks_of
from maskfx.runtime.reuse.clean import latents_like
from maskfx.runtime.reuse.fitted_forecast import ForecastTable
from maskfx.runtime.reuse.forecast_fitting import RunLog
from maskfx.runtime.reuse.patches import PatchDecision
from maskfx.runtime.steps import AnyStep

ALIKE = 1e-3  # relative difference of the latents that the denoiser reads from a multiple of them


@dataclass
class CallLog:
    """What the calls of a run whose output is of their latents' form were given.

    Args:
        names: Of the denoisers, in the order of their calls.
        times: By step.
        given: The latents of the computed steps.
    """

    names: list[str] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)
    given: dict[int, Tensor] = field(default_factory=dict)
    _parts: dict[CallPosition, CallPart] = field(default_factory=dict)

    def begin(self, part: CallPart) -> None:
        self._parts[part.position] = part

    def end(self, position: CallPosition, output: object) -> None:
        part = self._parts.pop(position)
        latents = latents_like(list(part.inputs.values()), output)
        if latents is not None and part.times:
            self.names.append(position.name)
            self.times[position.step] = part.times[0]
            self.given.setdefault(position.step, latents.clone())


@dataclass
class LoggedWhole(SelectedStepsHandler):
    """Computes the selected steps of a whole picture, and notes its calls."""

    calls: CallLog = field(default_factory=CallLog)

    def choose(self, part: CallPart) -> AnyStep:
        self.calls.begin(part)
        return super().choose(part)

    def take(self, position: CallPosition, result: object) -> object:
        self.calls.end(position, result)
        return result


@dataclass
class LoggedEdit(EditHandler):
    """Computes the selected steps of an edit, and notes its calls."""

    kind: str | ForecastTable = "output"
    calls: CallLog = field(default_factory=CallLog)

    @property
    def forecast(self) -> str | ForecastTable:  # type: ignore[override]
        return self.kind

    @property
    def reads_times(self) -> bool:
        return True

    def choose(self, part: CallPart) -> AnyStep | PatchDecision:
        self.calls.begin(part)
        return super().choose(part)

    def take(self, position: CallPosition, result: object) -> object:
        output = super().take(position, result)
        self.calls.end(position, output)
        return output


@dataclass
class LoggedRun:
    """The logs of a run: of the scheduler's steps and of the denoiser's calls."""

    steps: RunLog
    calls: CallLog

    def carried(self) -> Tensor:
        """Return which elements of the latents nothing but the scheduler changes.

        Outside the mask of an edit they are the template's after each step, and some pipelines set
        them to those of the picture.
        """
        latents = self.steps.before
        found = torch.ones_like(latents[0], dtype=torch.bool)
        for after, before in zip(self.steps.after, latents[1:], strict=False):
            found &= after == before
        if not found.any():
            raise InputError(
                "fit-forecast: no part of the latents is changed by the scheduler alone: forecasts "
                "can't be fitted"
            )
        return found

    def at(self, elements: Tensor) -> RunLog:
        """Return the scheduler's log of these elements."""
        log = self.steps
        before, outputs, after = (
            [one[elements] for one in tensors] for tensors in (log.before, log.outputs, log.after)
        )
        return RunLog(log.times, before, outputs, after, log.scales)


def logged(
    pipe: Pipeline,
    arguments: Mapping[str, object],
    quality: Quality,
    kind: str | ForecastTable = "output",
) -> LoggedRun:
    """Run a call and return its logs; an edit if the quality doesn't apply to whole pictures.

    Args:
        pipe: A compiled pipeline.
        arguments: Those of the call.
        quality: Has the steps to compute.
        kind: How the outputs of others are made.
    """
    schedulers = schedulers_of(pipe)
    if len(schedulers) != 1:
        raise InputError(
            f"fit-forecast: {type(pipe).__name__} has {len(schedulers)} schedulers; forecasts are "
            "fitted for pipelines with one"
        )
    [scheduler], log = schedulers, RunLog()
    call = call_of(pipe, (), arguments, quality)
    handler: LoggedWhole | LoggedEdit
    if quality.unmasked:
        handler = LoggedWhole(quality.whole_selection, kind)
    else:
        handler = edit_of(call, kind)
    before = vars(scheduler).get("step")
    vars(scheduler)["step"] = logged_step(scheduler.step, log)
    try:
        call.run(handler, **(call.state.undecoded if quality.unmasked else {}))
    finally:
        del vars(scheduler)["step"]
        if before is not None:
            vars(scheduler)["step"] = before
    calls = handler.calls
    log.times = [calls.times[step] for step in sorted(calls.times)]
    for step, latents in enumerate(log.before):
        given = calls.given.get(step)
        log.scales.append(1.0 if given is None else scale_of(given, latents))
    return LoggedRun(log, calls)


def edit_of(call: PipelineCall, kind: str | ForecastTable) -> LoggedEdit:
    """Return the handler of an edit of a template, which is recorded if it isn't there."""
    source = find_template(call)
    masks = None if call.mask is None else masks_of(call)
    if source is None or masks is None:
        raise InputError(
            f"fit-forecast: no template of {type(call.pipe).__name__} can be recorded for an edit: "
            "forecasts of edits can't be fitted; fit those of whole pictures"
        )
    row, library = call.count_edited(len(masks)), call.state.library
    template = TemplateReader(library, source)
    mask = torch.stack(masks).any(0)
    return LoggedEdit(mask, call.quality, template, call.state.notes, row, kind=kind)


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
