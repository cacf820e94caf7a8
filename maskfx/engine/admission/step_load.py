"""What a request's step computes, in numbers: before it runs, from shapes and masks, and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from maskfx.pipelines.handlers.edit_handler import EditHandler
from maskfx.pipelines.handlers.patch_handler import PatchHandler
from maskfx.pipelines.runs.computed_sites import sites_of
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.pipelines.templates.batches import batch_of
from maskfx.runtime.step_kinds import StepKind
from maskfx.runtime.steps import DenseStep
from maskfx.scheduling.rounds.round_policy import StepLoad


def load_of(calls: Sequence[DenoiserCall]) -> StepLoad:
    """Return what the calls of one request computed, of the network that is called last.

    A second one beside it has the same sites again.
    """
    own = [call for call in calls if call.name == calls[-1].name]
    whole = sum(call.whole for call in own)
    ahead = load_ahead(calls, sum(call.sites for call in own) / whole if whole else None)
    return replace(ahead, kind=calls[-1].kind)


def load_ahead(calls: Sequence[DenoiserCall], share: float | None) -> StepLoad:
    """Return what calls that wait will compute.

    Args:
        calls: The calls of one request's step.
        share: The share of sites that its last step computed; by default the share of the mask.
    """
    own = [call for call in calls if call.name == calls[-1].name]
    pictures = max(1, sum(batch_of(call.inputs) for call in own))
    total = sum(sites_of(DenseStep(call.inputs), call.run.active)[1] for call in own)
    whole = max(1, round(total / pictures))
    found = mask_share(calls[-1]) if share is None else share
    sites = max(1, round(found * whole))
    return StepLoad(sites, whole, pictures, kind_ahead(calls[-1]), calls[-1].step == 0)


def kind_ahead(call: DenoiserCall) -> StepKind:
    """Return what most steps of a call's run compute."""
    handler = call.run.handler
    if handler.records:
        return StepKind.RECORD
    if isinstance(handler, EditHandler):
        return StepKind.EDIT if handler.patches is None else StepKind.REUSE
    return StepKind.REUSE if isinstance(handler, PatchHandler) else StepKind.DENSE


def mask_share(call: DenoiserCall) -> float:
    """Return the share of pixels that a call's mask covers; 1 for calls without a mask."""
    handler = call.run.handler
    return float((handler.mask > 0).float().mean()) if isinstance(handler, EditHandler) else 1.0


def steps_left(call: DenoiserCall) -> tuple[int, int]:
    """Return the number of steps that are still computed, with the call's, and of the whole run.

    Where the run's steps aren't known, there is one more.
    """
    if call.steps is None:
        return 1, call.step + 1
    selection = call.run.selection
    left = max(1, selection.left(call.step, call.steps))
    return left, max(left, selection.left(0, call.steps))
