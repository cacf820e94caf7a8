"""RingLink: exchanges between processes of one machine, through memory that they share.

Each ordered pair of ranks has a ring of bytes (`ops/native/rings.c`). Messages of a pair arrive in
the order in which they were sent; a message that doesn't fit into the ring is moved in parts, while
both ranks wait in an exchange.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from maskfx.distributed.exchanges.process_group import failing
from maskfx.ops.native.build import c_functions
from maskfx.runtime.processes import memory_files
from maskfx.runtime.processes.memory_files import memory_file

CAPACITY = 1 << 20  # bytes of a ring
HEADER, COUNTERS = 4096, 128  # bytes: of the words of all ranks, and of the counters of a ring
MOST = 64  # ranks
REASONS = {
    -1: "rank {rank} didn't send or receive in time",
    -2: "rank {rank} has left",
    -3: "rank {rank} sent another message",
}


def rings_serve(ranks: int) -> bool:
    """Return True if this machine can exchange through rings."""
    return ranks <= MOST and memory_files.exist() and c_functions() is not None


class SharedMemory:
    """The rings of a group; all ranks map the same file.

    Args:
        descriptor: The file; it is closed with this object.
        ranks: The number of ranks.
    """

    def __init__(self, descriptor: int, ranks: int) -> None:
        functions = c_functions()
        assert functions is not None, "see rings_serve"
        self.descriptor, self.ranks, self.functions = descriptor, ranks, functions
        weakref.finalize(self, os.close, descriptor)
        self._memory = mmap.mmap(descriptor, nbytes_of(ranks))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @classmethod
    def new(cls, ranks: int) -> Self:
        """Return empty rings in a new file that has no name."""
        return cls(memory_file("maskfx-rings", nbytes_of(ranks)), ranks)

    def leave(self, rank: int) -> None:
        """Let all that wait for a rank fail."""
        self.functions.ring_leave(self.address, rank)


def nbytes_of(ranks: int) -> int:
    return HEADER + ranks * ranks * (COUNTERS + CAPACITY)


class Operation(ctypes.Structure):
    """One message, sent or received; as in `rings.c`."""

    _fields_ = (
        ("peer", ctypes.c_int64),
        ("incoming", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("framed", ctypes.c_int64),
        ("moved", ctypes.c_int64),
        ("needed", ctypes.c_int64),
    )
    value: Tensor  # what is read or filled


def operation(peer: int, incoming: bool, number: int, value: Tensor) -> Operation:
    made = Operation(peer, incoming, number, value.nbytes, value.data_ptr())
    made.value = value
    return made


class RingLink:
    """The rings, as one rank sees them.

    Args:
        memory: What all ranks share.
        rank: The number of this rank.
        seconds: The time that an exchange may take.
    """

    def __init__(self, memory: SharedMemory, rank: int, seconds: float) -> None:
        self._memory, self._rank, self._seconds = memory, rank, seconds
        self._pending: list[Operation] = []  # in the order in which they were begun

    def start(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], number: int
    ) -> RingTransfer:
        begun = [operation(peer, False, number, value) for peer, value in outgoing.items()]
        begun += [operation(peer, True, number, value) for peer, value in incoming.items()]
        self._pending += begun
        transfer = RingTransfer(self, begun, number)
        self.run(begun, number)
        return transfer

    def run(self, begun: Sequence[Operation], number: int) -> None:
        """Move messages until those that are needed are through; without any, what fits now."""
        count = len(self._pending)
        operations = (ctypes.c_void_p * count)(*map(ctypes.addressof, self._pending))
        culprit = ctypes.c_int64(self._rank)
        with failing(self._rank, sorted({one.peer for one in begun}), number, self._seconds):
            failed = self._memory.functions.ring_run(
                *(self._memory.address, self._rank, self._memory.ranks, CAPACITY),
                *(operations, count, self._seconds, ctypes.byref(culprit)),
            )
            if failed:
                raise RuntimeError(REASONS[failed].format(rank=culprit.value))
        self._pending = [one for one in self._pending if not one.framed or one.moved < one.nbytes]

    def finish(self) -> None:
        """Do nothing: the host has waited for each exchange."""

    def close(self) -> None:
        """Let all that wait for this rank fail at once."""
        self._memory.leave(self._rank)


class RingTransfer:
    """An exchange that was begun."""

    def __init__(self, link: RingLink, begun: Sequence[Operation], number: int) -> None:
        self._link, self._begun, self._number = link, begun, number

    def wait(self) -> None:
        if any(not one.framed or one.moved < one.nbytes for one in self._begun):
            for one in self._begun:
                one.needed = 1
            self._link.run(self._begun, self._number)
