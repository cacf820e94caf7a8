"""Memory files: memory without a name that one process allocates and others map.

It isn't counted against /dev/shm, and is freed with its last user. It is allocated as a whole
before it is written, so that a lack of memory is an error and not a signal. On Linux only.
"""

from __future__ import annotations

import fcntl
import os


def exist() -> bool:
    """Return True if this system has memory files."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def memory_file(name: str, nbytes: int) -> int:
    """Return the descriptor of a memory file of this size, whose size can't be changed."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def path_of(descriptor: int) -> str:
    """Return the path by which a descriptor is mapped; the map keeps no descriptor."""
    return f"/proc/self/fd/{descriptor}"
