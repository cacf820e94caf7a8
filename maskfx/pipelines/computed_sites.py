"""What a step computes, as numbers: its kind, and how many sites."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.pipelines.batches import batch_of, picture_of
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
        counts = [active(mask) for mask in step.wide.values()] if step.record else []
        if step.choice is not None:
            counts = [mask.count for mask in step.choice.chosen]
        if counts:  # stretches compute patches of their own: their mean
            return batch * round(sum(counts) / len(counts)), batch * step.mask.numel()
        return batch * active(step.mask), batch * step.mask.numel()
    picture = picture_of(step.inputs)
    if picture is None:  # a list of one sample
        leaves = pytree.tree_leaves(dict(step.inputs))
        picture = next((v for v in leaves if isinstance(v, Tensor) and v.dim() >= 3), None)
    if picture is None:
        return 0, 0
    whole = batch * (picture.shape[1] if picture.dim() == 3 else prod(picture.shape[-2:]))
    return whole, whole
