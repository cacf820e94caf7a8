"""ControlNets and their denoiser: one engine step, in one process or beside one another."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import maskfx
from maskfx.engine.processes.helper_processes import HelperProcess
from maskfx.engine.processes.services import NetServices, OwnProcesses
from maskfx.engine.processes.step_process import StepProcess
from maskfx.ir.late import LateTensor, is_late, wait_for
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.step_batches import StepBatches
from maskfx.runtime.step_executor import SharedAdapters
from maskfx.runtime.transport.sent_cache import SentCache
from maskfx.runtime.transport.shared_tensors import TensorSender
from maskfx.runtime.transport.tensor_transport import Unsendable
from tests.factories import more_pipelines  # noqa: F401 - adds pipelines
from tests.factories.lora import update_of
from tests.factories.masks import MASKS
from tests.factories.pipelines import PIPES, anew, call_of, square
from tests.factories.run_programs import programs
from tests.factories.zoo import ZOO

FLUX = "FluxControlNetInpaintPipeline"
NAMES = [
    FLUX,
    pytest.param("StableDiffusionControlNetInpaintPipeline", marks=pytest.mark.slow),
    pytest.param("StableDiffusionControlNetInpaintPipeline-multi", marks=pytest.mark.slow),
    pytest.param("StableDiffusionXLControlNetInpaintPipeline", marks=pytest.mark.slow),
    pytest.param("StableDiffusionXLControlNetUnionInpaintPipeline", marks=pytest.mark.slow),
]
STEPS = 3


@cache
def compiled(name: str) -> Any:
    return maskfx.compile(PIPES[name].build(), quality="all-steps", programs=programs())


def pipeline(name: str) -> Any:
    """A pipeline that has recorded nothing yet."""
    return anew(name, compiled_pipe=compiled(name))


def arguments(name: str, seed: int = 1) -> dict[str, Any]:
    return {**call_of(PIPES[name], seed, square()), "output_type": "latent", "return_dict": False}


def steps_of(pipe: Any) -> int:
    """The steps of its last call; a strength below 1 leaves some out."""
    return int(getattr(pipe, "num_timesteps", STEPS))


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
        assert len(engine.steps) == steps_of(pipe)


@pytest.mark.parametrize("name", NAMES)
def test_a_net_in_a_process_of_its_own_gives_the_same_picture(name: str) -> None:
    pipe = pipeline(name)
    pipe(**arguments(name, 0))
    alone = made(pipe(**arguments(name)))
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        found = made(engine.submit(pipe, **arguments(name)).result())
        counts = engine.services.counts()
        assert counts.processes == len(pipeline_state_of(pipe).denoisers) - 1
        assert counts.computed_here == 0
        assert len(engine.steps) == steps_of(pipe)
        again = made(engine.submit(pipe, **arguments(name)).result())
    assert float((found - alone).norm() / alone.norm()) < 1e-5
    assert torch.equal(again, found)


@pytest.mark.slow
def test_a_process_that_is_killed_while_its_result_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = pipeline(FLUX)
    pipe(**arguments(FLUX, 0))
    alone = made(pipe(**arguments(FLUX)))
    original = StepProcess._ask
    kills: list[int] = []

    def killed(self: StepProcess, process: Any, *rest: Any) -> Any:
        if process.parts and not kills:  # asked for the second time
            kills.append(process.child.pid)
            threading.Timer(0.05, os.kill, (kills[0], signal.SIGKILL)).start()
            os.kill(kills[0], signal.SIGSTOP)  # it never answers
        return original(self, process, *rest)

    monkeypatch.setattr(StepProcess, "_ask", killed)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        found = made(engine.submit(pipe, **arguments(FLUX)).result(timeout=300))
        (service,) = engine.services._services
        assert kills
        assert service.restarts == 1
        assert service.computed_here == 0, "another process should have computed it"
        assert service.pids
        assert kills[0] not in service.pids
    assert float((found - alone).norm() / alone.norm()) < 1e-5


def test_the_denoiser_computes_while_its_net_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read its other inputs when the net's result arrives."""
    pipe = pipeline(FLUX)
    pipe(**arguments(FLUX, 0))
    pipe(**arguments(FLUX))
    events: list[str] = []
    original = StepProcess._ask

    def slow(self: StepProcess, process: Any, *rest: Any) -> Any:
        result = original(self, process, *rest)
        time.sleep(0.5)
        events.append("net")
        return result

    monkeypatch.setattr(StepProcess, "_ask", slow)
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    watched = StepBatches.run

    def seen(self: Any, calls: Any, *split: Any) -> Any:
        if self is denoiser._batches:
            late = [v for c in calls for v in c.inputs.values if is_late(v)]
            events.append(f"denoiser with {len(late)} late")
        return watched(self, calls, *split)

    monkeypatch.setattr(StepBatches, "run", seen)
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

    def fails(self: StepProcess, process: Any, *rest: Any) -> Any:
        raise RuntimeError("the net fails")

    with monkeypatch.context() as patch:
        patch.setattr(StepProcess, "_ask", fails)
        with maskfx.Engine(own_process=["controlnet"]) as engine:
            failing = engine.submit(pipe, **arguments(FLUX))
            with pytest.raises(RuntimeError, match="the net fails"):
                failing.result()
    with maskfx.Engine() as engine:
        assert torch.equal(made(engine.submit(pipe, **arguments(FLUX)).result()), alone)


class Wire:
    """What a step process asks its process for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[bool] = []  # by edit: whether its recording's contents went along
        self.dropped: list[int] = []
        self.fails = 0  # questions that fail from here on
        original, packs = HelperProcess.run, TensorSender.pack

        def pack(sender: Any, steps: Any) -> Any:
            caches = [getattr(step, "cache", None) for step in steps]
            self.sent += [c.contents is not None for c in caches if isinstance(c, SentCache)]
            return packs(sender, steps)

        def run(process: Any, key: Any, method: str, args: Any, *rest: Any) -> Any:
            self.dropped += args[1].contents
            if self.fails:
                self.fails -= 1
                raise Unsendable("it can't be sent")
            return original(process, key, method, args, *rest)

        monkeypatch.setattr(HelperProcess, "run", run)
        monkeypatch.setattr(TensorSender, "pack", pack)


def edits(denoiser: Any) -> list[maskfx.EditStep]:
    case = ZOO["FluxControlNetModel"]
    inputs = case.inputs(case.sizes[0], 0)
    _, cache = denoiser.record(**inputs)
    mask = MASKS["stroke"](case.mask_shape(case.sizes[0]), 0)
    return [maskfx.EditStep(inputs, mask, cache)]


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """A net, its process, and an edit of it."""
    denoiser = maskfx.compile(ZOO["FluxControlNetModel"].build(), programs=programs())
    denoiser.share_memory()
    process = StepProcess(denoiser, Path(programs()))
    yield denoiser, process
    process.stop()


def same(found: Any, wanted: Any) -> bool:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs if isinstance(b, Tensor))


def test_a_recording_is_sent_once_and_dropped_with_its_last_reference(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser, process = alone
    with torch.no_grad():
        steps = edits(denoiser)
        wanted = denoiser.edit(steps)
        wire = Wire(monkeypatch)
        for _ in range(3):
            assert same(process.run(denoiser, steps), wanted)
        assert wire.sent == [True, False, False]
        denoiser.forget()  # the denoiser's memos hold recordings too
        for _ in range(2):
            steps = edits(denoiser)
            gc.collect()
            process.run(denoiser, steps)
    assert len(set(wire.dropped)) == 2
    assert process.computed_here == 0


def test_a_recording_that_may_not_have_arrived_is_sent_again(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser, process = alone
    with torch.no_grad():
        steps = edits(denoiser)
        wanted = denoiser.edit(steps)
        wire = Wire(monkeypatch)
        wire.fails = 1
        before = process.computed_here
        assert same(process.run(denoiser, steps), wanted), "computed here"
        assert process.computed_here == before + 1
        assert same(process.run(denoiser, steps), wanted)
    assert wire.sent == [True, True]


def test_changed_weights_are_used() -> None:
    denoiser = maskfx.compile(ZOO["FluxControlNetModel"].build(), programs=programs())
    weight = next(p for n, p in denoiser.module.named_parameters() if n.endswith("to_q.weight"))
    services = NetServices(OwnProcesses(("controlnet",)))
    try:
        with torch.no_grad():
            services.lease("a request", {"controlnet": denoiser})
            service = services.of(denoiser)
            assert service is not None
            service.run(denoiser, edits(denoiser))
            (first,) = service.pids
            weight.mul_(1.5)
            other = services.of(denoiser)
            assert other is not None
            assert other is not service
            assert not service.pids
            steps = edits(denoiser)
            assert same(other.run(denoiser, steps), denoiser.edit(steps))
            assert other.computed_here == 0
            assert other.pids != [first]
    finally:
        services.close()


def test_sharing_its_weights_forgets_no_capture() -> None:
    denoiser = maskfx.compile(ZOO["FluxControlNetModel"].build(), programs=programs())
    with torch.no_grad():
        steps = edits(denoiser)
        before, known = denoiser.edit(steps), denoiser.compilations[0]
        denoiser.share_memory()
        assert same(denoiser.edit(steps), before)
    assert denoiser.compilations[0] is known
    assert all(p.is_shared() for p in denoiser.module.parameters())


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


def test_a_process_has_adapters_that_members_share_in_its_weights(alone: Any) -> None:
    """As measured there, in memory of its own; taken out before a step without them."""
    denoiser, process = alone
    case = ZOO["FluxControlNetModel"]
    inputs, own = case.inputs(case.sizes[0], 0), (update_of(denoiser.module, 4, 1),)
    steps: list[Any] = [maskfx.RecordStep(inputs, own), maskfx.DenseStep(inputs, own)]
    plain = maskfx.DenseStep(inputs)
    before = [value.clone() for value in denoiser.module.parameters()]
    here = process.computed_here
    with torch.no_grad():
        wanted, (without,) = denoiser.step(steps), process.run(denoiser, [plain])
        for left in range(8, 0, -1):
            found = process.run(denoiser, steps, SharedAdapters(own, 32, left))
            pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
            numbers = [(a, b) for a, b in pairs if isinstance(b, Tensor)]
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in numbers)
        assert all(map(torch.equal, denoiser.module.parameters(), before))
        (again,) = process.run(denoiser, [plain])
    chosen = denoiser.in_place.elsewhere["its process"]
    assert chosen.costs.steps_in_place >= 2
    assert not chosen.written
    results = pytree.tree_leaves(again), pytree.tree_leaves(without)
    assert all(map(torch.equal, *results)), "the weights have their bits again"
    assert "In its process: Adapters that all members" in denoiser.explain()
    assert process.computed_here == here
