"""A module as a message whose weights lie on a device, for a process that has them on another one.

The weights are copied through host memory and belong to the process that receives them.
"""

from __future__ import annotations

import io
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from maskfx.runtime.transport.shared_tensors import PackedMessage, is_away
from maskfx.runtime.transport.tensor_transport import TensorPickler, contents, pack, rebuilt


def packed_for(device: torch.device, part: object) -> PackedMessage:
    """Return an object as a message, or raise Unsendable; its tensors of devices arrive on this."""
    return PackedMessage(pack(part, partial(CopyingPickler, device)))


class CopyingPickler(TensorPickler):
    """Pickles tensors and parameters of devices as ones of another device."""

    def __init__(self, device: torch.device, stream: io.BytesIO, **options: Any) -> None:
        super().__init__(stream, **options)
        self._device = registered_by(device), str(device)

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor) or not is_away(value):
            return super().reducer_override(value)
        kind = type(value) if isinstance(value, nn.Parameter) else None
        return on_device, (*self._device, kind, value.requires_grad, *contents(value.cpu()))


def on_device(
    registrar: str, device: str, kind: type[nn.Parameter] | None, gradient: bool, *held: Any
) -> Tensor:
    """Return a tensor on a device, which the module `registrar` makes known to PyTorch."""
    import_module(registrar)
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)  # where kernels start by default
    value = rebuilt(*held).to(where)
    return value if kind is None else kind(value, gradient)


def registered_by(device: torch.device) -> str:
    """Return the module whose import makes a type of device known to PyTorch."""
    found = torch.get_device_module(device)
    return found.__name__ if isinstance(found, ModuleType) else type(found).__module__
