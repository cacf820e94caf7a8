"""Nets as a service: one for all pipelines that have it, in replicas, within bytes, rows only."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.engine.processes.net_service import NetService, least_loaded
from maskfx.engine.processes.services import NetServices, OwnProcesses
from maskfx.engine.processes.step_process import StepProcess
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.runs.execute import next_group
from maskfx.runtime.identity import identity_of
from maskfx.runtime.transport.sendable import kept_by
from tests.factories import more_pipelines  # noqa: F401 - adds pipelines
from tests.factories.pipelines import PIPES, anew, call_of, distance, square
from tests.factories.run_programs import programs
from tests.factories.zoo import ZOO

FLUX = "FluxControlNetInpaintPipeline"
MULTI = "StableDiffusionControlNetInpaintPipeline-multi"
UNION = "StableDiffusionXLControlNetUnionInpaintPipeline"
STEPS = 3
TOGETHER = maskfx.BatchPolicy(patience=2.0)


def compiled(pipe: Any) -> Any:
    return maskfx.compile(pipe, quality="all-steps", programs=programs())


def changed(module: nn.Module, factor: float = 1.1) -> nn.Module:
    for parameter in module.parameters():
        parameter.data.mul_(factor)
    return module


@cache
def bases(kind: str, name: str) -> tuple[Any, Any]:
    """Two pipelines with other denoisers, and a net that is the same, equal, or another."""
    one, other = PIPES[name].build(), PIPES[name].build()
    changed(other.unet if name == UNION else other.transformer)
    if kind == "same":
        other.controlnet = one.controlnet
    if kind == "other":
        changed(other.controlnet)
    return compiled(one), compiled(other)


@cache
def single() -> Any:
    return compiled(PIPES[FLUX].build())


def pair(kind: str, name: str = FLUX) -> list[Any]:
    """These pipelines, which have recorded a template each."""
    found = [anew(name, compiled_pipe=pipe) for pipe in bases(kind, name)]
    for pipe in found:
        pipe(**arguments(name, 0))
    return found


def arguments(name: str, seed: int = 1, **more: Any) -> dict[str, Any]:
    given = {**call_of(PIPES[name], seed, square(8, 14)), "output_type": "latent"}
    return {**given, "return_dict": False, **more}


def made(result: Any) -> Tensor:
    found: Tensor = result[0]
    return found


class Batches:
    """The numbers of steps that services computed together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        original = NetService.run

        def run(service: NetService, denoiser: Any, steps: Sequence[Any], *more: Any) -> Any:
            self.sizes.append(len(steps))
            return original(service, denoiser, steps, *more)

        monkeypatch.setattr(NetService, "run", run)


@dataclass
class Waiting:
    """A call of a denoiser, as far as groups of calls need it."""

    denoiser: Any
    behind: list[Any] = field(default_factory=list)

    def sources(self) -> list[Any]:
        return self.behind


@dataclass
class Elsewhere:
    """An executor that computes nothing."""

    joint: bool

    def run(self, denoiser: Any, steps: Sequence[Any], shared: Any = None) -> list[Any]:
        raise AssertionError("no step is computed")


def test_calls_of_several_denoisers_form_one_group_if_their_executor_joins_them() -> None:
    one, other, main = object(), object(), object()
    nets: list[Any] = [Waiting(one), Waiting(other), Waiting(one)]
    calls = [Waiting(main, nets[:1]), *nets]
    for joint, wanted in ((True, nets), (False, [nets[0], nets[2]])):
        executor = Elsewhere(joint)

        def executors(denoiser: Any, own: Elsewhere = executor) -> Elsewhere | None:
            return None if denoiser is main else own

        found: list[Any] = next_group(calls, executors)
        assert found == wanted


def is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [(FLUX, "same"), (FLUX, "equal"), (UNION, "same")])
def test_pipelines_with_one_net_share_its_process_and_its_batches(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes, batches = pair(kind, name), Batches(monkeypatch)
    alone = [made(pipe(**arguments(name, 1 + i))) for i, pipe in enumerate(pipes)]
    assert distance(alone[0], alone[1]) > 1e-3
    with maskfx.Engine(TOGETHER, own_process=["controlnet"]) as engine:
        tickets = [engine.submit(pipe, **arguments(name, 1 + i)) for i, pipe in enumerate(pipes)]
        found = [made(ticket.result(300)) for ticket in tickets]
        (service,) = engine.services._services
        pids = service.pids
        assert len(pids) == 1
        assert service.computed_here == 0
        assert max(batches.sizes) == 2, "no step of the net had both requests"
        assert len(engine.steps) < 2 * STEPS
    assert not any(map(is_running, pids))
    assert all(distance(a, b) < 1e-5 for a, b in zip(found, alone, strict=True))


@pytest.mark.slow
def test_nets_of_other_weights_have_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes, batches = pair("other"), Batches(monkeypatch)
    alone = [made(pipe(**arguments(FLUX))) for pipe in pipes]
    with maskfx.Engine(TOGETHER, own_process=["controlnet"]) as engine:
        tickets = [engine.submit(pipe, **arguments(FLUX)) for pipe in pipes]
        found = [made(ticket.result(300)) for ticket in tickets]
        assert len(engine.services._services) == 2
        assert engine.services.counts().processes == 2
        assert set(batches.sizes) == {1}
    assert all(distance(a, b) < 1e-5 for a, b in zip(found, alone, strict=True))


@pytest.mark.slow
def test_several_nets_of_a_request_have_a_process_each() -> None:
    pipe = anew(MULTI, compiled_pipe=compiled(PIPES[MULTI].build()))
    pipe(**arguments(MULTI, 0))
    alone = made(pipe(**arguments(MULTI)))
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        assert distance(made(engine.submit(pipe, **arguments(MULTI)).result(300)), alone) < 1e-5
        counts = engine.services.counts()
        assert (counts.processes, counts.computed_here) == (2, 0)
        assert len(engine.steps) == STEPS


def test_a_request_sends_rows_and_refers_to_what_is_there() -> None:
    pipe = anew(FLUX, compiled_pipe=single())
    pipe(**arguments(FLUX, 0))
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        first = made(engine.submit(pipe, **arguments(FLUX)).result(300))
        one = engine.services.counts()
        again = made(engine.submit(pipe, **arguments(FLUX)).result(300))
        two = engine.services.counts()
    assert torch.equal(first, again)
    cached = sum(entry.nbytes for entry in recordings(pipe, "controlnet"))
    assert one.sent > cached, "the recordings should have been sent"
    assert two.sent - one.sent < cached / 4, "they should not have been sent again"
    whole = STEPS * sum(t.nbytes for t in recordings(pipe, "controlnet")[0].cache.output)
    assert two.received - one.received < 0.6 * whole


def recordings(pipe: Any, name: str) -> list[Any]:
    """The entries of the steps of one denoiser in memory."""
    library = pipeline_state_of(pipe).library
    return [e for key, e in library.tiers._kept.items() if key.model.startswith(f"{name} ")]


@pytest.mark.slow
def test_recordings_made_by_the_process_are_there_already() -> None:
    """A template that it recorded is not sent to it."""
    pipe = anew(FLUX, compiled_pipe=single())
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        engine.record(pipe, **without_mask(arguments(FLUX, 0))).result(300)
        one = engine.services.counts()
        found = made(engine.submit(pipe, **arguments(FLUX)).result(300))
        two = engine.services.counts()
        assert two.computed_here == 0
    cached = sum(entry.nbytes for entry in recordings(pipe, "controlnet"))
    assert one.received > cached, "the process should have recorded the template"
    assert two.sent - one.sent < cached / 2
    assert distance(found, made(pipe(**arguments(FLUX)))) < 1e-5


def without_mask(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in ("mask_image",)}


@pytest.mark.slow
def test_replicas_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = pair("same")
    alone = [made(pipe(**arguments(FLUX, 1 + i))) for i, pipe in enumerate(pipes)]
    asked: list[tuple[int, int]] = []
    original = StepProcess.run

    def run(process: StepProcess, denoiser: Any, steps: Sequence[Any], *more: Any) -> Any:
        asked.append((id(process), len(steps)))
        return original(process, denoiser, steps, *more)

    monkeypatch.setattr(StepProcess, "run", run)
    settings = OwnProcesses(("controlnet",), replicas=2)
    with maskfx.Engine(TOGETHER, own_process=settings) as engine:
        tickets = [engine.submit(pipe, **arguments(FLUX, 1 + i)) for i, pipe in enumerate(pipes)]
        found = [made(ticket.result(300)) for ticket in tickets]
        counts = engine.services.counts()
    assert counts.processes == 2
    assert counts.computed_here == 0
    assert len({process for process, _ in asked}) == 2
    assert {size for _, size in asked} == {1}
    assert all(distance(a, b) < 1e-5 for a, b in zip(found, alone, strict=True))


def test_each_step_goes_to_the_replica_with_the_least_work() -> None:
    none = [[False, False]] * 4
    assert least_loaded([1, 1], none[:2]) == [0, 1]
    assert least_loaded([1, 5, 2, 2], none) == [1, 0, 1, 1]
    assert least_loaded([1, 1], [[False, True], [False, True]]) == [1, 0]


@pytest.mark.slow
def test_bytes_bound_the_nets_with_processes() -> None:
    """The processes of one of two nets end when the other's start, and begin again."""
    pipes = pair("other")
    alone = [made(pipe(**arguments(FLUX))) for pipe in pipes]
    nbytes = sum(p.nbytes for p in pipes[0].controlnet.parameters())
    settings = OwnProcesses(("controlnet",), nbytes=int(1.5 * nbytes))
    with maskfx.Engine(own_process=settings) as engine:
        seen: list[int] = []
        for number in (0, 1, 0):
            found = made(engine.submit(pipes[number], **arguments(FLUX)).result(300))
            assert distance(found, alone[number]) < 1e-5
            counts = engine.services.counts()
            assert counts.processes == 1
            assert counts.nbytes <= 1.5 * nbytes
            assert counts.computed_here == 0
            seen += [pid for one in engine.services._services for pid in one.pids]
        assert (counts.evictions, counts.starts, counts.hits) == (2, 3, 0)
        assert len(set(seen)) == 3
        engine.submit(pipes[0], **arguments(FLUX)).result(300)
        assert engine.services.counts().hits == 1
    assert not any(map(is_running, seen))


@pytest.mark.slow
def test_a_net_in_use_is_not_evicted_and_the_other_is_computed_here() -> None:
    pipes = pair("other")
    alone = [made(pipe(**arguments(FLUX))) for pipe in pipes]
    nbytes = sum(p.nbytes for p in pipes[0].controlnet.parameters())
    settings = OwnProcesses(("controlnet",), nbytes=int(1.5 * nbytes))
    with maskfx.Engine(TOGETHER, own_process=settings) as engine:
        tickets = [engine.submit(pipe, **arguments(FLUX)) for pipe in pipes]
        found = [made(ticket.result(300)) for ticket in tickets]
        counts = engine.services.counts()
        assert counts.computed_here >= 1
        assert counts.starts <= 2
    assert all(distance(a, b) < 1e-5 for a, b in zip(found, alone, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_go_on_after_their_process_was_lost(
    kill: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed, or hangs beyond its deadline, while a step of two pipelines is in flight."""
    pipes = pair("same")
    alone = [made(pipe(**arguments(FLUX, 1 + i))) for i, pipe in enumerate(pipes)]
    lost: list[int] = []
    original = StepProcess._ask

    def ask(self: StepProcess, process: Any, *rest: Any) -> Any:
        if process.parts and not lost:  # its second step
            lost.append(process.child.pid)
            os.kill(process.child.pid, signal.SIGSTOP)  # the step stays in flight
            if kill is signal.SIGKILL:
                threading.Timer(0.1, os.kill, (process.child.pid, kill)).start()
        return original(self, process, *rest)

    monkeypatch.setattr(StepProcess, "_ask", ask)
    settings = OwnProcesses(("controlnet",), seconds=30)
    with maskfx.Engine(TOGETHER, own_process=settings) as engine:
        tickets = [engine.submit(pipe, **arguments(FLUX, 1 + i)) for i, pipe in enumerate(pipes)]
        found = [made(ticket.result(200)) for ticket in tickets]
        counts = engine.services.counts()
        pids = [pid for one in engine.services._services for pid in one.pids]
    assert lost
    assert (counts.restarts, counts.starts, counts.computed_here) == (1, 2, 0)
    assert all(distance(a, b) < 1e-5 for a, b in zip(found, alone, strict=True))
    assert not any(map(is_running, [*lost, *pids]))


@pytest.mark.slow
def test_a_process_that_always_dies_leaves_the_step_to_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, _ = pair("same")
    alone = made(pipe(**arguments(FLUX)))
    original = StepProcess._ask

    def ask(self: StepProcess, process: Any, *rest: Any) -> Any:
        os.kill(process.child.pid, signal.SIGKILL)
        return original(self, process, *rest)

    monkeypatch.setattr(StepProcess, "_ask", ask)
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        found = made(engine.submit(pipe, **arguments(FLUX)).result(300))
        counts = engine.services.counts()
    assert counts.computed_here == STEPS
    assert counts.restarts == 2 * STEPS
    assert distance(found, alone) < 1e-5


@pytest.mark.slow
def test_closing_while_a_step_is_in_flight_ends_the_processes() -> None:
    pipe, _ = pair("same")
    engine = maskfx.Engine(own_process=["controlnet"])
    ticket = engine.submit(pipe, **arguments(FLUX))
    until = time.monotonic() + 60
    while not engine.services.counts().processes and time.monotonic() < until:
        time.sleep(0.01)
    pids = [pid for one in engine.services._services for pid in one.pids]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    engine.close(timeout=1.0)
    assert not any(map(is_running, pids))
    with pytest.raises(maskfx.Closed):
        ticket.result(60)


def test_equal_nets_are_found_by_their_digest() -> None:
    case = ZOO["FluxControlNetModel"]
    one, equal, other = (maskfx.compile(case.build()) for _ in range(3))
    changed(other.module)
    other.refresh()
    dense = maskfx.compile(case.build(), mode="dense")
    assert identity_of(one) == identity_of(equal)
    assert identity_of(one) != identity_of(other)
    assert identity_of(one) != identity_of(dense)
    services = NetServices(OwnProcesses(("controlnet",), nbytes=1))  # no room: no process starts
    try:
        for denoiser in (one, equal, other, dense):
            services.lease(denoiser, {"controlnet": denoiser})
        found = [services.of(denoiser) for denoiser in (one, equal, other, dense)]
        assert found[0] is found[1]
        assert len(set(map(id, found))) == 3
        with torch.no_grad():  # a number that the digest doesn't read
            next(p for p in equal.module.parameters() if p.dim() > 1).view(-1)[5] += 1
        assert services.of(equal) is not found[0]
        assert services.of(one) is found[0]
        assert services.counts().processes == 0
    finally:
        services.close()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"threads": 1.5}, "threads=1.5"),
        ({"nbytes": 0}, "nbytes=0"),
        ({"seconds": -1}, "seconds=-1"),
        ({"names": "controlnet"}, "give a list of names"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        OwnProcesses(**given)


def test_a_net_that_gets_no_process_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    case = ZOO["FluxControlNetModel"]
    one, other = (maskfx.compile(case.build()) for _ in range(2))
    for denoiser in (one, other):
        denoiser.module.peft_config = {"style": None}
    services = NetServices(OwnProcesses(("controlnet",)))
    try:
        with caplog.at_level("WARNING", "maskfx.engine.processes.services"):
            for holder, denoiser in enumerate((one, other, one)):
                services.lease(str(holder), {"controlnet": denoiser})
                assert services.of(denoiser) is None
    finally:
        services.close()
    assert caplog.messages == [
        "own_process: FluxControlNetModel has no process of its own, and the engine's process "
        "computes its steps: it has adapters of PEFT; unload them"
    ]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (nn.Linear(2, 2), None),
        (nn.Linear(2, 2, device="meta"), "its weights are on meta; only those on the CPU can be"),
        (type("Local", (nn.Linear,), {})(2, 2), "its class can't be pickled"),
        (type("Typed", (nn.Linear,), {"__module__": "__main__"})(2, 2), "define it in a module"),
    ],
)
def test_why_a_module_stays_in_its_process(part: nn.Module, reason: str | None) -> None:
    found = kept_by(part)
    assert found is None if reason is None else reason in str(found)


def test_names_select_denoisers() -> None:
    settings = OwnProcesses.of(["controlnet"])
    assert settings.has("controlnet")
    assert settings.has("controlnet.1")
    assert not settings.has("unet")
    assert OwnProcesses.of(settings) is settings


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until = time.monotonic() + 60  # a step in flight ends in this process
    while time.monotonic() < until and any(map(is_of_step, threading.enumerate())):
        time.sleep(0.05)
    assert not list(filter(is_of_step, threading.enumerate()))


def is_of_step(thread: threading.Thread) -> bool:
    return thread.name.startswith("maskfx-step")
