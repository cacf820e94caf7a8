"""Hooks that other packages put on parts of a module: accelerate's, and those of diffusers.

diffusers' layerwise casting stores the weights of a part in a narrow type and widens them while the
part runs. That is part of what the module computes. Other hooks act in the middle of a forward, so
the module must run as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

ACCELERATE, DIFFUSERS = "_hf_hook", "_diffusers_hook"  # attributes of a part with hooks
# the module and class of hooks that cast; imported wherever such hooks exist
CASTING, CASTING_HOOK = "diffusers.hooks.layerwise_casting", "LayerwiseCastingHook"


def hooks_of(part: nn.Module) -> Mapping[str, object]:
    """Return diffusers' hooks of a part, by name."""
    hooks: Mapping[str, object] = getattr(vars(part).get(DIFFUSERS), "hooks", {})
    return hooks


def only_casts(part: nn.Module) -> bool:
    """Return True for a part whose hooks do no more than widen its weights."""
    kind = getattr(sys.modules.get(CASTING), CASTING_HOOK, ())
    return all(isinstance(hook, kind) for hook in hooks_of(part).values())


def widened_type(part: nn.Module) -> torch.dtype | None:
    """Return the type that a part's weights have while it runs; None if they are stored in it."""
    if DIFFUSERS not in vars(part) or not only_casts(part):
        return None
    kinds = [getattr(hook, "compute_dtype", None) for hook in hooks_of(part).values()]
    return next((kind for kind in kinds if isinstance(kind, torch.dtype)), None)


def acts(part: nn.Module) -> bool:
    """Return True if a hook acts on a part in the middle of a forward."""
    return ACCELERATE in vars(part) or DIFFUSERS in vars(part) and not only_casts(part)


def acts_within(module: nn.Module) -> bool:
    """Return True if hooks act on parts of a module, its own aside."""
    return any(acts(part) for part in module.modules() if part is not module)


def run_widened(part: Any, kind: torch.dtype, *args: object, **kwargs: object) -> object:
    """Run a part with its floating-point weights, and those inside it, in another type."""
    wide = [(vars(layer), widened(layer, kind)) for layer in part.modules()]
    for own, values in wide:
        own.update(values)  # found before parameters and buffers of the same name
    try:
        return type(part).forward(part, *args, **kwargs)
    finally:
        for own, values in wide:
            for name in values:
                own.pop(name, None)


def widened(layer: nn.Module, kind: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a layer's own floating-point parameters and buffers in another type, by name."""
    held = {name: getattr(layer, name) for name in (*layer._parameters, *layer._buffers)}
    plain = {n: v for n, v in held.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return {name: value.to(kind) for name, value in plain.items()}
