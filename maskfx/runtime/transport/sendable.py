"""Which modules can be sent to another process of this machine, and what of them is sent.

Weights on the CPU are in memory that processes share; those on a device can be copied to one.
"""

from __future__ import annotations

import logging
import pickle
import shutil

from torch import nn

from maskfx.ir.modules.callables import HOOKS
from maskfx.ir.values import PLAIN_TENSORS
from maskfx.runtime.hardware.devices import CPU
from maskfx.runtime.hardware.offload import is_offloaded

log = logging.getLogger(__name__)

SHARED = "/dev/shm"
REGISTRY = "_diffusers_hook"  # the attribute with a module's hooks
SPARE = 16 << 20  # bytes of shared memory that stay free


def can_be_sent(part: object, copied: bool = False) -> bool:
    """Return True if a component can be sent, see `kept_by`; otherwise the reason is logged."""
    reason = kept_by(part, copied)
    if reason is not None:
        log.info("%s runs in this process: %s", type(part), reason)
    return reason is None


def kept_by(part: object, copied: bool = False) -> str | None:
    """Return why a component can't be sent to another process; None if it can.

    Args:
        part: The component.
        copied: Whether its weights may be copied from a device to a device.
    """
    if type(part).__module__ == "__main__":  # another module in a helper
        return "its class is defined in the script that was started; define it in a module"
    if isinstance(part, nn.Module):
        reason = kept_on_devices(part) if copied else kept_off_cpu(part)
        if reason is not None:
            return reason
        if getattr(part, "peft_config", None):
            return "it has adapters of PEFT; unload them"
        if not fits_in_shared_memory(part):
            return f"{SHARED} has no room for its weights"
    try:
        pickle.dumps(type(part))
    except Exception as error:
        return f"its class can't be pickled: {error}"
    return None


def kept_off_cpu(part: nn.Module) -> str | None:
    """Return why weights aren't in memory that processes can share; None if they are."""
    if on_cpu(part):
        return None
    devices = ", ".join(sorted({str(tensor.device) for tensor in part.parameters()} - {"cpu"}))
    return f"its weights are on {devices}; only those on the CPU can be shared"


def kept_on_devices(part: nn.Module) -> str | None:
    """Return why weights can neither be shared nor be copied to a device; None if they can."""
    tensors = [*part.parameters(), *part.buffers()]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if "meta" in devices:
        return "its weights are on meta, and have no numbers"
    if is_offloaded(part):
        return "its weights are offloaded, and move while it runs; let it stay on its device"
    if on_cpu(part):
        return None
    if len(devices) > 1:
        return f"its weights are on {', '.join(devices)}; move it to one device"
    for tensor in tensors:
        if type(tensor) not in PLAIN_TENSORS or tensor.is_quantized:
            kind = type(tensor).__name__
            return f"its weights are quantized ({kind}), and only plain ones are copied to a device"
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
