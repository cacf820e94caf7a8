"""What a step computes, as numbers: its kind, how many sites, and their work at all levels."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.ir.geometry.level_shares import LevelShare, MaskWork, work_of
from maskfx.pipelines.templates.batches import batch_of, picture_of
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.step_kinds import StepKind
from maskfx.runtime.steps import AnyStep, EditStep, RecordStep


def kind_of(step: AnyStep) -> StepKind:
    """Return what a step computes, for predictions of its costs."""
    if isinstance(step, EditStep):
        return StepKind.REUSE if step.record else StepKind.EDIT
    return StepKind.RECORD if isinstance(step, RecordStep) else StepKind.DENSE


def sites_of(step: AnyStep, active: Callable[[Tensor], int]) -> tuple[int, int]:
    """Return the number of sites that a step computes, and of all its sites, over all samples.

    `active` counts the sites of a mask. Where stretches choose theirs while the step runs, it is at
    most what is returned before. All sites are counted from the inputs' shapes, so that
    nothing is captured just to count them.
    """
    batch = batch_of(step.inputs)
    if isinstance(step, EditStep):
        counts = list(map(active, computed_masks(step)))
        return batch * round(sum(counts) / len(counts)), batch * step.mask.numel()
    picture = picture_of(step.inputs)
    if picture is None:  # a list of one sample
        leaves = pytree.tree_leaves(dict(step.inputs))
        picture = next((v for v in leaves if isinstance(v, Tensor) and v.dim() >= 3), None)
    if picture is None:
        return 0, 0
    whole = batch * (picture.shape[1] if picture.dim() == 3 else prod(picture.shape[-2:]))
    return whole, whole


def computed_masks(step: EditStep) -> list[Tensor]:
    """Return the sites that an edit computes, by stretch where stretches have patches of their own.

    Their mean is what it computes.
    """
    found = list(step.wide.values()) if step.record else []
    if step.choice is not None:
        found = [mask.sites for mask in step.choice.chosen]
    return found or [step.mask]


def mask_work(
    step: AnyStep, shares: tuple[LevelShare, ...], masks: Callable[[Tensor], Mask]
) -> MaskWork | None:
    """Return what a step's sites take at all levels, over all samples; None if it isn't known."""
    if not shares:
        return None
    batch = batch_of(step.inputs)
    if isinstance(step, EditStep):
        works = [known_work(shares, masks(mask)) for mask in computed_masks(step)]
    else:
        picture = picture_of(step.inputs)
        if picture is None or picture.dim() < 4:
            return None
        works = [whole_work(shares, *picture.shape[-2:])]
    sites, pairs = (batch * sum(each) / len(works) for each in zip(*works, strict=True))
    return MaskWork(sites, pairs)


@lru_cache(maxsize=256)
def known_work(shares: tuple[LevelShare, ...], mask: Mask) -> MaskWork:
    return work_of(shares, mask.sites.numpy())


@lru_cache(maxsize=64)
def whole_work(shares: tuple[LevelShare, ...], height: int, width: int) -> MaskWork:
    return work_of(shares, np.ones((height, width), np.bool_))
