"""Which modules can be sent to another process of this machine, over weights in shared memory."""

from __future__ import annotations

import logging
import pickle
import shutil

import torch
from torch import nn

from maskfx.ir.modules.callables import HOOKS
from maskfx.runtime.hardware.devices import CPU

log = logging.getLogger(__name__)

SHARED = "/dev/shm"
REGISTRY = "_diffusers_hook"  # the attribute with a module's hooks
SPARE = 16 << 20  # bytes of shared memory that stay free


def can_be_sent(part: object, device: torch.device = CPU) -> bool:
    """Return True if a component on a device can be sent; otherwise the reason is logged."""
    reason = kept_by(part, device)
    if reason is not None:
        log.info("%s runs in this process: %s", type(part), reason)
    return reason is None


def kept_by(part: object, device: torch.device = CPU) -> str | None:
    """Return why a component can't be sent to another process; None if it can.

    Args:
        part: The component.
        device: The device of its weights; from another one than the CPU, copies of them are sent.
    """
    if type(part).__module__ == "__main__":  # another module in a helper
        return "its class is defined in the script that was started; define it in a module"
    if isinstance(part, nn.Module):
        if others := {str(tensor.device) for tensor in part.parameters()} - {str(device)}:
            found, own = ", ".join(sorted(others)), "the CPU" if device == CPU else device
            return f"its weights are on {found}; only those on {own} can be shared"
        if getattr(part, "peft_config", None):
            return "it has adapters of PEFT; unload them"
        if not fits_in_shared_memory(part):
            return f"{SHARED} has no room for its weights"
    try:
        pickle.dumps(type(part))
    except Exception as error:
        return f"its class can't be pickled: {error}"
    return None


def fits_in_shared_memory(part: nn.Module) -> bool:
    """Return True if the weights that aren't shared yet have room; writing beyond it is SIGBUS."""
    tensors = (*part.parameters(), *part.buffers())
    shared = (tensor for tensor in tensors if tensor.device != CPU or not tensor.is_shared())
    wanted = sum(
        tensor.untyped_storage().nbytes() if tensor.device == CPU else tensor.nbytes
        for tensor in shared
    )
    try:
        return wanted + SPARE <= shutil.disk_usage(SHARED).free
    except OSError:  # another system than Linux shares memory elsewhere
        return True


def bare(part: object, hooks: bool = True) -> object:
    """Return a copy of a component without replaced methods and a registry without hooks.

    Without `hooks` a module's own ones stay behind too: they act on the calls of this process.
    """
    own = object.__new__(type(part))
    hung = {k for k, v in part.__dict__.items() if callable(v) and hasattr(type(part), k)}
    # diffusers' cache_context leaves a registry that refers to the module's methods
    hung |= {k for k in (REGISTRY,) if not getattr(part.__dict__.get(k), "hooks", True)}
    own.__dict__.update({k: v for k, v in part.__dict__.items() if k not in hung})
    if not hooks:
        own.__dict__.update({k: type(v)() for k, v in part.__dict__.items() if k in HOOKS})
    return own


def on_cpu(part: nn.Module) -> bool:
    return all(tensor.device.type == "cpu" for tensor in part.parameters())
