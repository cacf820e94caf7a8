"""Call policies: which step each denoiser call of a run becomes, and latents outside the mask."""

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
    """The position of a call in a run: denoiser name, scheduler step, branch within the step."""

    name: str
    step: int
    branch: str


def sample_branch(branch: str, index: int, count: int) -> str:
    """Return the branch name of one sample of a call that lists `count` samples."""
    return f"{branch}.{index}/{count}"


class CallPolicy(Protocol):
    """How a run handles its denoiser calls and its latents."""

    splits: ClassVar[bool]  # whether a call that lists samples becomes one step per sample
    records: ClassVar[bool]  # whether the run makes a template and not a requested image

    def prepared(
        self, outputs: Sequence[Any], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]: ...

    def forecasts(self, step: int | None = None) -> bool:
        """Return True if outputs of this step are forecast; without `step`, those of any step."""
        ...

    def called(self) -> bool:
        """Prepare for a call, on the request's thread; return True if it needs scheduler times.

        Reading values from a device blocks the host, so it is done here, not in a shared step.
        """
        ...

    def ask(
        self,
        place: CallSite,
        denoiser: CompiledDenoiser,
        inputs: Mapping[str, Any],
        times: Times = (),
    ) -> AnyStep:
        """Return the step for this call, made at these scheduler times."""
        ...

    def upcoming(
        self, place: CallSite, denoiser: CompiledDenoiser, now: EditStep
    ) -> EditStep | None:
        """Return the edit of this call's successor at the next computed step; None if unknown.

        Its rows can be prefetched while `now` computes.
        """
        ...

    def unfit(self, place: CallSite, why: CacheError) -> TemplateIncomplete | None:
        """Return the error that ends a run whose recording doesn't fit; None to compute in full."""
        ...

    def take(self, place: CallSite, result: Any) -> Any:
        """Return the call's output from the result of its step."""
        ...

    def stepped(self, step: int, latents: Tensor) -> Tensor: ...


class DensePolicy:
    """Run every call dense; calls are only batched."""

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
    """Run every call dense and record it as a template, which is complete after `finish`.

    Of steps that no edit with this selection computes, only the latents are stored.
    """

    splits: ClassVar[bool] = True
    records: ClassVar[bool] = True
    library: TemplateLibrary
    template: str
    selection: StepSelection = EVERY_STEP
    steps: Callable[[], int | None] = lambda: None  # number of steps of the run, once known
    schedule: Callable[[], Schedule | None] = lambda: None  # of the run, from its first call on
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
    """Compute masked sites only, reusing a template or earlier steps of the run.

    Outside the mask the latents are the template's at every step, so that the background is the one
    that was recorded, whatever the noise of this run. If `insists`, a missing template entry ends
    the run; otherwise the run falls back to its earlier steps, which gives another image.
    """

    splits: ClassVar[bool] = True
    records: ClassVar[bool] = False
    mask: Tensor  # in pixels
    quality: Quality
    library: TemplateLibrary
    template: TemplateSource | None
    steps: Callable[[], int | None] = lambda: None  # number of steps of the run, once known
    notes: Counter[str] = field(default_factory=Counter)  # calls that ran in full, for explain()
    insists: bool = False
    schedule: Callable[[], Schedule | None] = lambda: None  # of the run, from its first call on
    given: bool = False  # the caller passed the template, for any images that this call makes
    row: int = 1  # number of images that the pipeline repeats as a row (a b a b), not one by one
    in_full: bool = False  # a call that has a recording was computed without it
    _compared: bool = False  # whether the template's schedule was compared
    _sites: MaskGrids | None = None
    _start: list[Tensor] = field(default_factory=list)  # initial latents of the template
    _sessions: dict[str, EditSession] = field(default_factory=dict)
    _asked: dict[CallSite, EditSession] = field(default_factory=dict)
    _masks: dict[Any, Tensor | None] = field(default_factory=dict)
    _weights: dict[str, str] = field(default_factory=dict)  # constant during a run
    _fetched: dict[CallSite, StepCache] = field(default_factory=dict)  # for upcoming steps

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
            return None  # reading it from disk now would delay the step
        edit = self._edit(after, denoiser, now.inputs, now.mask)
        if edit is None:
            return None
        self._fetched[after] = edit.cache
        return replace(edit, plan=now.plan, wide=now.wide)

    def _edit(
        self, place: CallSite, denoiser: CompiledDenoiser, inputs: Mapping[str, Any], mask: Tensor
    ) -> EditStep | None:
        """Return an edit of the template's recording of this step; None if there is none."""
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
        """Have the template recorded again, once: a second mismatch is no accident."""
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
        """Raise ScheduleMismatch if the template was recorded with another schedule."""
        if self._compared or self.template is None:
            return
        self._compared = True
        own, recorded = self.schedule(), self.library.schedule(self.template.name)
        if own is not None and recorded is not None:
            difference = recorded.difference(own)
            if difference is not None:
                raise ScheduleMismatch(difference)

    def _check_pictures(self, template: TemplateSource, own: int, recorded: int) -> None:
        """Raise InputError if images of a passed template can't be assigned to this call's."""
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
        """Return True for one of the last steps, which are computed in full."""
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
        """Return the branch of the template that serves this one.

        If the call lists samples, each recorded sample serves an equal number of adjacent ones.
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
        """Return `own` where masked, and `kept`, the template's latents, elsewhere."""
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
        """Return the mask of this call's sites; None if they aren't known."""
        picture = picture_of(inputs)
        key = (name, None if picture is None else picture.shape[1:])
        if key not in self._masks:
            if self._sites is None:  # no `prepare_latents` of the pipeline was observed
                self._sites = MaskGrids(self.mask, self.quality.margin)
            shape = shape_of(denoiser, inputs)
            self._masks[key] = None if shape is None else self._sites.of_input(shape, picture)
        return self._masks[key]


def widened(step: AnyStep, denoiser: CompiledDenoiser, count: int) -> AnyStep:
    """Return an edit whose first `count` stretches (runs of blocks) compute all sites."""
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
