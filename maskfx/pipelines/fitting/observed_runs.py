"""Runs of a compiled pipeline that compute everything and observe it, to train a judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from maskfx.errors import InputError
from maskfx.pipelines.compile import call_of
from maskfx.pipelines.handlers.patch_handler import PatchHandler, PatchSessions
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.state import PipelineState
from maskfx.runtime.reuse.judge_training import ObservedRun
from maskfx.runtime.reuse.judges import Bools, PatchFeatures
from maskfx.runtime.reuse.patch_calls import ObservedCall
from maskfx.runtime.reuse.patches import PatchReuse


@dataclass(frozen=True)
class Everything:
    """A judge that computes all patches and lets them be recorded."""

    keeps_nothing: bool = False

    def refusal(self, stretches: int) -> str:
        return ""

    def computes(self, features: PatchFeatures) -> Bools:
        return np.ones(features.change.shape, bool)


@dataclass
class Observer:
    """Collects the calls of a run by denoiser and branch."""

    calls: dict[str, dict[str, list[ObservedCall]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def __call__(self, name: str, call: ObservedCall) -> None:
        self.calls[name][call.branch].append(call)


def observed_run(
    pipe: Pipeline, arguments: Mapping[str, object], side: int
) -> dict[str, list[ObservedRun]]:
    """Run a compiled pipeline once; return what was observed, by denoiser.

    Args:
        pipe: The pipeline, compiled with a quality that reuses patches.
        arguments: A call of it; all sites are computed, whatever its mask.
        side: The sites along a patch's side.
    """
    settings = PatchReuse(first=0, last=0, side=side, judge=Everything())
    call = call_of(pipe, (), arguments, Quality(patches=settings, reuse="steps"))
    state: PipelineState = call.state
    observer = Observer()
    sessions = PatchSessions(settings, state.pool, state.notes, state.patches, observer=observer)
    try:
        call.run(PatchHandler(call.quality, sessions))
        grids = sessions.grids()
    finally:
        sessions.close()
    found = {
        name: [ObservedRun(grids[name], calls) for calls in branches.values()]
        for name, branches in observer.calls.items()
    }
    if not found:
        notes = "; ".join(state.notes) or "no denoiser was called"
        raise InputError(f"train-judge: no patch of {type(pipe).__name__} can be reused: {notes}")
    return found
