"""Transport of values between processes: pickles, with the bytes of tensors and arrays beside them.

A value is one message of a `Channel`: its pickle, then each large buffer, which is received into
memory that the value keeps.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maskfx.ir.values import octets
from maskfx.runtime.processes.channel import Part

SMALL = 2048  # bytes; smaller buffers are sent inside the pickle
BYTES = 1 << 40  # limit of a message; a helper process is trusted


class TensorPickler(pickle.Pickler):
    """Pickles CPU tensors as out-of-band buffers."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.is_sparse:
            return NotImplemented
        return rebuilt, contents(value)


def contents(value: Tensor) -> tuple[object, ...]:
    """Return the arguments of `rebuilt` for a CPU tensor; its bytes aren't copied."""
    flat: Any = octets(value).numpy()
    return pickle.PickleBuffer(flat), value.dtype, tuple(value.shape)


def rebuilt(
    buffer: bytes | bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    if not len(memoryview(buffer)):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class Unsendable(Exception):
    """A value that can't be sent to another process."""


def pack(value: object, pickler: Callable[..., pickle.Pickler] = TensorPickler) -> list[Part]:
    """Return a value as the parts of a message, or raise `Unsendable`."""
    stream, beside = io.BytesIO(), list[Part]()

    def keep_inline(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= SMALL:
            beside.append(raw)
        return raw.nbytes < SMALL

    try:
        pickler(stream, protocol=5, buffer_callback=keep_inline).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Unsendable(f"{type(value).__name__}: {error}") from error
    return [stream.getbuffer(), *beside]


def unpack(parts: list[bytearray]) -> Any:
    """Return the value of a message, or raise `Unsendable` if it can't be made in this process."""
    try:
        return pickle.loads(parts[0], buffers=parts[1:])
    except Exception as error:
        raise Unsendable(f"it can't be unpickled: {type(error).__name__}: {error}") from error
