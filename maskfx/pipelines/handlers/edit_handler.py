"""EditHandler: executes the calls of an edit, from a template or from earlier steps of its run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from maskfx.errors import CacheError, InputError
from maskfx.ir.objects import open_objects
from maskfx.pipelines.call_policy import CallKind, CallPosition, EditPolicy
from maskfx.pipelines.handlers.autoencoder import edit_of
from maskfx.pipelines.handlers.call_handler import CallPart
from maskfx.pipelines.handlers.latent_blend import LatentBlend
from maskfx.pipelines.handlers.patch_handler import PatchSessions
from maskfx.pipelines.handlers.template_reader import TemplateReader
from maskfx.pipelines.masks.mask_grids import MaskGrids, picture_part
from maskfx.pipelines.masks.masks import Box, frame_mask
from maskfx.pipelines.masks.videos import VideoMask
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.schedules.schedule import Schedule
from maskfx.pipelines.templates.batches import mask_shape_of, picture_of, repeats_each
from maskfx.pipelines.templates.template_library import TemplateIncomplete
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.reuse.patches import PatchDecision
from maskfx.runtime.reuse.session import EditSession
from maskfx.runtime.reuse.step_selection import StepSelection
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep


@dataclass
class EditHandler:
    """Computes masked sites only.

    Args:
        mask: The mask in pixels.
        quality: Quality of the edit.
        template: Reader of the template; None reuses earlier steps of the run only.
        notes: Receives the calls that are computed in full, for `explain()`.
        row: Number of images that the caller passes; 1 after `prepare` if the pipeline repeats
            them one by one (a a b b) and not as a row (a b a b).
        passed: Whether the caller passed the template, for any images that this call makes.
        patches: Reuses patches across steps in calls without a recording of the template.
        video: Where latents have frames, and the masks of these.
    """

    splits: ClassVar[bool] = True
    records: ClassVar[bool] = False
    title: ClassVar[str | None] = None
    mask: Tensor
    quality: Quality
    template: TemplateReader | None = None
    notes: Counter[str] = field(default_factory=Counter)
    row: int = 1
    passed: bool = False
    patches: PatchSessions | None = None
    video: VideoMask = field(default_factory=VideoMask)
    in_full: bool = False  # a call that has a recording was computed without it
    _grids: MaskGrids | None = None  # None until latents or inputs are known
    _prepared: int = 0  # initial latents so far; videos are made in chunks, each from its own
    _sessions: dict[str, EditSession] = field(default_factory=dict)
    _acting: dict[str, Updates] = field(default_factory=dict)  # of each session
    _asked: dict[CallPosition, EditSession] = field(default_factory=dict)
    _masks: dict[tuple[str, torch.Size | None], Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recorded = None if self.template is None else self.template.steps
        masks = self.mask if self.video.frames is None else self.video.frames
        self._all = bool(masks.all())  # of each frame
        self.policy = EditPolicy(self.quality, recorded, self._all)

    @property
    def selection(self) -> StepSelection:
        return self.policy.selection

    @property
    def forecast(self) -> str:
        # weights of whole pictures are worse than extrapolation for a part of a given one
        part = self.template is None and not self.policy.whole
        return "output" if part and self.quality.forecast == "auto" else self.quality.forecast

    @property
    def blends(self) -> bool:
        return self.template is not None and not self._all

    @property
    def reads_times(self) -> bool:
        return self.template is None or self.selection.skips or self.patches is not None

    def begin(self, schedule: Callable[[], Schedule]) -> None:
        if self.template is not None:
            self.template.check_schedule(schedule())

    # Latents.

    def prepare(
        self, outputs: Sequence[object], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]:
        left, top, right, bottom = box or (0, 0, *self.mask.shape[::-1])
        size = int(height or bottom - top), int(width or right - left)
        video = self.video
        if video.frames is not None:
            video = replace(video, frames=framed(video.frames, box, size))
        mask = frame_mask(self.mask, box, size)
        part = picture_part(outputs)
        grids = MaskGrids(mask, self.quality.margin, first_tensor(outputs), video, part)
        if repeats_each(outputs, self.row):
            self.row = 1
        self._grids = grids
        if self.template is None or grids.latents is None:
            return outputs
        recorded = iter(self.template.initial_latents()[self._prepared :])
        self._prepared += sum(isinstance(value, Tensor) for value in outputs)
        blended = [
            self._blend(v, next(recorded, None)) if isinstance(v, Tensor) else v for v in outputs
        ]
        self._grids = replace(grids, latents=first_tensor(blended))
        return blended

    def after_step(self, step: int, latents: Tensor) -> Tensor:
        if self.template is None:
            return latents
        return self._blend(latents, self.template.latents_after(step))

    def _blend(self, own: Tensor, recorded: Tensor | None) -> Tensor:
        """Return latents with the template's outside the mask, as far as the mask is known."""
        if self.template is None or self._grids is None:
            return own
        blend = LatentBlend(self._grids, self.template.source, self.passed, self.row > 1)
        return blend.apply(own, recorded)

    # Calls.

    @property
    def codes(self) -> bool:
        return self.template is not None and self.quality.codes

    def code(self, part: CallPart) -> AnyStep | None:
        cache = None if self.template is None else self.template.coded(part)
        return None if cache is None else edit_of(cache, part.inputs)

    def choose(self, part: CallPart) -> AnyStep | PatchDecision:
        step = self._choose(part)
        if isinstance(step, PatchDecision):
            return step
        if self.patches is not None and self.patches.has_asked(part.position):
            return step
        return with_stretches(step, part.denoiser, self.quality.wide)

    def _choose(self, part: CallPart) -> AnyStep | PatchDecision:
        name = part.position.name
        if kind := open_objects(part.inputs):
            self.notes[f"{name}: a {kind} is handed on between its calls; it runs dense"] += 1
            return DenseStep(part.inputs)
        if self.policy.ignores_last(part.steps):
            last = self.quality.last
            self.notes[f"last={last}: the number of steps isn't known; ignored"] += 1
        if self.policy.kind(part.position.step, part.steps) is CallKind.DENSE:
            return DenseStep(part.inputs)  # a denoiser that computes all isn't captured
        mask = self._mask_of(part)
        if mask is None:
            self.notes[f"{name}: its sites aren't found on the picture; it runs dense"] += 1
            return DenseStep(part.inputs)
        if self.template is not None:
            edit = self.template.edit(part, mask)
            if edit is not None:
                return self._with_patches(part, edit)
            self.notes[f"{name}: no recording of a step; it goes by its own steps"] += 1
        return self._from_session(part, mask)

    def _with_patches(self, part: CallPart, edit: EditStep) -> AnyStep | PatchDecision:
        """Return the edit, or one that keeps patches of the mask from the run's last step."""
        if self.patches is None or self.quality.wide or not edit.mask.any() or edit.mask.all():
            return edit
        return self.patches.ask_template(part, edit, self._grids) or edit

    def _from_session(self, part: CallPart, mask: Tensor) -> AnyStep | PatchDecision:
        """Return a step that is recorded, or an edit of an earlier step of the run."""
        if self.patches is not None and part.denoiser.settings.stretches:
            return self.patches.ask(part, tuple(mask.shape), self._grids, mask)
        name, step, branch = part.position
        if mask_shape_of(part.denoiser, part.inputs) is None:  # a text of one branch lacks samples
            self.notes[f"{name}: its arguments disagree in sizes; it runs dense"] += 1
            return DenseStep(part.inputs)
        session = self._sessions.get(name)
        other = self._acting.setdefault(name, part.adapters) != part.adapters
        if session is None or session.mask.shape != mask.shape or other:
            self._acting[name] = part.adapters  # earlier steps are those of other adapters
            policy = self.quality.policy_without_template()
            session = self._sessions[name] = EditSession(mask, policy)
        self._asked[part.position] = session
        return session.ask(step, branch, part.inputs, part.times or None)

    def upcoming(self, part: CallPart, now: EditStep) -> EditStep | None:
        if self.template is None or part.position in self._asked:
            return None
        if self.patches is not None and self.patches.has_asked(part.position):
            return None
        step = self.policy.following(part.position.step, part.steps)
        return None if step is None else self.template.upcoming(part, step, now)

    def unfit(self, position: CallPosition, why: CacheError) -> TemplateIncomplete | None:
        self.in_full = True
        if self.patches is not None and self.patches.has_asked(position):
            self.patches.fail(position)
            return None
        if self.template is None or position in self._asked:
            return None
        return self.template.unfit(position, why)

    def take(self, position: CallPosition, result: object) -> object:
        if self.patches is not None and self.patches.has_asked(position):
            return self.patches.take(position, result)
        session = self._asked.pop(position, None)
        return result if session is None else session.take(position.step, position.branch, result)

    def _mask_of(self, part: CallPart) -> Tensor | None:
        """Return the mask of this call's sites; None if they aren't known."""
        picture = picture_of(part.inputs)
        key = part.position.name, None if picture is None else picture.shape[1:]
        if key not in self._masks:
            if self._grids is None:  # no `prepare_latents` of the pipeline was observed
                self._grids = MaskGrids(self.mask, self.quality.margin, video=self.video)
            flat = self._grids.flat  # then the denoiser isn't even captured
            shape = None if flat else mask_shape_of(part.denoiser, part.inputs)
            self._masks[key] = None if shape is None else self._grids.of_input(shape, picture)
        return self._masks[key]


@dataclass
class InterruptedHandler(EditHandler):
    """Interrupts the edit before its first step, because the caller interrupted its recording.

    When a pipeline's call begins, it forgets that it was interrupted.
    """

    pipe: Any = None

    def prepare(
        self, outputs: Sequence[object], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[object]:
        self.pipe._interrupt = True
        return EditHandler.prepare(self, outputs, height, width, box)


def framed(masks: Tensor, box: Box | None, size: tuple[int, int]) -> Tensor:
    return torch.stack([frame_mask(mask, box, size) for mask in masks])


def first_tensor(values: Sequence[object]) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)


def with_stretches(step: AnyStep, denoiser: CompiledDenoiser, count: int) -> AnyStep:
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
