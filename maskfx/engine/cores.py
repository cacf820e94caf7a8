"""Cores: a thread that waits gives its OpenMP workers back.

PyTorch's operators run on workers of the thread that calls them, a pool per thread. GNU's runtime
counts the workers of all pools, idle ones too. Where they are more than there are cores, all sleep
between two operators instead of watching for the next, and small operators take twice as long.
So who has nothing to compute while the engine's loop does gives its pool back; the next operator
makes another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

HARD = 2  # omp_pause_hard: workers end, settings stay those of the thread


def give_back() -> None:
    """End the calling thread's idle workers. Nothing where another runtime is used."""
    for pause in pausing():
        pause(HARD)


@cache
def pausing() -> list[Callable[[int], int]]:
    """OpenMP's `omp_pause_resource_all` of each GNU runtime in this process."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # another system
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    found: list[Callable[[int], int]] = []
    for path in sorted(paths):
        try:
            found.append(ctypes.CDLL(path).omp_pause_resource_all)
        except (OSError, AttributeError):  # older than OpenMP 5
            continue
    return found
