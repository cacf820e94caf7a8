"""Batches: what a call is told of the picture, and the recorded elements that serve its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from maskfx.errors import InputError
from maskfx.pipelines.template_library import TemplateSource
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.denoiser import CompiledDenoiser


def shape_of(denoiser: CompiledDenoiser, inputs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a mask for this call; None if it has no sites, or can't be read."""
    try:
        shape = denoiser.mask_shape(inputs)
    except InputError:  # the module itself may do with such arguments
        return None
    return shape if prod(shape) else None


def picture_of(inputs: Mapping[str, Any]) -> Tensor | None:
    """What a denoiser is told of the picture, by convention its first tensor."""
    for value in inputs.values():
        if isinstance(value, Tensor) and value.dim() >= 3:
            return value
    return None


def repeats_each(outputs: Sequence[Any], pictures: int) -> bool:
    """Does a pipeline lay the latents of so many pictures as a a b b, where most do a b a b?"""
    for value in outputs:
        if pictures < 2 or not isinstance(value, Tensor) or value.dim() < 3:
            continue
        times, rest = divmod(len(value), pictures)
        if times < 2 or rest or torch.equal(value, value[:1].expand_as(value)):
            continue
        if torch.equal(value, value[::times].repeat_interleave(times, 0)):
            return True
    return False


def batch_of(inputs: Mapping[str, Any]) -> int:
    """The batch of a call; lists of samples come one by one."""
    picture = picture_of(inputs)
    return 1 if picture is None else picture.shape[0]


def of_source(cache: StepCache, source: TemplateSource) -> StepCache:
    """The recording of one picture of several."""
    kept = cache.sizes.get("batch", 1)
    return cache if source.count == 1 else cache.of_elements(source.elements(kept))


def of_batch(cache: StepCache, batch: int) -> StepCache:
    """A recording for a call of another batch.

    Branches of guidance lie in order, each with all its pictures; without guidance the last, the
    conditional one, is left.
    """
    kept = cache.sizes.get("batch", batch)
    if kept == batch:
        return cache
    if batch < kept:
        return cache.of_elements(range(kept - batch, kept))
    return cache.of_elements([i * kept // batch for i in range(batch)])
