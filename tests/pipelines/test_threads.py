"""Threads that call one compiled pipeline take turns, and leave it as it was."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from tests.factories.pipelines import PIPES, STEPS, call_of, compiled, latents

NAME = "FluxPipeline"
SIDES = 2


def test_calls_of_two_threads_dont_overlap() -> None:
    """The first call waits in its first step for the second one to begin: it must not."""
    pipe = compiled(NAME)
    wanted = latents(pipe, **call_of(PIPES[NAME]))
    methods = {name: part for name, part in vars(pipe).items() if callable(part)}
    barrier, overlapped, found = threading.Barrier(SIDES), set[int](), dict[int, Any]()

    def meet(pipe: Any, step: int, time: object, given: dict[str, Any]) -> dict[str, Any]:
        if step < STEPS - 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(0.3)
                overlapped.add(step)
        return given

    def call(k: int) -> None:
        arguments = call_of(PIPES[NAME], callback_on_step_end=meet)
        found[k] = latents(pipe, **arguments)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(SIDES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlapped
    assert {name: part for name, part in vars(pipe).items() if callable(part)} == methods
    assert all(torch.equal(found[k], wanted) for k in range(SIDES))
