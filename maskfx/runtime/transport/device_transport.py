"""Messages between processes with a device each, which arrive on the receiver's.

Tensors of the sender's device travel in host memory. A module's weights travel in shared memory, in
one copy for all processes that it is sent to. Tensors in host memory stay there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import MutableMapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn

from maskfx.ir.values import PLAIN_TENSORS
from maskfx.runtime.hardware.devices import CPU, moved
from maskfx.runtime.processes.channel import Part
from maskfx.runtime.transport.tensor_transport import TensorPickler, Unsendable, pack, unpack

DEVICE, TENSOR, AGAIN = "device", "tensor", "again"
Copies = MutableMapping[int, tuple[Tensor, Tensor]]  # by id: a tensor, and its copy on the host


class DevicePickler(pickle.Pickler):
    """Pickles a device, and the tensors on it, as those of the process that reads them.

    Args:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._device = device
        self._sent: dict[int, tuple[int, Tensor]] = {}  # by id: the number, and the tensor

    def persistent_id(self, value: object) -> object:
        if isinstance(value, torch.device):
            return (DEVICE,) if value == self._device else None
        if not isinstance(value, Tensor) or value.device != self._device:
            return None
        if type(value) not in PLAIN_TENSORS:  # its parts are plain
            return None
        if id(value) in self._sent:
            return AGAIN, self._sent[id(value)][0]
        self._sent[id(value)] = len(self._sent), value
        kind = value.requires_grad if isinstance(value, nn.Parameter) else None
        return TENSOR, self.hosted(value), kind

    def hosted(self, value: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory."""
        return value.detach().cpu()


class MessagePickler(DevicePickler, TensorPickler):
    """Pickles messages; the bytes of tensors lie beside the pickle."""


class ModulePickler(DevicePickler, ForkingPickler):
    """Pickles modules, whose tensors other processes find in shared memory.

    Args:
        copies: Gets the copies in shared memory; several picklers may use them.
    """

    def __init__(self, device: torch.device, copies: Copies, *args: Any, **options: Any) -> None:
        super().__init__(device, *args, **options)
        self._copies = copies

    def hosted(self, value: Tensor) -> Tensor:
        """Return the copy in shared memory."""
        if id(value) not in self._copies:
            self._copies[id(value)] = value, super().hosted(value).share_memory_()
        return self._copies[id(value)][1]


class DeviceUnpickler(pickle.Unpickler):
    """Makes the values that a `DevicePickler` wrote, on the device of this process."""

    def __init__(self, device: torch.device, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._device = device
        self._made: list[Tensor] = []

    def persistent_load(self, reference: tuple[Any, ...]) -> Any:
        kind, *rest = reference
        if kind == DEVICE:
            return self._device
        if kind == AGAIN:
            return self._made[rest[0]]
        value, requires_grad = rest
        found = moved(value, self._device)
        if requires_grad is not None:
            found = nn.Parameter(found, requires_grad)
        self._made.append(found)
        return found


def pack_from(device: torch.device, value: object) -> list[Part]:
    """Return a value as the parts of a message; raise `Unsendable` if it has no such form."""
    if device == CPU:
        return pack(value)
    return pack(value, partial(MessagePickler, device))


def unpack_on(device: torch.device, parts: Sequence[Any]) -> Any:
    """Return the value of a message, or raise `Unsendable` if it can't be made in this process."""
    if device == CPU:
        return unpack(list(parts))
    try:
        return DeviceUnpickler(device, io.BytesIO(parts[0]), buffers=parts[1:]).load()
    except Exception as error:
        raise Unsendable(f"it can't be unpickled: {type(error).__name__}: {error}") from error


def pack_module(device: torch.device, value: object, copies: Copies) -> bytes:
    """Return a module as bytes for one other process; see `ModulePickler`."""
    stream = io.BytesIO()
    if device == CPU:
        ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    else:
        ModulePickler(device, copies, stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def unpack_module(device: torch.device, content: bytes) -> Any:
    """Return what `pack_module` wrote, with the weights on the device of this process."""
    return DeviceUnpickler(device, io.BytesIO(content)).load()
