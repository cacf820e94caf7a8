"""Calls of networks whose results are scaled by 0, as those of a ControlNet that isn't used.

The first such call is computed. If its result is zero in all numbers, later ones aren't computed:
they get zeros, so that requests with and without the network share steps of the denoiser.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.pipelines.runs.call_inputs import ShapeKey

SCALE = "conditioning_scale"  # the argument of diffusers' networks beside a denoiser
Key = tuple[str, ShapeKey]  # a network, and the shapes of its call


def silent_key(key: Key, inputs: Mapping[str, object]) -> Key | None:
    """Return under which key the zeros of a call are known; None unless its scale is 0."""
    scale = inputs.get(SCALE)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or scale != 0:
        return None
    return f"{key[0]} at 0", key[1]


def zeros_of(shapes: object, device: torch.device) -> object:
    """Return zeros of these shapes."""
    return pytree.tree_map(
        lambda v: torch.zeros(v.shape, dtype=v.dtype, device=device) if is_tensor(v) else v, shapes
    )


def is_zero(result: object) -> bool:
    """Return True if a result has tensors, and all numbers in them are zero."""
    found = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
    return bool(found) and not any(bool(value.any()) for value in found)


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
