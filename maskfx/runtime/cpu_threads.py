"""Cores: how the threads of this process, and its helpers, share them.

PyTorch's operators run on workers of the thread that calls them, a pool per thread, and an operator
ends with its slowest worker. Two things follow.

A step whose workers are as many as the cores, beside an encoder or a VAE that computes too, waits
in every operator for the worker that shares its core: on two cores it takes three to five times as
long, where one worker would cost it a fifth. So whoever computes beside the steps says so
(`beside`), and the thread of the steps takes what is left (`settle`), also in the midst of a step.

GNU's runtime counts the workers of all pools, idle ones too. Where they are more than there are
cores, all sleep between two operators instead of watching for the next, and small operators take
twice as long. So who has nothing to compute while the engine's loop does gives its pool back
(`give_back`); the next operator makes another.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

HARD = 2  # omp_pause_hard: workers end, settings stay those of the thread


class Share(threading.local):
    """How many threads the calling thread has where nobody else computes; 0: it doesn't share."""

    whole = 0


class Taken:
    """How many cores compute something beside the steps, in all of this process's helpers too."""

    def __init__(self) -> None:
        self.cores = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.cores += number


taken, share = Taken(), Share()


def share_cores() -> None:
    """From now on the calling thread, which runs steps, takes what others leave."""
    share.whole = torch.get_num_threads()


def settle() -> None:
    """Take what is left now; nothing in a thread that doesn't share."""
    if not share.whole:
        return
    left = max(1, share.whole - taken.cores)
    if left != torch.get_num_threads():
        compute_with(left)


@contextmanager
def beside(threads: int) -> Iterator[None]:
    """So many cores compute something else than steps, in this thread or for it."""
    taken.add(threads)
    try:
        yield
    finally:
        taken.add(-threads)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """The calling thread's operators within run on so many threads."""
    before = torch.get_num_threads()
    compute_with(threads)
    try:
        yield
    finally:
        compute_with(before)


def compute_with(threads: int) -> None:
    """The calling thread alone, unlike `torch.set_num_threads`. Nothing in other runtimes."""
    for runtime in runtimes():
        runtime.omp_set_num_threads(threads)


def give_back() -> None:
    """End the calling thread's idle workers. Nothing where another runtime is used."""
    for pause in pausing():
        pause(HARD)


@cache
def pausing() -> list[Callable[[int], int]]:
    """OpenMP's `omp_pause_resource_all` of each GNU runtime in this process."""
    found = (getattr(one, "omp_pause_resource_all", None) for one in runtimes())
    return [pause for pause in found if pause is not None]  # None before OpenMP 5


@cache
def runtimes() -> list[Any]:
    """GNU's OpenMP, as often as it was loaded into this process."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # another system
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    found = []
    for path in sorted(paths):
        try:
            found.append(ctypes.CDLL(path))
        except OSError:
            continue
    return found
