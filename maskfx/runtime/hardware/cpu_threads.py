"""CPU threads: shares the cores between this process's threads, its helpers and other programs.

PyTorch's operators run on OpenMP workers of the calling thread, one pool per thread, and an
operator ends with its slowest worker. Two things follow.

A step with as many workers as cores, beside an encoder or a VAE that computes too, waits in every
operator for the worker that shares its core: on two cores it takes three to five times as long,
while running on one worker would cost it a fifth. So code that computes beside the steps registers
its threads (`beside`), and the thread that runs steps uses the cores that are left (`settle`), also
in the middle of a step. Cores that other programs keep busy are measured (`BusyCores`) and left to
them; steps outside of an engine do the same (`sharing_cores`).

GNU's runtime (libgomp) counts the workers of all pools, idle ones too. If they outnumber the cores,
all sleep between two operators instead of spinning, and small operators take twice as long. So a
thread that has nothing to compute while the engine's loop does releases its pool (`give_back`); its
next operator creates another.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from maskfx.runtime.hardware.busy_cores import BusyCores

HARD = 2  # omp_pause_hard: workers end, the thread's settings stay


class Share(threading.local):
    """The calling thread's number of threads if nothing else computes; 0: it shares no cores."""

    whole = 0


class Taken:
    """Counts the cores that compute beside the steps, in this process and all of its helpers."""

    def __init__(self) -> None:
        self.cores = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.cores += number


taken, share, busy = Taken(), Share(), BusyCores()


def share_cores() -> None:
    """Make the calling thread, which runs steps, use the cores that are left from now on."""
    share.whole = torch.get_num_threads()


def settle() -> None:
    """Set the calling thread's threads to the cores left now; no effect if it doesn't share."""
    if not share.whole:
        return
    left = cores_left(share.whole)
    if left != torch.get_num_threads():
        compute_with(left)


def cores_left(threads: int) -> int:
    """Return how many of `threads` to compute on, beside helper processes and other programs.

    Helper processes are registered, and seen as other programs as well. Where there are more cores
    than threads, other programs take those first.
    """
    whole = share.whole or threads
    if whole == 1:
        return 1
    others = busy.by_others()
    free = busy.total - others if others else whole
    return max(1, min(whole - taken.cores, free))


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Make the calling thread use the cores that are left, inside this context."""
    if share.whole:
        yield
        return
    share_cores()
    try:
        settle()
        yield
    finally:
        if torch.get_num_threads() != share.whole:
            compute_with(share.whole)
        share.whole = 0


@contextmanager
def beside(threads: int) -> Iterator[None]:
    """Register `threads` cores that compute something other than steps, in or for this thread."""
    taken.add(threads)
    try:
        yield
    finally:
        taken.add(-threads)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Run the calling thread's operators on `threads` threads inside this context."""
    before = torch.get_num_threads()
    compute_with(threads)
    try:
        yield
    finally:
        compute_with(before)


def compute_with(threads: int) -> None:
    """Set the number of threads of the calling thread alone, unlike `torch.set_num_threads`.

    No effect with other OpenMP runtimes than GNU's.
    """
    for runtime in runtimes():
        runtime.omp_set_num_threads(threads)


def give_back() -> None:
    """End the calling thread's idle workers; no effect with other OpenMP runtimes than GNU's."""
    for pause in pausing():
        pause(HARD)


@cache
def pausing() -> list[Callable[[int], int]]:
    """Return OpenMP's `omp_pause_resource_all` of each GNU runtime in this process."""
    found = (getattr(one, "omp_pause_resource_all", None) for one in runtimes())
    return [pause for pause in found if pause is not None]  # None before OpenMP 5


@cache
def runtimes() -> list[ctypes.CDLL]:
    """Return each copy of GNU's OpenMP that is loaded into this process."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    found = []
    for path in sorted(paths):
        try:
            found.append(ctypes.CDLL(path))
        except OSError:
            continue
    return found
