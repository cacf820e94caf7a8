"""PrivateMemory: this process's own numbers in tensors whose memory other processes share.

The file behind shared memory is mapped once more at the same address, copy on write: the process
gets pages of its own where it writes, and tensors, views and addresses stay as they are. Mapping
the shared file again drops these pages, which restores all bits.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Iterable

import torch.multiprocessing
from torch import Tensor

MAP_FIXED = 0x10  # on Linux, on all of its processors that torch is built for


class PrivateMemory:
    """The storages of which this process has its own copy, until `release`."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}  # address -> bytes, open file

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self._held.values())

    def take(self, tensor: Tensor) -> None:
        """Let what is written into a shared tensor stay in this process; OSError if that fails."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._held:
            return
        descriptor, size = storage._share_fd_cpu_()[:2]
        remap(address, size, mmap.MAP_PRIVATE, descriptor)
        self._held[address] = size, descriptor

    def release(self) -> None:
        """Drop what was written: the tensors have the shared numbers again, bit for bit."""
        while self._held:
            address, (size, descriptor) = next(iter(self._held.items()))
            remap(address, size, mmap.MAP_SHARED, descriptor)
            del self._held[address]


def refusal(tensors: Iterable[Tensor]) -> str:
    """Return why shared tensors can't have memory of this process's own; "" if they can."""
    if sys.platform != "linux" or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return "memory that is shared by open files is needed, as torch has it on Linux"
    addresses = [one.untyped_storage().data_ptr() for one in tensors]
    if any(address % mmap.PAGESIZE for address in addresses):
        return "weights in shared memory don't begin at a page"
    return ""


@functools.cache
def libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    return found


def remap(address: int, size: int, kind: int, descriptor: int) -> None:
    """Map a file at an address at which it is mapped already."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = libc().mmap(address, size, access, kind | MAP_FIXED, descriptor, 0)
    if found != address:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {size} bytes of weights: {os.strerror(error)}")
