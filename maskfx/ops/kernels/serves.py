"""Decides whether a kernel serves a call, and falls back to the plain operator where it doesn't.

The environment variable `MASKFX_KERNELS` set to `0` or `off` turns all kernels off.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)
Result = TypeVar("Result")

SWITCH = "MASKFX_KERNELS"
OFF = ("0", "off", "false", "no")
KINDS = (torch.float32, torch.bfloat16, torch.float16)
LEAST = (8, 0)  # compute capability: products of bfloat16

_failed: set[tuple[object, ...]] = set()


def switched_on() -> bool:
    return os.environ.get(SWITCH, "1").strip().lower() not in OFF


@cache
def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Return True if Triton runs kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def runs_on(device: torch.device) -> bool:
    """Return True if kernels run on a device."""
    if not (switched_on() and triton_is_there()):
        return False
    if device.type == "cpu":
        return interpreted()
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return False
    return capability(device) >= LEAST


def serves(*values: Tensor | None) -> bool:
    """Return True if kernels run on these tensors: one device, one dtype that they know."""
    known = [value for value in values if value is not None]
    first = known[0]
    return (
        first.dtype in KINDS
        and all(v.dtype == first.dtype and v.device == first.device for v in known)
        and runs_on(first.device)
    )


def attempt(key: tuple[object, ...], kernel: Callable[[], Result]) -> Result | None:
    """Run a kernel; return None if it can't be compiled or launched, now and from then on.

    Args:
        key: What a failure would repeat for: the kernel's name, dtypes and feature sizes.
        kernel: Launches the kernel.
    """
    if key in _failed:
        return None
    try:
        return kernel()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if is_lost(error):
            raise
        _failed.add(key)
        log.warning("kernel %s: %s: %s; the plain operator runs", key, type(error).__name__, error)
        return None


def is_lost(error: Exception) -> bool:
    """Return True for errors after which the device computes nothing more."""
    return isinstance(error, torch.AcceleratorError)
