"""Offloaded modules: moves them to their device with an accelerate hook, and reads their numbers.

diffusers' `enable_model_cpu_offload` gives each module one hook of accelerate's, which moves the
whole module before its forward and sends another one back. So does `enable_auto_cpu_offload` of a
components manager, with a hook of its own. Hooks on parts of a module (sequential
and group offloading) act in the middle of its forward; such a module runs as a whole. Until then
its weights may be placeholders: of sequential offloading tensors without data, of groups on disk
memory that nothing was written to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from maskfx.runtime.hardware.devices import CPU

# modules and classes of hooks that move a whole module; imported wherever such hooks exist
WHOLE = (
    ("accelerate.hooks", "CpuOffload"),
    ("diffusers.modular_pipelines.components_manager", "CustomOffloadHook"),
)


class WholeHook(Protocol):
    """A hook that moves a whole module before its forward."""

    execution_device: int | str | torch.device | None

    def pre_forward(self, module: nn.Module) -> object: ...


def whole_hook(module: nn.Module) -> WholeHook | None:
    """Return the hook that moves the whole module to its device, or None."""
    hook = getattr(module, "_hf_hook", None)
    places = [(sys.modules.get(where), name) for where, name in WHOLE]
    kinds = tuple(getattr(place, name) for place, name in places if hasattr(place, name))
    return hook if isinstance(hook, kinds) else None


def bring(module: nn.Module) -> None:
    """Move a module to the device that it runs on, if it has such a hook.

    Weights on the CPU lie at "cpu". To a hook for "cpu:0", as diffusers makes it, that is another
    device, and it would move them in the middle of a capture; so it receives the weights' own.
    """
    hook = whole_hook(module)
    if hook is None:
        return
    hook.pre_forward(module)
    weight = next(module.parameters(), None)
    if weight is not None and weight.device == CPU and device_of(module).type == "cpu":
        hook.execution_device = CPU


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module computes on."""
    hook = whole_hook(module)
    if hook is not None and hook.execution_device is not None:
        return torch.device(hook.execution_device)
    weights = next(module.parameters(), None)
    return CPU if weights is None else weights.device


def is_offloaded(module: nn.Module) -> bool:
    """Return True if hooks move a module, or parts of it, while it runs."""
    return any(map(moves_weights, module.modules()))


def moves_weights(part: nn.Module) -> bool:
    """Return True for a part with a hook of accelerate's, or one of diffusers' for groups."""
    registry = getattr(vars(part).get("_diffusers_hook"), "hooks", {})
    return "_hf_hook" in vars(part) or any("offloading" in name for name in registry)


def numbers_elsewhere(module: nn.Module) -> dict[int, Callable[[], Tensor]]:
    """Return what reads the numbers of each placeholder among a module's weights, by its id."""
    parts = module.modules()
    return dict(chain.from_iterable((*kept_on_host(part), *kept_on_disk(part)) for part in parts))


def kept_on_host(part: nn.Module) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """Yield id and reader of weights that an accelerate hook keeps in a mapping by their names."""
    hook = vars(part).get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        kept: Any = getattr(one, "weights_map", None)
        if kept is None:
            continue
        within = bool(getattr(one, "place_submodules", False))
        for name, value in chain(part.named_parameters("", within), part.named_buffers("", within)):
            if value.is_meta:
                yield id(value), partial(kept.__getitem__, name)


def kept_on_disk(part: nn.Module) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """Yield id and reader of weights that diffusers' offloading of groups keeps in a file."""
    for hook in getattr(vars(part).get("_diffusers_hook"), "hooks", {}).values():
        group: Any = getattr(hook, "group", None)
        if getattr(group, "_is_offloaded_to_disk", False):
            for value, key in group.tensor_to_key.items():
                yield id(value), partial(read_tensor, group.safetensors_file_path, key)


def read_tensor(path: str, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        found: Tensor = file.get_tensor(key)
    return found
