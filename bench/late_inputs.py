"""ControlNets beside their denoiser: what is possible, and what is measured.

A denoising step ends no earlier than its slowest net plus what the denoiser computes from the
nets' results, its tail, and in the first step a net also computes what belongs to the request. So
the most that is possible is less than the sum over the largest part. It is computed from CPU
seconds, which other work on the machine changes little. `bench.foundations` runs this.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import maskfx
from bench.harness import Figure, alternate, ratio
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.runs.run import DenoiserCall

Spent = dict[str, list[float]]  # seconds of each step by denoiser
Steps = dict[str, Any]  # the last step of each denoiser


def shares(pipe: Any, call: Mapping[str, Any]) -> tuple[Spent, Steps]:
    """Return the CPU seconds of a call's steps in one process, and the last steps' arguments."""
    spent, last = Spent(), Steps()
    names = {id(d): name for name, d in pipeline_state_of(pipe).denoisers.items()}
    step = maskfx.CompiledDenoiser.step

    def timed(denoiser: Any, steps: Any) -> Any:
        start = time.thread_time()
        found = step(denoiser, steps)
        name = names[id(denoiser)]
        spent.setdefault(name, []).append(time.thread_time() - start)
        last[name] = steps
        return found

    with mock.patch.object(maskfx.CompiledDenoiser, "step", timed):
        pipe(**call)
    return spent, last


@contextmanager
def heads() -> Iterator[list[float]]:
    """Collect, for each step of a denoiser, its CPU seconds until it first waits for a net."""
    found: list[float] = []
    begun = threading.local()
    step, wait = maskfx.CompiledDenoiser.step, DenoiserCall.wait

    def started(denoiser: Any, steps: Any) -> Any:
        begun.at = time.thread_time()
        try:
            return step(denoiser, steps)
        finally:
            if begun.at is not None:  # it has read no net's result
                found.append(time.thread_time() - begun.at)
                begun.at = None

    def waited(call: DenoiserCall) -> None:
        at, begun.at = getattr(begun, "at", None), None
        if at is not None and call.running is not None:
            found.append(time.thread_time() - at)
        wait(call)

    with (
        mock.patch.object(maskfx.CompiledDenoiser, "step", started),
        mock.patch.object(DenoiserCall, "wait", waited),
    ):
        yield found


def most_possible(
    nets: Sequence[Sequence[float]],
    denoiser: Sequence[float],
    heads: Sequence[float],
    rest: float,
    cores: int,
    slower: float = 1.0,
) -> float:
    """Return how many times as quick as one process a call can be, with processes on `cores` cores.

    Args:
        nets: Seconds of each step of each net.
        denoiser: Seconds of each step of the denoiser.
        heads: Of these, the seconds before the first result of a net is read.
        rest: Seconds of the call that are no denoiser's.
        cores: The number of cores.
        slower: How many times as long what runs side by side takes as alone.
    """
    alone = beside = rest
    for *own, whole, head in zip(*nets, denoiser, heads, strict=True):
        together = max(*own, head, (sum(own) + head) / cores)
        alone += sum(own) + whole
        beside += together * slower + whole - head
    return alone / beside


def side_by_side(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Figure]:
    """Return how many times as long each of two works takes while a process repeats the other.

    The processes exchange nothing: what is left is what they share, such as memory and caches.
    """
    slower = {}
    for name, other in zip(works, reversed(list(works)), strict=True):
        own = {name: lambda _, work=works[name]: work()}
        works[name]()
        alone = alternate(own, rounds)[name]
        with repeated(works[other]):
            beside = alternate(own, rounds)[name]
        slower[name] = ratio(sorted(beside), sorted(alone))
    return slower


@contextmanager
def repeated(work: Callable[[], Any]) -> Iterator[None]:
    """Run something again and again in a copy of this process meanwhile."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()

    def run() -> None:
        while True:
            work()
            begun.set()

    process = context.Process(target=run, daemon=True)
    process.start()
    try:
        assert begun.wait(600), "the other process doesn't compute"
        yield
    finally:
        process.kill()
        process.join()
