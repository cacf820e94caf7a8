"""Memory that a computing process has freed: it keeps it for its next step.

glibc maps each block above 32 MiB anew and unmaps it when it is freed, so that the kernel clears
all its pages again in every step: for batches of large activations a third of the processor's time.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT = 1 << 30  # bytes at most


def keep_freed_memory(nbytes: int = KEPT) -> bool:
    """Keep freed memory of the main thread, up to this number of bytes; False without glibc.

    For processes whose main thread computes, and only that: other code may need the memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, nbytes)) and bool(mallopt(TRIM_THRESHOLD, nbytes))
