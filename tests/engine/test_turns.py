"""Requests that change settings of shared modules run alone over them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import maskfx
from maskfx.engine.turns import Turns
from maskfx.pipelines.waiting import wait_uninterrupted
from tests.factories.pipelines import PIPES, call_of, distance, latents, pipe_of, white
from tests.factories.small_unets import LEAST, sd


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.perf_counter() + 10
    while not holds():
        assert time.perf_counter() < end
        time.sleep(0.001)


class Runs:
    """Threads that hold turns until they are ordered to leave."""

    def __init__(self) -> None:
        self.turns, self.inside = Turns(), set[str]()
        self.leave = {name: threading.Event() for name in "abcde"}

    def start(self, name: str, modules: list[object], alone: bool) -> None:
        def run() -> None:
            with self.turns.of(modules, alone, wait_uninterrupted):
                self.inside.add(name)
                self.leave[name].wait(10)
                self.inside.remove(name)

        threading.Thread(target=run, daemon=True).start()


def test_a_request_that_runs_alone_waits_for_others_and_they_for_it() -> None:
    runs, one, other = Runs(), object(), object()
    runs.start("a", [one], alone=False)
    wait_until(lambda: runs.inside == {"a"})
    runs.start("b", [one, other], alone=True)
    wait_until(lambda: len(runs.turns._requests) == 2)
    runs.start("c", [one], alone=False)  # behind b, which would otherwise wait forever
    runs.start("d", [object()], alone=True)  # of other modules
    wait_until(lambda: runs.inside == {"a", "d"})
    runs.leave["a"].set()
    wait_until(lambda: runs.inside == {"b", "d"})
    runs.leave["b"].set()
    wait_until(lambda: runs.inside == {"c", "d"})
    for event in runs.leave.values():
        event.set()
    wait_until(lambda: not runs.turns._requests)
    assert not runs.inside


def test_requests_that_change_nothing_run_together() -> None:
    runs, module = Runs(), object()
    for name in "ab":
        runs.start(name, [module], alone=False)
    wait_until(lambda: runs.inside == {"a", "b"})
    for event in runs.leave.values():
        event.set()


def test_clients_that_always_run_alone_let_others_have_their_turn() -> None:
    runs, module = Runs(), object()

    def ask(name: str, alone: bool) -> None:
        left = len(runs.turns._requests)
        runs.start(name, [module], alone)
        wait_until(lambda: len(runs.turns._requests) == left + 1)

    ask("a", alone=True)
    ask("b", alone=True)
    ask("c", alone=False)
    for name, again in ("ad", "be"):  # each of the two clients asks again when it has run
        wait_until(lambda name=name: runs.inside == {name})  # type: ignore[misc]
        ask(again, alone=True)
        runs.leave[name].set()
    for name in "cde":
        wait_until(lambda name=name: runs.inside == {name})  # type: ignore[misc]
        runs.leave[name].set()
    wait_until(lambda: not runs.turns._requests)


@pytest.mark.parametrize("alone", [True, False])
def test_a_request_has_no_turn_before_one_that_came_earlier(alone: bool) -> None:
    turns, module = Turns(), object()

    def first(waiting: Callable[[float | None], bool]) -> None:
        with pytest.raises(RuntimeError, match="cancelled"), turns.of([module], alone, second):
            raise AssertionError("it was cancelled")
        assert waiting(0.0)

    def second(waiting: Callable[[float | None], bool]) -> None:
        holder.__exit__(None, None, None)
        assert not waiting(0.0)  # although nothing runs
        raise RuntimeError("cancelled")

    holder = turns.of([module], True, wait_uninterrupted)
    holder.__enter__()
    with turns.of([module], True, first):
        pass
    assert not turns._requests


def test_a_wait_that_ends_with_an_error_leaves_nothing() -> None:
    turns, module = Turns(), object()

    def cancelled(waiting: Callable[[float | None], bool]) -> None:
        assert not waiting(0.0)
        raise RuntimeError("cancelled")

    with turns.of([module], False, wait_uninterrupted):
        with pytest.raises(RuntimeError, match="cancelled"), turns.of([module], True, cancelled):
            raise AssertionError("it never had its turn")
        with turns.of([module], False, cancelled):  # no thread waits to run alone any more
            pass

    def late(waiting: Callable[[float | None], bool]) -> None:
        holder.__exit__(None, None, None)
        assert waiting(0.0)
        raise RuntimeError("cancelled")

    holder = turns.of([module], True, wait_uninterrupted)
    holder.__enter__()
    with pytest.raises(RuntimeError, match="cancelled"), turns.of([module], True, late):
        raise AssertionError("it was cancelled")
    with turns.of([module], True, cancelled):
        pass
    assert not turns._requests


def test_requests_that_replace_attention_give_their_own_pictures() -> None:
    """Perturbed attention replaces processors at the start of a call, and restores them."""
    name = "StableDiffusionPAGInpaintPipeline"
    own, other = (pipe_of(name, lambda: sd(**LEAST)) for _ in range(2))
    pipe = maskfx.compile(other, quality="all-steps")

    def given(i: int) -> dict[str, Any]:
        scale = 0.0 if i == 1 else 3.0  # without, the call leaves attention as it is
        called = call_of(PIPES[name], i, white(), pag_scale=scale, strength=1.0)
        return {**called, "num_inference_steps": 3 + 2 * i}

    wanted = [latents(own, **given(i)) for i in range(3)]
    with maskfx.Engine() as engine:
        tickets = [engine.submit(pipe, **given(i), output_type="latent") for i in range(3)]
        found = [ticket.result(120).images for ticket in tickets]
    for one, another in zip(found, wanted, strict=True):
        assert distance(one, another) < 1e-4
