"""Courses: what each denoiser call of a run becomes, and what its latents are outside the mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from maskfx.errors import BudgetError, CacheError, InputError
from maskfx.ir.values import handed_on
from maskfx.pipelines.batches import (
    batch_of,
    of_batch,
    of_source,
    picture_of,
    repeats_each,
    shape_of,
)
from maskfx.pipelines.mask_grids import MaskGrids
from maskfx.pipelines.masks import Box, framed
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.schedule import Schedule
from maskfx.pipelines.template_library import (
    ScheduleMismatch,
    TemplateIncomplete,
    TemplateLibrary,
    TemplateSource,
)
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.devices import moved
from maskfx.runtime.reuse.session import EditSession, Times
from maskfx.runtime.reuse.step_selection import EVERY_STEP, StepSelection
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, RecordStep


@dataclass(frozen=True)
class CallSite:
    """Which call of a run: its denoiser's name, the scheduler's step, the branch within it."""

    name: str
    step: int
    branch: str


def sample_branch(branch: str, index: int, count: int) -> str:
    """The branch of one sample of a call that lists so many."""
    return f"{branch}.{index}/{count}"


class CallPolicy(Protocol):
    """What a run wants of its calls."""

    splits: ClassVar[bool]  # are calls that list samples asked for sample by sample?
    records: ClassVar[bool]  # does it make a template, and no picture that anybody asked for?

    def prepared(
        self, outputs: Sequence[Any], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]: ...

    def forecasts(self, step: int | None = None) -> bool:
        """Are answers of this step forecast, or of any?"""
        ...

    def called(self) -> bool:
        """A call is about to be made, on the request's thread; is its scheduler's time wanted?

        To read what lies on a device stops the host, so it is done here, not in a shared step.
        """
        ...

    def ask(
        self,
        place: CallSite,
        denoiser: CompiledDenoiser,
        inputs: Mapping[str, Any],
        times: Times = (),
    ) -> AnyStep:
        """The step that this call, made at these times of the scheduler, shall be."""
        ...

    def upcoming(
        self, place: CallSite, denoiser: CompiledDenoiser, now: EditStep
    ) -> EditStep | None:
        """What the next step that is computed will ask of this call's successor, if it is known.

        Its rows can be loaded while `now` computes.
        """
        ...

    def unfit(self, place: CallSite, why: CacheError) -> TemplateIncomplete | None:
        """A recording doesn't fit its call: what the run ends with; None to compute in full."""
        ...

    def take(self, place: CallSite, result: Any) -> Any:
        """The call's output, of what its step gave."""
        ...

    def stepped(self, step: int, latents: Tensor) -> Tensor: ...


class DensePolicy:
    """Everything in full; only batched."""

    splits: ClassVar[bool] = False
    records: ClassVar[bool] = False

    def prepared(
        self, outputs: Sequence[Any], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]:
        return outputs

    def forecasts(self, step: int | None = None) -> bool:
        return False

    def called(self) -> bool:
        return False

    def ask(
        self,
        place: CallSite,
        denoiser: CompiledDenoiser,
        inputs: Mapping[str, Any],
        times: Times = (),
    ) -> AnyStep:
        return DenseStep(inputs)

    def upcoming(
        self, place: CallSite, denoiser: CompiledDenoiser, now: EditStep
    ) -> EditStep | None:
        return None

    def unfit(self, place: CallSite, why: CacheError) -> TemplateIncomplete | None:
        return None

    def take(self, place: CallSite, result: Any) -> Any:
        return result

    def stepped(self, step: int, latents: Tensor) -> Tensor:
        return latents


@dataclass
class RecordPolicy:
    """Everything in full, and kept as a template; it is whole once `finish` was called.

    Of steps that no edit of this rhythm computes only the latents are kept.
    """

    splits: ClassVar[bool] = True
    records: ClassVar[bool] = True
    library: TemplateLibrary
    template: str
    selection: StepSelection = EVERY_STEP
    steps: Callable[[], int | None] = lambda: None  # how many the run will have, once it is known
    schedule: Callable[[], Schedule | None] = lambda: None  # the run's own, from its first call on
    _schedule: Schedule | None = None
    _start: list[Tensor] = field(default_factory=list)
    _asked: set[CallSite] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.library.begin(self.template)

    def prepared(
        self, outputs: Sequence[Any], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]:
        self._start = [v.clone() for v in outputs if isinstance(v, Tensor)]
        return outputs

    def forecasts(self, step: int | None = None) -> bool:
        return False

    def called(self) -> bool:
        self._schedule = self._schedule or self.schedule()
        return False

    def ask(
        self,
        place: CallSite,
        denoiser: CompiledDenoiser,
        inputs: Mapping[str, Any],
        times: Times = (),
    ) -> AnyStep:
        shape = None if handed_on(inputs) else shape_of(denoiser, inputs)
        if shape is None:
            return DenseStep(inputs)
        budget = self.library.budget
        if budget is not None and place.step >= budget.steps:
            raise BudgetError(
                f"{place.name}: a call with a step {place.step}, the budget is for {budget.steps} "
                "of them; give Budget(steps=) of the longest call"
            )
        if not self.library.of(place.name, denoiser, shape, self._start).wants(place.step):
            return DenseStep(inputs)
        if not self.selection.computes(place.step, self.steps()):
            return DenseStep(inputs)
        self._asked.add(place)
        return RecordStep(inputs)

    def upcoming(
        self, place: CallSite, denoiser: CompiledDenoiser, now: EditStep
    ) -> EditStep | None:
        return None

    def unfit(self, place: CallSite, why: CacheError) -> TemplateIncomplete | None:
        return None

    def take(self, place: CallSite, result: Any) -> Any:
        if place not in self._asked:
            return result
        self._asked.remove(place)
        output, cache = result
        self.library.put(self.template, place.name, place.step, place.branch, cache)
        return output

    def stepped(self, step: int, latents: Tensor) -> Tensor:
        self.library.put_latents(self.template, step, latents)
        return latents

    def finish(self) -> None:
        self.library.finish(self.template, self._start, self._schedule)


@dataclass
class EditPolicy:
    """Masked sites only, from a template or from the run's own steps.

    Outside the mask the latents are the template's at every step, so that the background is the one
    that was recorded, whatever the noise of this run. If it `insists`, what the template lost ends
    the run; else the run's own steps serve in its place, which gives another picture.
    """

    splits: ClassVar[bool] = True
    records: ClassVar[bool] = False
    mask: Tensor  # of pixels
    quality: Quality
    library: TemplateLibrary
    template: TemplateSource | None
    steps: Callable[[], int | None] = lambda: None  # how many the run will have, once it is known
    notes: Counter[str] = field(default_factory=Counter)  # what ran in full, for explain()
    insists: bool = False
    schedule: Callable[[], Schedule | None] = lambda: None  # the run's own, from its first call on
    given: bool = False  # the template was handed in, for whatever pictures this call makes
    row: int = 1  # so many pictures, which the pipeline repeats as a row, not each by itself
    in_full: bool = False  # a call that has a recording was computed without it
    _compared: bool = False  # with the template's schedule
    _sites: MaskGrids | None = None
    _start: list[Tensor] = field(default_factory=list)  # what the template began with
    _sessions: dict[str, EditSession] = field(default_factory=dict)
    _asked: dict[CallSite, EditSession] = field(default_factory=dict)
    _masks: dict[Any, Tensor | None] = field(default_factory=dict)
    _weights: dict[str, str] = field(default_factory=dict)  # they don't change during a run
    _fetched: dict[CallSite, StepCache] = field(default_factory=dict)  # for steps to come

    def prepared(
        self, outputs: Sequence[Any], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]:
        left, top, right, bottom = box or (0, 0, *self.mask.shape[::-1])
        pixels = framed(self.mask, box, (int(height or bottom - top), int(width or right - left)))
        first = next((v for v in outputs if isinstance(v, Tensor)), None)
        self._sites = MaskGrids(pixels, self.quality.margin, first)
        if repeats_each(outputs, self.row):
            self.row = 1
        if self.template is None:
            return outputs
        began = self.library.start(self.template.name)
        if self.insists and not began and self._sites.latents is not None:
            raise TemplateIncomplete("the start of a template is gone")
        self._start = [v for v in began if isinstance(v, Tensor)]
        kept = iter(self._start)
        changed = [
            self._outside(v, next(kept, None)) if isinstance(v, Tensor) else v for v in outputs
        ]
        self._sites.latents = next((v for v in changed if isinstance(v, Tensor)), None)
        return changed

    def forecasts(self, step: int | None = None) -> bool:
        selection = self.quality.selection
        return selection.skips and (step is None or not selection.computes(step, self.steps()))

    def called(self) -> bool:
        self._compare()
        return self.template is None or self.forecasts()

    def ask(
        self,
        place: CallSite,
        denoiser: CompiledDenoiser,
        inputs: Mapping[str, Any],
        times: Times = (),
    ) -> AnyStep:
        return widened(self._step(place, denoiser, inputs, times), denoiser, self.quality.wide)

    def _step(
        self, place: CallSite, denoiser: CompiledDenoiser, inputs: Mapping[str, Any], times: Times
    ) -> AnyStep:
        if own := handed_on(inputs):
            self.notes[f"{place.name}: a {own} is handed on between its calls; it runs dense"] += 1
            return DenseStep(inputs)
        mask = self._mask_of(place.name, denoiser, inputs)
        if mask is None:
            self.notes[f"{place.name}: its sites aren't found on the picture; it runs dense"] += 1
        if mask is None or self._in_full(place.step):
            return DenseStep(inputs)
        if self.template is not None:
            edit = self._edit(place, denoiser, inputs, mask)
            if edit is not None:
                return edit
            recorded = (place.name, place.step, self._recorded(place))
            if self.insists and recorded in self.library.slots(self.template.name):
                raise TemplateIncomplete(f"{place.name}: a recorded step is gone")
            self.notes[f"{place.name}: no recording of a step; it goes by its own steps"] += 1
        session = self._sessions.get(place.name)
        if session is None or session.mask.shape != mask.shape:
            session = self._sessions[place.name] = EditSession(mask, self.quality.cold())
        self._asked[place] = session
        return session.ask(place.step, place.branch, inputs, times or None)

    def upcoming(
        self, place: CallSite, denoiser: CompiledDenoiser, now: EditStep
    ) -> EditStep | None:
        if self.template is None or place in self._asked:
            return None
        following = self.quality.selection.following(place.step, self.steps())
        if following is None or self._in_full(following):
            return None
        after = replace(place, step=following)
        if not self.library.in_memory(self.template.name, after.step, after.name):
            return None  # to read it now would hold up the step
        edit = self._edit(after, denoiser, now.inputs, now.mask)
        if edit is None:
            return None
        self._fetched[after] = edit.cache
        return replace(edit, plan=now.plan, wide=now.wide)

    def _edit(
        self, place: CallSite, denoiser: CompiledDenoiser, inputs: Mapping[str, Any], mask: Tensor
    ) -> EditStep | None:
        """An edit of the template's recording, if there is one of this step."""
        assert self.template is not None, "an edit by its own steps has no template"
        part = self.library.of(place.name, denoiser, tuple(mask.shape), self._start)
        cache = self._fetched.pop(place, None)
        if cache is None or cache.sizes.get("batch") != batch_of(inputs):  # guidance ended
            if place.name not in self._weights:
                self._weights[place.name] = denoiser.fingerprint()
            weights = self._weights[place.name]
            found = part.get(self.template.name, place.step, self._recorded(place), weights)
            if found is None:
                return None
            cache = of_batch(of_source(found, self.template), batch_of(inputs))
        return EditStep(inputs, mask, cache, any_step=not part.wants(place.step))

    def unfit(self, place: CallSite, why: CacheError) -> TemplateIncomplete | None:
        """The template is recorded again, once: one that still doesn't fit is no accident."""
        self.in_full = True
        if not self.insists or self.template is None or place in self._asked:
            return None
        if self.template.name in self.library.renewed:
            return None
        self.library.renewed[self.template.name] = str(why)
        return TemplateIncomplete(f"{place.name}: a recorded step doesn't fit: {why}")

    def take(self, place: CallSite, result: Any) -> Any:
        session = self._asked.pop(place, None)
        return result if session is None else session.take(place.step, place.branch, result)

    def stepped(self, step: int, latents: Tensor) -> Tensor:
        if self.template is None:
            return latents
        self._compare()
        kept = self.library.after(self.template.name, step)
        if self.insists and not kept and step in self._steps_recorded():
            raise TemplateIncomplete("the latents of a recorded step are gone")
        return self._outside(latents, kept[0] if kept else None)

    def _compare(self) -> None:
        """Was the template recorded in the steps that this run makes?"""
        if self._compared or self.template is None:
            return
        self._compared = True
        own, recorded = self.schedule(), self.library.schedule(self.template.name)
        if own is not None and recorded is not None:
            difference = recorded.difference(own)
            if difference is not None:
                raise ScheduleMismatch(difference)

    def _check_pictures(self, template: TemplateSource, own: int, recorded: int) -> None:
        """Is it known which of the pictures of a template that was handed in is which of ours?"""
        if not self.given or template.count > 1 or recorded in (1, own):
            return
        if self.row > 1 or own % recorded:
            raise InputError(
                f"template={template.name!r} is of {recorded} pictures, this call makes "
                f"{own}; edit all of them in one call, or say which one it is: image= one of the "
                "recorded pictures"
            )

    def _steps_recorded(self) -> set[int]:
        assert self.template is not None, "only a template was recorded"
        return {step for _, step, _ in self.library.slots(self.template.name)}

    def _in_full(self, step: int) -> bool:
        return step < self.quality.first or self._ends(step)

    def _ends(self, step: int) -> bool:
        """Is it one of the last, which are computed in full?"""
        if not self.quality.last:
            return False
        count = self.steps()
        if count is None and self.template is not None:
            count = 1 + max(self._steps_recorded(), default=-1)
        if count is None:
            self.notes[f"last={self.quality.last}: the number of steps isn't known; ignored"] += 1
            return False
        return step >= count - self.quality.last

    def _recorded(self, place: CallSite) -> str:
        """The branch of the template that serves this one.

        Of samples in a list each recorded one serves as many, side by side.
        """
        branch, _, sample = place.branch.partition(".")
        if not sample or self.template is None:
            return place.branch
        index, count = map(int, sample.split("/"))
        for name, step, other in self.library.slots(self.template.name):
            call, _, kept = other.partition(".")
            if (name, step, call) == (place.name, place.step, branch) and kept:
                of = int(kept.split("/")[1])
                own = self.template.elements(of)
                return sample_branch(branch, own[index * len(own) // count], of)
        return place.branch

    def _outside(self, own: Tensor, kept: Tensor | None) -> Tensor:
        """Own values where masked, the template's elsewhere."""
        if kept is None or kept.dim() != own.dim() or kept.shape[1:] != own.shape[1:]:
            return own
        sites = self._sites.of_latents(own) if self._sites is not None else None
        if sites is None:
            return own
        assert self.template is not None, "kept latents are a template's"
        self._check_pictures(self.template, len(own), len(kept))
        elements = self.template.elements(len(kept))
        index = [elements[i * len(elements) // len(own)] for i in range(len(own))]
        if index != list(range(len(kept))):
            kept = torch.stack([kept[i] for i in index])
        return torch.where(sites, own, moved(kept, own.device).to(own.dtype))

    def _mask_of(
        self, name: str, denoiser: CompiledDenoiser, inputs: Mapping[str, Any]
    ) -> Tensor | None:
        """The mask of this call's sites; None if they aren't known."""
        picture = picture_of(inputs)
        key = (name, None if picture is None else picture.shape[1:])
        if key not in self._masks:
            if self._sites is None:  # the pipeline prepared nothing that we could see
                self._sites = MaskGrids(self.mask, self.quality.margin)
            shape = shape_of(denoiser, inputs)
            self._masks[key] = None if shape is None else self._sites.of_input(shape, picture)
        return self._masks[key]


def widened(step: AnyStep, denoiser: CompiledDenoiser, count: int) -> AnyStep:
    """An edit whose first stretches of blocks compute everything."""
    if not count or not isinstance(step, EditStep):
        return step
    if not denoiser.settings.stretches:
        raise InputError(
            f"Quality.wide={count}, but the pipeline was compiled without stretches; "
            "compile(pipe, stretches=True), or wide=0"
        )
    whole = torch.ones_like(step.mask)
    return replace(
        step, wide=dict.fromkeys(range(1, 1 + min(count, len(denoiser.stretches))), whole)
    )
