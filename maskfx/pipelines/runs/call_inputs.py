"""Keys of a denoiser call's inputs: their shapes, and the constants among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.ir.objects import new_objects
from maskfx.pipelines.deferred import Deferred
from maskfx.runtime.reuse.session import is_time

Sizes = tuple[tuple[int, ...], ...]
ShapeKey = tuple[str, tuple[object, ...]]  # structure and shapes of a call's inputs
Constants = tuple[tuple[str, object], ...]  # arguments that are no tensors


def shape_key(inputs: Mapping[str, object]) -> ShapeKey:
    """Return a key; calls with equal keys have results of equal shapes."""
    leaves, spec = pytree.tree_flatten(dict(inputs))
    return str(spec), tuple(
        (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v if v is None else repr(v)
        for v in leaves
        if not isinstance(v, float)
    )


def constants_of(inputs: Mapping[str, object]) -> Constants:
    """Return the numbers, switches and names among a call's arguments, except for timesteps."""
    leaves, _ = pytree.tree_flatten_with_path(
        {name: value for name, value in inputs.items() if not is_time(name, value)}
    )
    plain = (bool, int, float, str, type(None))
    return tuple((pytree.keystr(path), v) for path, v in leaves if isinstance(v, plain))


def shapes_of(inputs: Mapping[str, object]) -> Sizes:
    leaves = pytree.tree_leaves(dict(inputs))
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))


def device_of(inputs: Mapping[str, object]) -> torch.device:
    return next(v.device for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor))


def on_meta(value: object) -> object:
    return value.detach().to("meta") if isinstance(value, Tensor) else value


def wants_gradients(inputs: Mapping[str, object]) -> bool:
    """Return True if a call's result is to be differentiated by a tensor among its arguments."""
    return torch.is_grad_enabled() and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(dict(inputs))
    )


def own_inputs(inputs: Mapping[str, object]) -> dict[str, object]:
    """Return the inputs of a call that runs later: the pipeline may change its own before that.

    The latents are copied; objects are other ones with the same tensors.
    """
    leaves, spec = pytree.tree_flatten(dict(inputs))
    with new_objects():
        own: dict[str, Any] = pytree.tree_unflatten(leaves, spec)
    name = next((n for n, v in own.items() if isinstance(v, Tensor) and v.dim() >= 3), None)
    if name is not None and not isinstance(own[name], Deferred):
        own[name] = own[name].clone()
    return own
