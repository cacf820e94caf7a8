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
CASTING = "diffusers.hooks.layerwise_casting"  # imported wherever such hooks exist
CASTING_HOOKS = ("LayerwiseCastingHook", "PeftInputAutocastDisableHook")


def hooks_of(part: nn.Module) -> Mapping[str, object]:
    """Return diffusers' hooks of a part, by name."""
    hooks: Mapping[str, object] = getattr(vars(part).get(DIFFUSERS), "hooks", {})
    return hooks


def only_casts(part: nn.Module) -> bool:
    """Return True for a part whose hooks do no more than widen its weights."""
    casting = sys.modules.get(CASTING)
    kinds = tuple(getattr(casting, name) for name in CASTING_HOOKS if hasattr(casting, name))
    return all(isinstance(hook, kinds) for hook in hooks_of(part).values())


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
    """Run a part with its floating-point weights in another type."""
    own: dict[str, Any] = vars(part)
    held = {name: getattr(part, name) for name in (*part._parameters, *part._buffers)}
    wide = {
        name: value.to(kind)
        for name, value in held.items()
        if value is not None and value.is_floating_point()
    }
    own.update(wide)  # found before parameters and buffers of the same name
    try:
        return type(part).forward(part, *args, **kwargs)
    finally:
        for name in wide:
            del own[name]
