"""SharedValue: a value whose large tensors lie in a memory file, which other processes map.

The tensors are copied once, however many processes map them, and a process reads no more than the
rows that it picks. Each has a view of its own: what it writes there, no other process sees. What
lies on the device of the process with the value, lies on that of the other process, too.
"""

from __future__ import annotations

import io
import os
import pickle
import weakref
from collections.abc import Hashable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from maskfx.runtime.hardware.devices import CPU, moved
from maskfx.runtime.processes import memory_files
from maskfx.runtime.transport.shared_tensors import PackedMessage, is_plain
from maskfx.runtime.transport.tensor_transport import TensorPickler, Unsendable, pack

ALIGN = 64  # bytes
LARGE = 1 << 12  # bytes; smaller tensors are sent with the value
NAME = "maskfx-value"

Place = tuple[int, tuple[int, ...], torch.dtype]  # offset, shape, dtype


class SharedValue:
    """A value in a memory file; raises OSError if there is none. It closes with this object.

    Args:
        value: The value; its tensors may not change.
        device: The device of this process.

    `message` is the value without its large tensors, `nbytes` the size of the file.
    """

    def __init__(self, value: object, device: torch.device = CPU) -> None:
        if not memory_files.exist():
            raise OSError("this system has no memory files")
        placed: dict[Hashable, tuple[Tensor, Place]] = {}
        self.message = PackedMessage(pack(value, partial(PlacingPickler, placed, device)))
        self.nbytes = max(ALIGN, sum(aligned(tensor.nbytes) for tensor, _ in placed.values()))
        self.descriptor = memory_files.memory_file(NAME, self.nbytes)
        weakref.finalize(self, os.close, self.descriptor)
        memory = mapped(self.descriptor, self.nbytes, shared=True)
        for tensor, place in placed.values():
            within(memory, place).copy_(tensor)


class PlacingPickler(TensorPickler):
    """Pickles large CPU tensors, and those of a device, by their places.

    `placed` gets them, each memory once.
    """

    def __init__(
        self,
        placed: dict[Hashable, tuple[Tensor, Place]],
        device: torch.device,
        stream: io.BytesIO,
        **options: Any,
    ) -> None:
        super().__init__(stream, **options)
        self._placed, self._device, self._at = placed, device, 0

    def persistent_id(self, value: object) -> object:
        if type(value) is not Tensor:
            return None
        there = value.device == self._device != CPU
        if not there and (value.nbytes < LARGE or not is_plain(value)):
            return None
        key = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value.device
        if key not in self._placed:
            self._placed[key] = value, (self._at, tuple(value.shape), value.dtype)
            self._at += aligned(value.nbytes)
        return self._placed[key][1], there


class PlacedUnpickler(pickle.Unpickler):
    """Makes tensors of their places in a memory file."""

    def __init__(self, parts: Sequence[Any], memory: Tensor, device: torch.device) -> None:
        super().__init__(io.BytesIO(parts[0]), buffers=parts[1:])
        self._memory, self._device = memory, device

    def persistent_load(self, reference: tuple[Place, bool]) -> Tensor:
        place, there = reference
        value = within(self._memory, place)
        return moved(value, self._device) if there else value


def received_value(
    parts: Sequence[Any], nbytes: int, descriptor: int, device: torch.device = CPU
) -> Any:
    """Return the value that another process has put into a memory file, or raise Unsendable.

    Args:
        parts: The value without its large tensors.
        nbytes: The size of the file.
        descriptor: The file.
        device: The device of this process.
    """
    try:
        return PlacedUnpickler(parts, mapped(descriptor, nbytes, shared=False), device).load()
    except Exception as error:
        raise Unsendable(f"it can't be mapped: {type(error).__name__}: {error}") from error


def mapped(descriptor: int, nbytes: int, shared: bool) -> Tensor:
    path = memory_files.path_of(descriptor)
    return torch.from_file(path, shared=shared, size=nbytes, dtype=torch.uint8)


def within(memory: Tensor, place: Place) -> Tensor:
    offset, shape, dtype = place
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
