"""PatchHandler: computes the patches of a run that changed, without a mask.

`PatchSessions` holds the sessions of a run, one per denoiser; edits without a template use it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from maskfx.errors import CacheError
from maskfx.ir.objects import open_objects
from maskfx.pipelines.call_policy import CallPosition
from maskfx.pipelines.handlers.call_handler import CallPart, DenseHandler
from maskfx.pipelines.masks.mask_grids import MaskGrids, picture_part
from maskfx.pipelines.masks.masks import Box
from maskfx.pipelines.model_folders import model_folders
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.templates.batches import mask_shape_of, picture_of
from maskfx.pipelines.templates.template_library import TemplateIncomplete
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.reuse.judges import AUTO, FILE
from maskfx.runtime.reuse.patch_calls import ObservedCall, PatchCounts
from maskfx.runtime.reuse.patch_session import PatchSession
from maskfx.runtime.reuse.patches import PatchDecision, PatchReuse
from maskfx.runtime.reuse.step_selection import StepSelection
from maskfx.runtime.sites.patches import PatchGrid
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep


@dataclass
class PatchSessions:
    """The sessions of one run, by denoiser.

    Args:
        settings: How patches are chosen.
        pool: Holds the rows of all requests.
        notes: Receives the calls that run in full, for `explain()`.
        counts: Sums the patches that are computed.
        refresh: With a mask, the number of calls from one full call to the next.
        observer: Receives the calls of each denoiser, for training of a judge.
    """

    settings: PatchReuse
    pool: RollingPool
    notes: Counter[str]
    counts: PatchCounts
    refresh: int = 4
    observer: Callable[[str, ObservedCall], None] | None = None
    _sessions: dict[str, PatchSession] = field(default_factory=dict)
    _asked: dict[CallPosition, PatchSession] = field(default_factory=dict)

    def ask(
        self, part: CallPart, shape: tuple[int, ...], grids: MaskGrids | None, mask: Tensor | None
    ) -> AnyStep | PatchDecision:
        """Return the step of a call whose sites have this shape, or what decides it."""
        _, step, branch = part.position
        session = self._session(part, shape, grids, mask)
        if session is None:
            return DenseStep(part.inputs)
        self._asked[part.position] = session
        return session.begin(step, branch, part.inputs, part.times or None, part.steps)

    def ask_template(
        self, part: CallPart, edit: EditStep, grids: MaskGrids | None
    ) -> AnyStep | PatchDecision | None:
        """Return the step of an edit of a template, or what decides it; None: it runs as it is."""
        _, step, branch = part.position
        session = self._session(part, tuple(edit.mask.shape), grids, edit.mask)
        if session is None:
            return None
        found = session.begin_template(step, branch, edit, part.times, part.steps)
        if found is not None:
            self._asked[part.position] = session
        return found

    def _session(
        self, part: CallPart, shape: tuple[int, ...], grids: MaskGrids | None, mask: Tensor | None
    ) -> PatchSession | None:
        """Return the session of a denoiser; None if its patches can't be reused."""
        name = part.position.name
        if not part.denoiser.settings.stretches:
            self.notes[
                f"{name}: it was compiled without stretches, so its patches aren't reused; "
                "compile(pipe, quality=...) with this quality, or stretches=True"
            ] += 1
            return None
        session = self._sessions.get(name)
        if session is None or session.grid.shape != tuple(shape):
            if session is not None:
                session.close()
            settings = self._settings(name, part.denoiser.module)
            session = self._sessions[name] = PatchSession(
                part.denoiser,
                self.pool,
                settings,
                grid_of_call(part, shape, grids, settings.side),
                mask,
                self.refresh,
                lambda text: self.notes.update([f"{name}: {text}"]),
                self.counts,
                None if self.observer is None else partial(self.observer, name),
            )
        return session

    def _settings(self, name: str, module: nn.Module) -> PatchReuse:
        """Return the settings with the judge of a denoiser's model, if they ask for it."""
        found = self.settings.in_folders(model_folders(module))
        if self.settings.judge == AUTO and found.judge is None:
            self.notes[
                f'{name}: judge="auto", but its model has no {FILE}, so the threshold decides; '
                "train one with: maskfx train-judge MODEL"
            ] += 1
        return found

    def grids(self) -> dict[str, PatchGrid]:
        """Return the patches of each denoiser."""
        return {name: session.grid for name, session in self._sessions.items()}

    def has_asked(self, position: CallPosition) -> bool:
        return position in self._asked

    def take(self, position: CallPosition, result: object) -> object:
        session = self._asked.pop(position)
        return session.take(position.step, position.branch, result)

    def fail(self, position: CallPosition) -> None:
        """Prepare for a result of a call that was computed in full after an error."""
        self._asked[position].fail(position.step, position.branch)

    def close(self) -> None:
        """Give the memory of the run back."""
        for session in self._sessions.values():
            session.close()


@dataclass
class PatchHandler(DenseHandler):
    """Computes the patches of each call that changed since they were computed."""

    splits = True
    reads_times = True
    quality: Quality
    patches: PatchSessions
    _grids: MaskGrids | None = None

    @property
    def selection(self) -> StepSelection:  # type: ignore[override]
        return self.quality.whole_selection

    @property
    def forecast(self) -> str:  # type: ignore[override]
        return self.quality.forecast

    def prepare(
        self, outputs: Sequence[object], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[object]:
        latents = next((value for value in outputs if isinstance(value, Tensor)), None)
        if height and width:
            self._grids = MaskGrids(torch.ones(int(height), int(width), dtype=torch.bool))
            self._grids.latents, self._grids.part = latents, picture_part(outputs)
        return outputs

    def choose(self, part: CallPart) -> AnyStep | PatchDecision:  # type: ignore[override]
        name = part.position.name
        if kind := open_objects(part.inputs):
            self.patches.notes[
                f"{name}: a {kind} is handed on between its calls; it runs dense"
            ] += 1
            return DenseStep(part.inputs)
        shape = mask_shape_of(part.denoiser, part.inputs)
        if shape is None:
            self.patches.notes[f"{name}: its sites aren't known; it runs dense"] += 1
            return DenseStep(part.inputs)
        return self.patches.ask(part, shape, self._grids, None)

    def take(self, position: CallPosition, result: object) -> object:
        return self.patches.take(position, result) if self.patches.has_asked(position) else result

    def unfit(self, position: CallPosition, why: CacheError) -> TemplateIncomplete | None:
        if self.patches.has_asked(position):
            self.patches.fail(position)
        return None

    def close(self) -> None:
        self.patches.close()


def grid_of_call(
    part: CallPart, shape: Sequence[int], grids: MaskGrids | None, side: int
) -> PatchGrid:
    """Return the patches of a call; squares where the grid of its sites is known."""
    layout = None
    if len(shape) == 1 and grids is not None:
        layout = grids.layout(shape, picture_of(part.inputs))
    if layout is None:
        return PatchGrid(tuple(shape), side)
    return PatchGrid(tuple(shape), side, *layout)
