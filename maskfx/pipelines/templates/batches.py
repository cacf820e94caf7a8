"""Batches: the image input of a denoiser call, and the recorded elements that serve its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from maskfx.errors import CaptureError, InputError
from maskfx.pipelines.templates.template_library import TemplateSource
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.denoiser import CompiledDenoiser


def mask_shape_of(
    denoiser: CompiledDenoiser, inputs: Mapping[str, object]
) -> tuple[int, ...] | None:
    """Return the mask shape of this call; None if it has no sites or can't be determined."""
    try:
        shape = denoiser.mask_shape(inputs)
    except (InputError, CaptureError):  # the module itself may accept such arguments
        return None
    return shape if prod(shape) else None


def picture_of(inputs: Mapping[str, object]) -> Tensor | None:
    """Return a denoiser's image input: by convention its first tensor of at least 3 dimensions."""
    for value in inputs.values():
        if isinstance(value, Tensor) and value.dim() >= 3:
            return value
    return None


def repeats_each(outputs: Sequence[object], pictures: int) -> bool:
    """Return True if the latents of several images are laid out as a a b b; most use a b a b."""
    for value in outputs:
        if pictures < 2 or not isinstance(value, Tensor) or value.dim() < 3:
            continue
        times, rest = divmod(len(value), pictures)
        if times < 2 or rest or torch.equal(value, value[:1].expand_as(value)):
            continue
        if torch.equal(value, value[::times].repeat_interleave(times, 0)):
            return True
    return False


def batch_of(inputs: Mapping[str, object]) -> int:
    """Return the batch size of a call; 1 for a list of samples, which are passed one by one."""
    picture = picture_of(inputs)
    return 1 if picture is None else picture.shape[0]


def select_source(cache: StepCache, source: TemplateSource) -> StepCache:
    """Select the part of a recording that belongs to one image of several."""
    kept = cache.sizes.get("batch", 1)
    return cache if source.count == 1 else cache.of_elements(source.elements(kept))


def fit_batch(cache: StepCache, batch: int) -> StepCache:
    """Fit a recording to a call with another batch size.

    Guidance branches are stored in order, each with all its images; a call without guidance reads
    the last branch, the conditional one.
    """
    kept = cache.sizes.get("batch", batch)
    if kept == batch:
        return cache
    if batch < kept:
        return cache.of_elements(range(kept - batch, kept))
    return cache.of_elements([i * kept // batch for i in range(batch)])
