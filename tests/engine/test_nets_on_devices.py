"""Nets on a device that isn't the CPU: their processes are on one too, and pictures stay the same.

The device is the emulated one of `tests/factories/emulated.py`, of which there are two.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import maskfx
from maskfx.engine.processes import served_denoiser
from maskfx.engine.processes.net_devices import spread
from maskfx.engine.processes.net_service import NetService
from maskfx.engine.processes.served_denoiser import CachesOnDevice
from maskfx.engine.processes.services import NetServices, OwnProcesses
from maskfx.engine.processes.step_process import StepProcess
from maskfx.errors import InputError
from maskfx.ir.late import is_late
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.step_batches import StepBatches
from tests.factories import (
    emulated,
    masks,
    more_pipelines,  # noqa: F401 - adds pipelines
)
from tests.factories.lora import adapter_of, update_of
from tests.factories.pipelines import PIPES, anew, call_of, distance, plain, square, white
from tests.factories.run_programs import programs
from tests.factories.zoo import ZOO

FLUX = "FluxControlNetInpaintPipeline"
NET = "FluxControlNetModel"
STEPS = 3
TOGETHER = maskfx.BatchPolicy(patience=2.0)
DEVICE, OTHER = (torch.device(emulated.NAME, number) for number in (0, 1))


def arguments(device: torch.device, seed: int = 1, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = emulated.to(call_of(PIPES[FLUX], seed, square(8, 14)), device)
    return {**given, "output_type": "latent", "return_dict": False, **more}


def whole(given: dict[str, Any]) -> dict[str, Any]:
    """The same call without a mask."""
    return {name: value for name, value in given.items() if name != "mask_image"}


@cache
def bases(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Two compiled pipelines with other denoisers and the same net."""
    one, other = (PIPES[FLUX].build().to(device, dtype) for _ in range(2))
    for parameter in other.transformer.parameters():
        parameter.data.mul_(1.1)
    other.controlnet = one.controlnet
    given: dict[str, Any] = {"quality": "all-steps", "programs": programs(), "plans": False}
    return maskfx.compile(one, **given), maskfx.compile(other, **given)


def pair(device: torch.device = DEVICE) -> list[Any]:
    """These pipelines, which have recorded a template each."""
    found = [anew(FLUX, compiled_pipe=pipe) for pipe in bases(device)]
    for pipe in found:
        pipe(**arguments(device, 0))
    return found


def made(result: Any) -> Tensor:
    found: Tensor = result[0]
    return found


def near(found: Tensor, wanted: Tensor, within: float = 1e-4) -> bool:
    return found.device == wanted.device and distance(found.cpu(), wanted.cpu()) < within


def assert_pictures_stay(device: torch.device, settings: OwnProcesses) -> tuple[Any, ...]:
    """Edits by several recordings, with and without adapters; returns the net's devices."""
    pipe = anew(FLUX, compiled_pipe=bases(device)[0])
    lora = [adapter_of(plain(FLUX), 4, 1, "transformer")]
    pipe(**arguments(device, 0))
    more: list[dict[str, Any]] = [
        {"seed": 2, "mask_image": white()},
        {},
        {"lora": lora},
        {"seed": 3},
    ]
    wanted = [made(pipe(**arguments(device, **own))) for own in more]
    assert distance(wanted[1].cpu(), wanted[2].cpu()) > 1e-3
    with maskfx.Engine(own_process=settings) as engine:
        for _ in range(2):
            tickets = [engine.submit(pipe, **arguments(device, **own)) for own in more]
            for ticket, one in zip(tickets, wanted, strict=True):
                assert near(made(ticket.result(300)), one)
        new = anew(FLUX, compiled_pipe=pipe)  # the process records its template
        engine.record(new, **whole(arguments(device, 0))).result(300)
        before = engine.services.counts()
        assert near(made(engine.submit(new, **arguments(device)).result(300)), wanted[1])
        after = engine.services.counts()
        [service] = engine.services._services
        assert (after.computed_here, after.restarts) == (0, 0)
        recorded = sum(entry.nbytes for entry in recordings(new, "controlnet"))
        assert after.sent - before.sent < recorded / 2, "its own recordings were sent to it"
        return service.devices


def recordings(pipe: Any, name: str) -> list[Any]:
    """The entries of the steps of one denoiser in memory."""
    library = pipeline_state_of(pipe).library
    return [e for key, e in library.tiers._kept.items() if key.model.startswith(f"{name} ")]


@pytest.mark.slow
@pytest.mark.parametrize("given", [(), (str(DEVICE),)])
def test_pictures_are_those_of_one_process(given: tuple[str, ...]) -> None:
    settings = OwnProcesses(("controlnet",), devices=given)
    assert assert_pictures_stay(DEVICE, settings) == ((DEVICE,) if given else (OTHER,))


@pytest.mark.slow
def test_a_step_has_members_of_every_kind() -> None:
    """Those of half the sites read what the process recorded, or what was recorded here."""
    case, denoiser = ZOO[NET], maskfx.compile(ZOO[NET].build().to(DEVICE), programs=programs())
    services = NetServices(OwnProcesses(("controlnet",)))
    inputs = [emulated.to(case.inputs(size, n), DEVICE) for n, size in enumerate(case.sizes[:2])]
    own = (update_of(denoiser.module, 4, 1),)
    try:
        with torch.no_grad():
            _, here = denoiser.record(**inputs[0])
            services.lease("a request", {"controlnet": denoiser})
            service = services.of(denoiser)
            assert service is not None
            recorded: Any = service.run(denoiser, [maskfx.RecordStep(inputs[1])])[0]
            there = recorded[1]
            steps: list[Any] = [
                maskfx.EditStep(inputs[0], mask_of(0), here),
                maskfx.DenseStep(inputs[0]),
                maskfx.EditStep(inputs[1], mask_of(1), there),
                maskfx.RecordStep(inputs[0]),
                maskfx.DenseStep(inputs[1], own),
            ]
            wanted = denoiser.step(steps)
            found = service.run(denoiser, steps)
        assert service.computed_here == 0
    finally:
        services.close()
    for one, other in zip(found, wanted, strict=True):
        pairs = zip(outputs(one), outputs(other), strict=True)
        assert all(near(mine, theirs) for mine, theirs in pairs)


def mask_of(number: int) -> Tensor:
    case = ZOO[NET]
    return masks.random(case.mask_shape(case.sizes[number]), number)


def outputs(result: Any) -> list[Tensor]:
    """The tensors of a result, without those of a recording."""
    output = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


@pytest.mark.gpu
def test_pictures_are_those_of_one_process_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.backends.cudnn.allow_tf32 = False  # the oracle is for fp32
    found = assert_pictures_stay(torch.device("cuda", 0), OwnProcesses(("controlnet",)))
    assert found == (torch.device("cuda", min(1, torch.cuda.device_count() - 1)),)


@pytest.mark.slow
def test_two_pipelines_share_the_process_and_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes, sizes = pair(), list[int]()
    alone = [made(pipe(**arguments(DEVICE, 1 + i))) for i, pipe in enumerate(pipes)]
    assert distance(alone[0].cpu(), alone[1].cpu()) > 1e-3
    original = NetService.run

    def run(service: NetService, denoiser: Any, steps: Sequence[Any], *more: Any) -> Any:
        sizes.append(len(steps))
        return original(service, denoiser, steps, *more)

    monkeypatch.setattr(NetService, "run", run)
    with maskfx.Engine(TOGETHER, own_process=["controlnet"]) as engine:
        tickets = [engine.submit(p, **arguments(DEVICE, 1 + i)) for i, p in enumerate(pipes)]
        found = [made(ticket.result(300)) for ticket in tickets]
        counts = engine.services.counts()
    assert (counts.processes, counts.computed_here) == (1, 0)
    assert max(sizes) == 2, "no step of the net had both requests"
    assert all(map(near, found, alone))


@pytest.mark.slow
def test_replicas_on_devices_of_their_own_share_a_batch() -> None:
    pipes = pair()
    alone = [made(pipe(**arguments(DEVICE, 1 + i))) for i, pipe in enumerate(pipes)]
    settings = OwnProcesses(("controlnet",), replicas=2)
    with maskfx.Engine(TOGETHER, own_process=settings) as engine:
        tickets = [engine.submit(p, **arguments(DEVICE, 1 + i)) for i, p in enumerate(pipes)]
        found = [made(ticket.result(300)) for ticket in tickets]
        counts = engine.services.counts()
        [service] = engine.services._services
        answered = [bool(replica.traffic[1]) for replica in service.replicas]
    assert (counts.processes, counts.computed_here) == (2, 0)
    assert counts.nbytes == 2 * sum(p.nbytes for p in pipes[0].controlnet.parameters())
    assert all(answered)
    assert all(map(near, found, alone))


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_step_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pair()[0]
    alone = made(pipe(**arguments(DEVICE)))
    original = StepProcess._ask
    killed: list[int] = []

    def ask(self: StepProcess, process: Any, *rest: Any) -> Any:
        if process.parts and not killed:  # its second step
            killed.append(process.child.pid)
            threading.Timer(0.05, os.kill, (killed[0], signal.SIGKILL)).start()
            os.kill(killed[0], signal.SIGSTOP)  # it never answers
        return original(self, process, *rest)

    monkeypatch.setattr(StepProcess, "_ask", ask)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        found = made(engine.submit(pipe, **arguments(DEVICE)).result(300))
        counts = engine.services.counts()
    assert killed
    assert (counts.restarts, counts.starts, counts.computed_here) == (1, 2, 0)
    assert near(found, alone)


@pytest.mark.slow
def test_the_denoiser_computes_while_the_net_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pair()[0]
    pipe(**arguments(DEVICE))
    events: list[str] = []
    original, runs = StepProcess._ask, StepBatches.run
    batches = pipeline_state_of(pipe).denoisers["transformer"]._batches

    def slow(self: StepProcess, process: Any, *rest: Any) -> Any:
        result = original(self, process, *rest)
        time.sleep(0.5)
        events.append("net")
        return result

    def seen(self: Any, calls: Any, *split: Any) -> Any:
        if self is batches:
            late = any(is_late(value) for call in calls for value in call.inputs.values)
            events.append("denoiser without it" if late else "denoiser")
        return runs(self, calls, *split)

    monkeypatch.setattr(StepProcess, "_ask", slow)
    monkeypatch.setattr(StepBatches, "run", seen)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        engine.submit(pipe, **arguments(DEVICE)).result(300)
    assert events == ["denoiser without it", "net"] * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    pipe = anew(FLUX, compiled_pipe=bases(DEVICE, dtype)[0])

    def call() -> dict[str, Any]:
        given = arguments(DEVICE).items()
        return {name: halved(value, dtype) for name, value in given}

    pipe(**call())
    alone = made(pipe(**call()))
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        found = made(engine.submit(pipe, **call()).result(300))
        assert engine.services.counts().computed_here == 0
    assert found.dtype == alone.dtype
    assert near(found.float(), alone.float(), 2e-2)


def halved(value: Any, dtype: torch.dtype) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value


# Which device, and which nets stay.


def test_processes_are_spread_over_the_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread(DEVICE, 2, Counter()) == [OTHER, OTHER]
    assert spread(OTHER, 1, Counter()) == [DEVICE]
    assert spread(torch.device("cpu"), 2, Counter()) == [torch.device("cpu")] * 2
    module = torch.get_device_module(emulated.NAME)
    monkeypatch.setattr(module, "device_count", lambda: 4)
    four = [torch.device(emulated.NAME, number) for number in range(4)]
    assert spread(four[2], 4, Counter()) == [four[3], four[0], four[1], four[3]]
    assert spread(four[0], 2, Counter({four[1]: 1})) == four[2:]
    monkeypatch.setattr(module, "device_count", lambda: 1)
    assert spread(DEVICE, 2, Counter()) == [DEVICE, DEVICE]


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        (("gpu zero",), "devices has 'gpu zero'"),
        ((f"{emulated.NAME}:0",) * 2, "2 devices for 1 names"),
        (("cpu",), f"weights are on {emulated.NAME}:0; give a visible device of that type"),
        ((f"{emulated.NAME}:7",), "give a visible device of that type"),
    ],
)
def test_a_device_that_cannot_be_is_refused(devices: tuple[str, ...], match: str) -> None:
    denoiser = maskfx.compile(ZOO[NET].build().to(DEVICE))

    def lease() -> None:
        services = NetServices(OwnProcesses(("controlnet",), devices=devices))
        services.lease("a request", {"controlnet": denoiser})

    with pytest.raises(InputError, match=match):
        lease()


def hooked(module: nn.Module) -> nn.Module:
    module._hf_hook = object()  # type: ignore[assignment]
    return module


class Narrow(nn.Parameter):
    """A weight of a class that a package for quantization could have."""


def narrowed(module: nn.Module) -> nn.Module:
    for part in module.modules():
        for name, value in list(part._parameters.items()):
            part._parameters[name] = None if value is None else Narrow(value.detach(), False)
    return module


def torn(module: nn.Module) -> nn.Module:
    module.get_submodule("x_embedder").to(OTHER)
    return module


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "its weights are offloaded"),
        (narrowed, "its weights are quantized (Narrow)"),
        (torn, f"its weights are on {DEVICE}, {OTHER}; move it to one device"),
    ],
)
def test_why_a_net_on_a_device_gets_no_process(
    change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    denoiser = maskfx.compile(change(ZOO[NET].build().to(DEVICE)))
    services = NetServices(OwnProcesses(("controlnet",)))
    with caplog.at_level("WARNING", "maskfx.engine.processes.services"):
        services.lease("a request", {"controlnet": denoiser})
        assert services.of(denoiser) is None
    services.close()
    assert reason in caplog.text


def test_recordings_that_were_read_last_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def recording(number: int) -> StepCache:
        output = [torch.full((256,), float(number))]
        return StepCache("program", {}, torch.float32, output, {})

    one, two, three = map(recording, range(3))
    nbytes = float(one.nbytes())
    monkeypatch.setattr(served_denoiser, "free_memory", lambda device: 4 * 2 * nbytes)
    copies = CachesOnDevice(OTHER)
    first = copies.of(one)
    assert first.output[0].device == OTHER
    assert torch.equal(first.output[0].cpu(), one.output[0])
    copies.of(two)
    assert copies.of(one) is first
    copies.of(three)  # in place of the second one
    assert copies.of(one) is first
    assert set(copies._copies) == {id(one), id(three)}
    copies.drop(one)
    copies.drop(two)
    assert set(copies._copies) == {id(three)}
    monkeypatch.setattr(served_denoiser, "free_memory", lambda device: 2 * nbytes)
    assert CachesOnDevice(OTHER).of(one) is one, "it has no room"
    assert CachesOnDevice(torch.device("cpu")).of(one) is one
