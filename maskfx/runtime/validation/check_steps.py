"""Checks which kinds of members a step has, before their arguments are read."""

from __future__ import annotations

from collections.abc import Sequence

from maskfx.config import Settings
from maskfx.errors import InputError, MissingRequest
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, RecordStep


def check_steps(steps: Sequence[AnyStep], settings: Settings, by_stretch: bool) -> None:
    """Check the kinds of a step's members; `by_stretch` if stretches may be chosen in a step."""
    if not steps:
        raise MissingRequest("step() got an empty list; pass at least one member")
    for i, step in enumerate(steps):
        if not isinstance(step, (EditStep, RecordStep, DenseStep)):
            raise InputError(
                f"step(): member {i} is a {type(step).__name__}; pass EditStep, RecordStep or "
                "DenseStep"
            )
        if isinstance(step, EditStep) and step.choice is not None and not by_stretch:
            raise InputError(
                f"EditStep.choice: member {i} chooses the sites of stretches, but this denoiser "
                "runs its graph as a whole (CompiledDenoiser.runs_by_stretch is False); give "
                "EditStep.wide, or compile with stretches=True and don't run exported graphs"
            )
    if settings.mode == "patch_batch" and not all(is_kept(s, settings) for s in steps):
        raise InputError(
            'mode="patch_batch" keeps no recordings: pass DenseStep or call batch(); compile with '
            'mode="mask_cache" to record and edit. With stretches=True it takes edits of the rows '
            "that a request keeps in a RollingPool, and the recordings that these begin with"
        )


def is_kept(step: AnyStep, settings: Settings) -> bool:
    """Return True if mode="patch_batch" runs a member: dense, or by rows of its own request."""
    rolls = isinstance(step, RecordStep) or (
        isinstance(step, EditStep) and isinstance(step.cache, RollingCache)
    )
    return isinstance(step, DenseStep) or (settings.stretches and rolls)
