"""ControlNets in processes of their own, whose results are read one step late."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.engine.processes.step_process import StepProcess
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.step_batches import StepBatches
from tests.engine.test_late_inputs import arguments, made, pipeline
from tests.factories.pipelines import distance

FLUX = "FluxControlNetInpaintPipeline"
MULTI = "StableDiffusionControlNetInpaintPipeline-multi"
UNION = "StableDiffusionXLControlNetUnionInpaintPipeline"
NAMES = [FLUX, MULTI, UNION]
LATE = replace(maskfx.Quality.of("all-steps"), control="late")
STEPS = 4


def late(name: str, seed: int = 1) -> dict[str, Any]:
    return {**arguments(name, seed), "quality": LATE, "num_inference_steps": STEPS}


def recorded(name: str) -> Any:
    """A pipeline with a template."""
    pipe = pipeline(name)
    pipe(**{**arguments(name, 0), "num_inference_steps": STEPS})
    return pipe


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_that_of_a_call_without_engine(name: str) -> None:
    pipe = recorded(name)
    alone = made(pipe(**late(name)))
    with maskfx.Engine() as engine:
        assert torch.equal(made(engine.submit(pipe, **late(name)).result()), alone)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        found = made(engine.submit(pipe, **late(name)).result())
        again = made(engine.submit(pipe, **late(name)).result())
    assert distance(found, alone) < 1e-5
    assert torch.equal(again, found)


def test_no_step_waits_for_its_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the network ends only when the denoiser has begun the next one."""
    pipe = recorded(FLUX)
    alone = made(pipe(**late(FLUX)))
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    began = [threading.Event() for _ in range(STEPS)]
    waited: list[bool] = []
    ask, run = StepProcess._ask, StepBatches.run

    def slow(self: StepProcess, *given: Any) -> Any:
        result = ask(self, *given)
        number = len(waited)
        waited.append(number == 0 or began[number + 1].wait(20))
        return result

    def counted(self: Any, *given: Any) -> Any:
        if self is denoiser._batches:
            next(event for event in began if not event.is_set()).set()
        return run(self, *given)

    monkeypatch.setattr(StepProcess, "_ask", slow)
    monkeypatch.setattr(StepBatches, "run", counted)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        found: Tensor = made(engine.submit(pipe, **late(FLUX)).result())
    assert waited == [True] * (STEPS - 1)
    assert distance(found, alone) < 1e-5


@pytest.mark.slow
def test_late_and_timely_requests_share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = recorded(FLUX)
    given = [late(FLUX), {**late(FLUX, 2), "quality": "all-steps"}]
    alone = [made(pipe(**{**one, "generator": torch.Generator().manual_seed(7)})) for one in given]
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0), own_process=["controlnet"]) as engine:
        tickets = [
            engine.submit(pipe, **{**one, "generator": torch.Generator().manual_seed(7)})
            for one in given
        ]
        found = [made(ticket.result()) for ticket in tickets]
        assert max(step.requests for step in engine.steps) == 2
    for one, other in zip(found, alone, strict=True):
        assert distance(one, other) < 1e-4


@pytest.mark.slow
def test_an_error_of_a_step_that_nothing_waited_for_fails_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = recorded(FLUX)
    calls: list[int] = []
    ask = StepProcess._ask

    def fails(self: StepProcess, *given: Any) -> Any:
        calls.append(0)
        if len(calls) > 1:
            raise RuntimeError("the network fails")
        return ask(self, *given)

    monkeypatch.setattr(StepProcess, "_ask", fails)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        failing = engine.submit(pipe, **late(FLUX))
        with pytest.raises(RuntimeError, match="the network fails"):
            failing.result()
    assert len(calls) == 2
