"""Transport of values between processes, with tensors in shared memory.

A message is pickled; the bytes of its tensors and arrays lie in a memory block that both sides
map, and the message holds their offsets. One message at a time: the next may overwrite the block.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import Tensor

BLOCK = 64 << 20
ALIGNED = 64
SMALL = 2048  # bytes; smaller buffers are sent inside the message


def block_bytes(wanted: int = BLOCK) -> int:
    """Return a block size that fits /dev/shm: writing beyond its free space kills the process."""
    try:
        free = os.statvfs("/dev/shm")
    except OSError:
        return wanted
    return max(1 << 20, min(wanted, free.f_bavail * free.f_frsize // 8))


class TensorPickler(pickle.Pickler):
    """Pickles CPU tensors as out-of-band buffers."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.is_sparse:
            return NotImplemented
        flat: Any = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        return rebuilt, (pickle.PickleBuffer(flat), value.dtype, tuple(value.shape))


def rebuilt(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(memoryview(buffer)):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def view_of(block: SharedMemory) -> memoryview:
    assert block.buf is not None, "an open block has memory"
    return block.buf


class Unsendable(Exception):
    """A value that can't be sent to another process."""


class TensorChannel:
    """One end of a channel: sends through one shared block, receives through the other."""

    def __init__(self, pipe: Connection, own: SharedMemory, other: SharedMemory) -> None:
        self.pipe, self.blocks = pipe, (own, other)
        self.own, self.other = view_of(own), view_of(other)

    def send(self, value: Any) -> None:
        """Send a value completely, or raise `Unsendable` and send nothing."""
        self.pipe.send_bytes(self.packed(value))

    def packed(self, value: Any) -> bytes:
        """Return the pickled message; write its out-of-band buffers into the block."""
        stream, beside = io.BytesIO(), list[pickle.PickleBuffer]()
        try:
            TensorPickler(stream, protocol=5, buffer_callback=self._chosen(beside)).dump(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise Unsendable(f"{type(value).__name__}: {error}") from error
        places, at = [], 0
        for buffer in beside:
            raw = buffer.raw()
            self.own[at : at + raw.nbytes] = raw
            places.append((at, raw.nbytes))
            at += -(-raw.nbytes // ALIGNED) * ALIGNED
        return pickle.dumps((places, stream.getvalue()))

    def receive(self) -> Any:
        places, message = pickle.loads(self.pipe.recv_bytes())
        return pickle.loads(message, buffers=self._copies(places))

    def _chosen(self, beside: list[pickle.PickleBuffer]) -> Any:
        """Return the callback that puts buffers of `SMALL` bytes or more out of band while the
        block has room.
        """
        used = 0

        def keep_inline(buffer: pickle.PickleBuffer) -> bool:
            nonlocal used
            size = -(-buffer.raw().nbytes // ALIGNED) * ALIGNED
            if buffer.raw().nbytes < SMALL or used + size > len(self.own):
                return True
            used += size
            beside.append(buffer)
            return False

        return keep_inline

    def _copies(self, places: Sequence[tuple[int, int]]) -> list[bytearray]:
        """Copy the received buffers out of the block, which the next message overwrites."""
        return [bytearray(self.other[at : at + size]) for at, size in places]
