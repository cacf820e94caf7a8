"""A mask for a pipeline's own argument: in a form that it accepts, and as many as it can use."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from maskfx.errors import MaskError
from maskfx.pipelines.masks.masks import in_floats

COLOURS = (3, 4)  # channels, with alpha or without
TIMES = ("num_images_per_prompt", "num_images")


def accepted_mask(given: object, name: str, arguments: Mapping[str, object]) -> object:
    """Return a mask of floats without channels; raise MaskError if there are too many of them.

    Args:
        given: what the caller passed.
        name: of the argument.
        arguments: all arguments of the call, by name.
    """
    others = [value for key, value in arguments.items() if key != name]
    lengths = {1, *map(length_of, others)}
    times = max(n for key in TIMES if isinstance(n := arguments.get(key, 1) or 1, int))
    mask = without_colours(in_floats(given), lengths)
    count = length_of(mask)
    if count and all(length * times % count for length in lengths):
        raise MaskError(
            f"{name}: expected one mask, or one for each picture or prompt, got {count} for "
            f"{max(1, length_of(arguments.get('image')))} picture(s); an array of colours is "
            "(height, width, 3), a tensor of several masks (count, 1, height, width)"
        )
    return mask


def without_colours(given: object, lengths: set[int]) -> object:
    """Return a mask with one number for each pixel, the largest of its colours.

    Pipelines take colours for several masks. A tensor of (3, height, width) is several masks where
    the call is for as many pictures.
    """
    if isinstance(given, (list, tuple)):
        return [without_colours(one, lengths) for one in given]
    if isinstance(given, np.ndarray) and given.ndim in (3, 4) and given.shape[-1] in COLOURS:
        return given[..., :3].max(-1, keepdims=given.ndim == 4)
    if not isinstance(given, Tensor) or given.dim() not in (3, 4) or given.shape[-3] not in COLOURS:
        return given
    several = given.dim() == 3 and given.shape[0] in lengths
    return given if several else given[..., :3, :, :].amax(-3, keepdim=True)


def length_of(value: object) -> int:
    """Return how many samples an argument holds; 1 for what is no list, array or tensor."""
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim == 4 or value.ndim == 3 and value.shape[-1] != 1 else 1
    if isinstance(value, Tensor):
        return len(value) if value.dim() > 2 else 1
    return len(value) if isinstance(value, (list, tuple)) else 1
