"""Call handlers: how a run executes its denoiser calls, and what happens to its latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from maskfx.errors import BudgetError, CacheError
from maskfx.ir.objects import open_objects
from maskfx.pipelines.call_policy import CallPosition
from maskfx.pipelines.masks.mask_grids import is_flat
from maskfx.pipelines.masks.masks import Box
from maskfx.pipelines.schedules.schedule import Schedule
from maskfx.pipelines.templates.batches import mask_shape_of
from maskfx.pipelines.templates.budget_shares import RecordedPart
from maskfx.pipelines.templates.template_library import TemplateIncomplete, TemplateLibrary
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.reuse.fitted_forecast import ForecastTable
from maskfx.runtime.reuse.patches import PatchDecision
from maskfx.runtime.reuse.session import Times
from maskfx.runtime.reuse.step_selection import EVERY_STEP, StepSelection
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, LateExchange, RecordStep


@dataclass(frozen=True)
class CallPart:
    """A denoiser call of a run, or one sample of a call that lists several."""

    position: CallPosition
    denoiser: CompiledDenoiser
    inputs: Mapping[str, object]
    times: Times = ()  # scheduler times, if the handler reads them
    steps: int | None = None  # number of steps of the run, if known
    adapters: Updates = ()
    late: LateExchange | None = None  # None: ranks wait for one another's rows


class CallHandler(Protocol):
    """Handles the denoiser calls and the latents of one run."""

    splits: ClassVar[bool]  # whether a call that lists samples becomes one step per sample
    records: ClassVar[bool]  # whether the run makes a template and not a requested image

    @property
    def title(self) -> str | None:
        """Text before the pipeline's progress bar; "" hides the bar, None leaves it as it is."""
        ...

    @property
    def selection(self) -> StepSelection:
        """The steps whose calls are computed; outputs of the others are extrapolated."""
        ...

    @property
    def forecast(self) -> str | ForecastTable:
        """How outputs of the other steps are made: `Quality.forecast`, or by fitted weights."""
        ...

    @property
    def blends(self) -> bool:
        """Whether a part of the latents is a template's after every step."""
        ...

    @property
    def reads_times(self) -> bool:
        """Whether calls need their scheduler times; reading them from a device blocks the host."""
        ...

    def begin(self, schedule: Callable[[], Schedule]) -> None:
        """Prepare for the first call or scheduler step after a scheduler was given its times.

        Called on the request's thread. `schedule` returns the times that are set by now.
        """
        ...

    def prepare(
        self, outputs: Sequence[object], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[object]:
        """Return the initial latents to use in place of the pipeline's."""
        ...

    def choose(self, part: CallPart) -> AnyStep | PatchDecision:
        """Return the step for this call, or what is decided before, with those of other calls."""
        ...

    def upcoming(self, part: CallPart, now: EditStep) -> EditStep | None:
        """Return the edit of this call's successor at the next computed step; None if unknown.

        Its rows can be prefetched while `now` computes.
        """
        ...

    def unfit(self, position: CallPosition, why: CacheError) -> TemplateIncomplete | None:
        """Return the error that ends a run whose recording doesn't fit; None to compute in full."""
        ...

    def take(self, position: CallPosition, result: object) -> object:
        """Return the call's output from the result of its step."""
        ...

    def after_step(self, step: int, latents: Tensor) -> Tensor:
        """Return the latents to continue with after a step of the scheduler."""
        ...

    @property
    def codes(self) -> bool:
        """Whether `code` may return a step."""
        ...

    def code(self, part: CallPart) -> AnyStep | None:
        """Return the step for a call of an autoencoder; None for the autoencoder itself."""
        ...


class DenseHandler:
    """Runs every call dense; calls are only batched."""

    splits: ClassVar[bool] = False
    records: ClassVar[bool] = False
    title: str | None = None
    selection: StepSelection = EVERY_STEP
    forecast: str | ForecastTable = "output"
    blends: bool = False
    reads_times: bool = False
    codes: bool = False

    def begin(self, schedule: Callable[[], Schedule]) -> None:
        pass

    def prepare(
        self, outputs: Sequence[object], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[object]:
        return outputs

    def choose(self, part: CallPart) -> AnyStep:
        return DenseStep(part.inputs)

    def upcoming(self, part: CallPart, now: EditStep) -> EditStep | None:
        return None

    def unfit(self, position: CallPosition, why: CacheError) -> TemplateIncomplete | None:
        return None

    def take(self, position: CallPosition, result: object) -> object:
        return result

    def after_step(self, step: int, latents: Tensor) -> Tensor:
        return latents

    def code(self, part: CallPart) -> AnyStep | None:
        return None


@dataclass
class SelectedStepsHandler(DenseHandler):
    """Runs the calls of selected steps dense; outputs of the others are extrapolated."""

    selection: StepSelection
    forecast: str | ForecastTable = "output"
    reads_times: bool = True


@dataclass
class RecordHandler(DenseHandler):
    """Runs calls dense and records them as a template, which is complete after `finish`.

    Of steps that aren't in `recorded`, only the latents are stored. With `skips` the outputs of
    these steps are extrapolated; else they are computed too. With `codes`, calls of autoencoders
    are recorded too.
    """

    splits: ClassVar[bool] = True
    records: ClassVar[bool] = True
    library: TemplateLibrary
    template: str
    recorded: StepSelection = EVERY_STEP
    title: str | None = None
    codes: bool = False
    skips: bool = False
    _schedule: Schedule | None = None
    _start: list[Tensor] = field(default_factory=list)  # of the pipeline, or chunk, that runs now
    _starts: list[Tensor] = field(default_factory=list)  # all that were prepared, in order
    _recording: set[CallPosition] = field(default_factory=set)  # calls that are being computed
    _parts: dict[str, RecordedPart] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.selection = self.recorded if self.skips else EVERY_STEP
        self.reads_times = self.skips
        self.library.begin(self.template)

    def begin(self, schedule: Callable[[], Schedule]) -> None:
        self._schedule = schedule()

    def prepare(
        self, outputs: Sequence[object], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[object]:
        self._start = [v.clone() for v in outputs if isinstance(v, Tensor)]
        self._starts += self._start
        return outputs

    def choose(self, part: CallPart) -> AnyStep:
        if not self._stores(part):
            return DenseStep(part.inputs)
        self._recording.add(part.position)
        return RecordStep(part.inputs)

    def _stores(self, part: CallPart) -> bool:
        """Return True if the template stores this call."""
        if open_objects(part.inputs) or self._start and is_flat(self._start[0]):
            return False
        shape = mask_shape_of(part.denoiser, part.inputs)
        if shape is None:
            return False
        name, step, _ = part.position
        budget = self.library.budget
        if budget is not None and step >= budget.steps:
            raise BudgetError(
                f"{name}: this call has a step number {step}, but the budget is for {budget.steps} "
                "steps, counted from 0; give Budget(steps=) the steps of the longest call"
            )
        self._parts[name] = RecordedPart(part.denoiser, shape, self._start)
        templates = self.library.expect(name, part.denoiser, shape, self._start)
        wanted = templates is None or templates.wants(step)
        return wanted and self.recorded.computes(step, part.steps)

    def take(self, position: CallPosition, result: object) -> object:
        if position not in self._recording:
            return result
        self._recording.remove(position)
        assert isinstance(result, tuple), "a recorded step has two results"
        output, cache = result
        self.library.put(self.template, position, cache)
        return output

    def code(self, part: CallPart) -> AnyStep | None:
        if not self.library.take_room(self.template, part.denoiser, part.inputs):
            return None
        self.library.templates_of(part.position.name, part.denoiser)
        self._recording.add(part.position)
        return RecordStep(part.inputs)

    def after_step(self, step: int, latents: Tensor) -> Tensor:
        self.library.decide_shares(self.template, self._parts)
        self.library.put_latents(self.template, step, latents)
        return latents

    def finish(self) -> None:
        self.library.decide_shares(self.template, self._parts)
        self.library.finish(self.template, self._starts, self._schedule)
