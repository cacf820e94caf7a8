"""ControlNets and their denoiser: one engine step, in one process or beside one another."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.engine import step_process
from maskfx.engine.step_process import StepProcess
from maskfx.ir.late import LateTensor, is_late, wait_for
from maskfx.pipelines.compile import pipeline_state_of
from tests.factories.pipelines import PIPES, anew, call_of, square

FLUX = "FluxControlNetInpaintPipeline"
NAMES = [
    FLUX,
    pytest.param("StableDiffusionControlNetInpaintPipeline", marks=pytest.mark.slow),
    pytest.param("StableDiffusionControlNetInpaintPipeline-multi", marks=pytest.mark.slow),
    pytest.param("StableDiffusionXLControlNetInpaintPipeline", marks=pytest.mark.slow),
]
STEPS = 3


@cache
def programs() -> str:
    """A directory of compiled programs, from which the nets' processes load theirs."""
    return tempfile.mkdtemp(prefix="maskfx-tests-")


@cache
def compiled(name: str) -> Any:
    return maskfx.compile(PIPES[name].build(), quality="all-steps", programs=programs())


def pipeline(name: str) -> Any:
    """A pipeline that has recorded nothing yet."""
    return anew(name, compiled_pipe=compiled(name))


def arguments(name: str, seed: int = 1) -> dict[str, Any]:
    return {**call_of(PIPES[name], seed, square()), "output_type": "latent", "return_dict": False}


def made(result: Any) -> Tensor:
    found: Tensor = result[0]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_nets_and_denoiser_share_an_engine_step(name: str) -> None:
    """Bit for bit as by two steps; a denoising step is one step of the engine."""
    pipe = pipeline(name)
    first = made(pipe(**arguments(name, 0)))  # records the template
    alone = made(pipe(**arguments(name)))
    assert not torch.equal(first, alone)
    with maskfx.Engine() as engine:
        ticket = engine.submit(pipe, **arguments(name))
        assert torch.equal(made(ticket.result()), alone)
        assert len(engine.steps) == STEPS


@pytest.mark.parametrize("name", NAMES)
def test_a_net_in_a_process_of_its_own_gives_the_same_picture(name: str) -> None:
    pipe = pipeline(name)
    pipe(**arguments(name, 0))
    alone = made(pipe(**arguments(name)))
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        found = made(engine.submit(pipe, **arguments(name)).result())
        processes = list(engine._processes.values())
        assert processes
        assert all(process.pid for process in processes)
        assert sum(process.sent_here for process in processes) == 0
        assert len(engine.steps) == STEPS
        again = made(engine.submit(pipe, **arguments(name)).result())
    assert float((found - alone).norm() / alone.norm()) < 1e-5
    assert torch.equal(again, found)


def test_a_process_that_is_killed_while_its_result_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = pipeline(FLUX)
    pipe(**arguments(FLUX, 0))
    alone = made(pipe(**arguments(FLUX)))
    original = StepProcess._ask
    kills: list[int] = []

    def killed(self: StepProcess, denoiser: Any, steps: Any) -> Any:
        if self.pid is not None and not kills:  # started, and asked for the second time
            kills.append(self.pid)
            threading.Timer(0.05, os.kill, (self.pid, signal.SIGKILL)).start()
            os.kill(self.pid, signal.SIGSTOP)  # it never answers
        return original(self, denoiser, steps)

    monkeypatch.setattr(StepProcess, "_ask", killed)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        found = made(engine.submit(pipe, **arguments(FLUX)).result(timeout=120))
        (process,) = engine._processes.values()
        assert kills
        assert process.restarts == 1
        assert process.sent_here >= 1
        assert process.pid not in (None, *kills), "no other process was started"
    assert float((found - alone).norm() / alone.norm()) < 1e-5


def test_the_denoiser_computes_while_its_net_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read its other inputs when the net's result arrives."""
    pipe = pipeline(FLUX)
    pipe(**arguments(FLUX, 0))
    pipe(**arguments(FLUX))
    events: list[str] = []
    original = StepProcess._ask

    def slow(self: StepProcess, denoiser: Any, steps: Any) -> Any:
        result = original(self, denoiser, steps)
        time.sleep(0.5)
        events.append("net")
        return result

    monkeypatch.setattr(StepProcess, "_ask", slow)
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    watched = type(denoiser)._run

    def seen(self: Any, calls: Any) -> Any:
        if self is denoiser:
            late = [v for c in calls for v in c.inputs.values if is_late(v)]
            events.append(f"denoiser with {len(late)} late")
        return watched(self, calls)

    monkeypatch.setattr(type(denoiser), "_run", seen)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        engine.submit(pipe, **arguments(FLUX)).result()
    runs = [e for e in events if e != "net"]
    assert len(runs) == STEPS
    assert all(e != "denoiser with 0 late" for e in runs), events
    assert events[0] == runs[0], "the denoiser began after the net had ended"


def test_a_failing_net_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline(FLUX)
    pipe(**arguments(FLUX, 0))
    alone = made(pipe(**arguments(FLUX)))

    def fails(self: StepProcess, denoiser: Any, steps: Any) -> Any:
        raise RuntimeError("the net fails")

    with monkeypatch.context() as patch:
        patch.setattr(StepProcess, "_ask", fails)
        with maskfx.Engine(own_process=["controlnet"]) as engine:
            failing = engine.submit(pipe, **arguments(FLUX))
            with pytest.raises(RuntimeError, match="the net fails"):
                failing.result()
    with maskfx.Engine() as engine:
        assert torch.equal(made(engine.submit(pipe, **arguments(FLUX)).result()), alone)


def test_a_recording_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline(FLUX)
    pipe(**arguments(FLUX, 0))
    sent: list[bool] = []
    original = StepProcess._sent

    def counted(self: StepProcess, step: Any) -> Any:
        found = original(self, step)
        cache: Any = getattr(found, "cache", None)
        if isinstance(cache, step_process.SentCache):
            sent.append(cache.contents is not None)
        return found

    monkeypatch.setattr(StepProcess, "_sent", counted)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        for seed in (1, 2):
            engine.submit(pipe, **arguments(FLUX, seed)).result()
    assert sent.count(True) == STEPS
    assert sent.count(False) == STEPS


def test_a_late_tensor_waits_where_it_is_read() -> None:
    ready, value = threading.Event(), torch.arange(6.0).view(2, 3)

    def arrive() -> Tensor:
        assert ready.wait(10)
        return value

    late = LateTensor(value.to("meta"), torch.device("cpu"), arrive, ready.is_set)
    assert late.shape == (2, 3)
    assert late.dtype == torch.float32
    assert is_late(late)
    threading.Timer(0.05, ready.set).start()
    assert torch.equal(late + 1, value + 1)
    assert not is_late(late)
    assert wait_for(late) is value


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("maskfx-step")]
