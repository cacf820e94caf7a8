"""Modules that lie on the host until they run: brought to their device as their own hook does it.

diffusers' `enable_model_cpu_offload` gives each module one hook of accelerate's, which brings the
whole module before its forward and sends another one back. Hooks on parts of a module (sequential
and group offloading) act in the middle of its forward; such a module runs as a whole.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def whole_hook(module: nn.Module) -> Any:
    """The hook that brings all of a module to its device, if it has one."""
    hook = getattr(module, "_hf_hook", None)
    hooks = sys.modules.get("accelerate.hooks")  # where hooks are, it was imported
    return hook if hooks is not None and isinstance(hook, hooks.CpuOffload) else None


def bring(module: nn.Module) -> None:
    """Let a module's hook bring it to the device that it runs on."""
    hook = whole_hook(module)
    if hook is not None:
        hook.pre_forward(module)
