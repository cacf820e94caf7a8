"""Ranks with a device each: rank processes on the emulated device, as ranks of a CPU compute.

Set `MASKFX_TEST_DEVICE=cuda` to run them on GPUs; two ranks then share one where there is only one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import maskfx
from maskfx import CompiledDenoiser, DenseStep, EditStep, InputError, Ranks, RecordStep
from maskfx.distributed import sent_steps
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.rank_group import RankGroup
from maskfx.ir.programs.head_sources import WAYS
from maskfx.runtime.cache.movers import HostMover
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.step_executor import SharedAdapters
from maskfx.runtime.steps import LateExchange, SplitRun
from tests.distributed import tiny
from tests.distributed.test_rank_group import held, worst
from tests.distributed.test_ranks import cache_error, error
from tests.factories import emulated, masks
from tests.factories.lora import difference_of, merged, update_of
from tests.factories.masks import MASKS
from tests.factories.pipelines import PIPES, call_of, square
from tests.factories.thread_ranks import ThreadRanks
from tests.factories.zoo import ZOO
from tests.runtime.test_in_place import Always

BOUND = 1e-4
COUNT = torch.get_device_module(emulated.NAME).device_count()
DEVICES = [torch.device(emulated.NAME, min(number, COUNT - 1)) for number in range(2)]
OWN = DEVICES[0]
UNET = "UNet2DConditionModel-nomid"
BACKENDS = ("rings", "gloo")
Make = Callable[..., RankGroup]


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rank processes know the device."""
    folder = tmp_path_factory.mktemp("device")
    emulated.in_children(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def denoiser() -> CompiledDenoiser:
    return compiled()


def compiled(**settings: Any) -> CompiledDenoiser:
    found = maskfx.compile(tiny.build().to(OWN), **settings)
    assert isinstance(found, CompiledDenoiser)
    return found


@pytest.fixture
def make(children: None) -> Iterator[Make]:
    made: list[RankGroup] = []

    def group(denoiser: CompiledDenoiser, backend: str = "rings", **given: Any) -> RankGroup:
        ranks = Ranks(devices=DEVICES, backend=backend)
        made.append(RankGroup(denoiser, ranks, waits=Waits(exchange=10.0), **given))
        return made[-1]

    yield group
    for one in made:
        one.stop()


def inputs(seed: int, *size: int) -> dict[str, Any]:
    found: dict[str, Any] = emulated.to(tiny.inputs(seed, *size), OWN)
    return found


def mixed(denoiser: CompiledDenoiser, seed: int = 1) -> list[Any]:
    """An edit of a recording on the device, one of a recording in host memory, and others."""
    kept = [denoiser.record(**inputs(seed + n))[1] for n in range(2)]
    edits = [
        EditStep(inputs(seed + n), MASKS["random"]((8, 8), n).to(OWN), cache)
        for n, cache in enumerate([kept[0], HostMover().to_host(kept[1])])
    ]
    return [*edits, DenseStep(inputs(seed + 3)), RecordStep(inputs(seed + 4))]


def halves(count: int) -> Partition:
    return Partition(((1.0, 1.0),) * count)


def check(got: list[Any], wanted: list[Any]) -> None:
    assert worst(got[:3], wanted[:3]) < BOUND
    assert error(got[3][0], wanted[3][0]) < BOUND
    assert cache_error(got[3][1], wanted[3][1]) < BOUND
    assert all(value.device == OWN for value in (*got[:3], got[3][0]))


@pytest.mark.parametrize(
    "backend",
    [
        *BACKENDS,
        pytest.param(
            "nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    emulated.IS_EMULATED or COUNT < 2,
                    reason="needs two CUDA devices and MASKFX_TEST_DEVICE=cuda",
                ),
            ],
        ),
    ],
)
def test_divided_and_whole_steps_and_after_a_rank_was_killed(
    denoiser: CompiledDenoiser, make: Make, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recordings that are sent and recordings that are mapped; another rank gets the device."""
    group, steps = make(denoiser, backend), mixed(denoiser)
    wanted = denoiser.step(steps)
    for way in WAYS:
        check(denoiser.step(steps, group.on(2, halves(4), way)), wanted)
    monkeypatch.setattr(sent_steps, "MAPPED", 0)
    steps = mixed(denoiser, 5)
    wanted = denoiser.step(steps)
    check(denoiser.step(steps, group.on(2, halves(4))), wanted)
    check(group.on((1,)).run(denoiser, steps), wanted)
    check(group.run(denoiser, steps), wanted)
    assert group.computed_here == group.failures == 0
    ranks = group.pool.ranks
    assert ranks is not None
    assert (ranks.backend, [rank.device for rank in ranks.all]) == (backend, DEVICES)
    os.kill(ranks.all[1].child.pid, signal.SIGKILL)
    check(denoiser.step(steps, group.on(2, halves(4))), wanted)
    assert (group.failures, group.computed_here) == (1, 0)
    until = time.monotonic() + 120
    while len(ranks.all) < 2 and time.monotonic() < until:
        time.sleep(0.2)
        check(group.on((0,)).run(denoiser, steps), wanted)
    assert {rank.device for rank in ranks.all} == set(DEVICES)
    check(denoiser.step(steps, group.on(2, halves(4))), wanted)
    assert (group.failures, group.computed_here) == (1, 0)


@pytest.mark.slow
def test_degrees_that_change_from_step_to_step(denoiser: CompiledDenoiser, make: Make) -> None:
    group, steps = make(denoiser), mixed(denoiser)
    wanted = denoiser.step(steps)
    for ranks in ((0,), (0, 1), (1,), (1, 0), (0,)):
        check(group.on(ranks).run(denoiser, steps), wanted)
    assert group.computed_here == group.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_late_rows_stay_on_the_devices(
    denoiser: CompiledDenoiser, make: Make, backend: str
) -> None:
    """The same as ranks that are threads on one device."""
    group, runs = make(denoiser, backend), [SplitRun(), SplitRun()]
    threads = ThreadRanks(denoiser.settings, halves(1))
    edit = mixed(denoiser)[0]
    for number in range(3):
        step = replace(edit, inputs=inputs(50 + number))
        ours, theirs = (replace(step, late=LateExchange(run, number)) for run in runs)
        got = denoiser.step([ours], group.on(2))[0]
        assert error(got, denoiser.step([theirs], threads)[0]) < BOUND
    assert error(got, denoiser.step([theirs])[0]) > BOUND
    assert [run.reads for run in runs] == [2, 2]
    assert min(held(group)) > 0
    runs[0].close()
    assert held(group) == [0, 0]
    assert group.computed_here == group.failures == 0


@pytest.mark.parametrize(
    "name", [UNET, pytest.param("SD3Transformer2DModel", marks=pytest.mark.slow)]
)
def test_rows_that_steps_replace(name: str, make: Make) -> None:
    """They move to host memory, and steps of this process read and write them there, too."""
    case = ZOO[name]
    denoiser = maskfx.compile(case.build().to(OWN), stretches=True)
    group, size = make(denoiser), case.sizes[0]
    kept = denoiser.record(**emulated.to(case.inputs(size, 0), OWN))[1]
    program = denoiser.programs[kept.program]
    one, other = (RollingPool(1 << 28).start(program, kept) for _ in range(2))
    splits = [group.on(2, halves(1)), group.on((1,)), None, group.on((1, 0), halves(1))]
    for number, split in enumerate(splits):
        mask = masks.random(case.mask_shape(size), number, 0.4)
        given = emulated.to(case.inputs(size, 10 + number), OWN)
        wanted, found = (
            EditStep(given, mask, cache, any_step=True, record=True) for cache in (one, other)
        )
        expected = denoiser.step([wanted])
        got = denoiser.step([found]) if split is None else split.run(denoiser, [found])
        assert error(got, expected) < BOUND
        assert cache_error(*map(HostMover().to_host, (other, one))) < BOUND
    assert group.computed_here == group.failures == 0


def test_adapters_as_terms_and_in_the_weights_of_each_device(make: Make) -> None:
    denoiser = compiled()
    group, module = make(denoiser), denoiser.module
    call, before = inputs(1), [value.clone() for value in module.parameters()]
    plain: list[Any] = [DenseStep(call)]
    unchanged = group.on(2, halves(1)).run(denoiser, plain)[0]
    seen = group.in_place((0, 1)).seen
    for number, own in enumerate([(update_of(module, 4, 1),), (difference_of(module, 5),)]):
        cache = denoiser.step([RecordStep(call, own)])[0][1]
        steps = [EditStep(call, MASKS["stroke"]((8, 8), 1), cache, adapters=own)]
        steps += [DenseStep(call, own)]  # type: ignore[list-item]
        wanted = denoiser.step(steps)
        assert error(wanted[1].cpu(), merged(tiny.build(), own)(**tiny.inputs(1))) < BOUND
        assert worst(denoiser.step(steps, group.on(2, halves(2))), wanted) < BOUND
        seen.costs = Always()
        shared = SharedAdapters(own, 192, 10)
        for _ in range(2):
            assert worst(group.on(2, halves(2)).run(denoiser, steps, shared), wanted) < BOUND
            assert seen.written
        assert seen.costs.steps_in_place == 2, number
    assert torch.equal(group.on(2, halves(1)).run(denoiser, plain)[0], unchanged)
    assert all(map(torch.equal, module.parameters(), before))
    assert group.computed_here == group.failures == 0


@pytest.mark.slow
def test_ranks_follow_changed_and_moved_weights(make: Make) -> None:
    denoiser = compiled()
    group, steps = make(denoiser), [DenseStep(inputs(2))]
    (first,) = denoiser.step(steps, group.on(2, halves(1)))
    next(denoiser.module.parameters()).mul_(2.0)
    (wanted,) = denoiser.step(steps)
    assert error(denoiser.step(steps, group.on(2, halves(1)))[0], wanted) < BOUND
    assert error(first, wanted) > BOUND
    assert group.computed_here == 0
    denoiser.module.cpu()  # no rank was asked to compute there
    here = [DenseStep(tiny.inputs(2))]
    assert error(denoiser.step(here, group.on(2, halves(1)))[0], wanted.cpu()) < BOUND
    assert group.computed_here == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [UNET, "FluxTransformer2DModel", "SD3ControlNetModel"])
def test_denoisers_of_each_kind(name: str, make: Make) -> None:
    case = ZOO[name]
    denoiser, size = maskfx.compile(case.build().to(OWN)), case.sizes[0]
    group, members = make(denoiser), list[Any]()
    for seed in range(2):
        given = emulated.to(case.inputs(size, seed), OWN)
        kept = denoiser.record(**emulated.to(case.inputs(size, 10 + seed), OWN))[1]
        mask = masks.random(case.mask_shape(size), seed)
        members += [EditStep(given, mask, kept), DenseStep(given), RecordStep(given)]
    wanted = denoiser.step(members)
    for split in (group.on(2, halves(len(members))), group):
        got = denoiser.step(members, split)
        for step, ours, theirs in zip(members, got, wanted, strict=True):
            if isinstance(step, RecordStep):
                assert cache_error(ours[1], theirs[1]) < BOUND
                ours, theirs = ours[0], theirs[0]
            assert error(ours, theirs) < BOUND
    assert group.computed_here == group.failures == 0


def test_devices_of_ranks() -> None:
    """The denoiser's first, then the others; each may be named."""
    first, second = (torch.device("cuda", number) for number in range(2))
    there = [torch.device(emulated.NAME, number) for number in range(COUNT)]
    for own in there:
        found = Ranks(COUNT).placed(own)
        assert (found.own, found.backend) == (own, "rings" if emulated.IS_EMULATED else "nccl")
        assert list(found.devices) == [own, *(one for one in there if one != own)]
    with pytest.raises(InputError, match=rf"{COUNT + 1} ranks, and {COUNT} devices.* give count="):
        Ranks(COUNT + 1).placed(there[0])
    assert Ranks(devices=["cuda", "cuda:1"], backend="gloo").placed(first).devices == (
        first,
        second,
    )
    assert Ranks(devices=["cuda:0"] * 3).placed(first).backend == "rings"
    assert set(Ranks(3).placed(torch.device("cpu")).devices) == {torch.device("cpu")}


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, "count=0: give a whole number"),
        ({"count": 2, "devices": ["cuda:0"]}, "count=2 with 1 devices"),
        ({"devices": "cuda:0"}, "devices='cuda:0': give a list"),
        ({"devices": ["gpu", "cuda:0"]}, "devices has 'gpu'"),
        ({"count": 2, "backend": "mpi"}, "backend='mpi': give one of rings, gloo, nccl"),
    ],
)
def test_ranks_that_are_refused(given: dict[str, Any], seen: str) -> None:
    with pytest.raises(InputError, match=seen):
        Ranks(**given)


@pytest.mark.parametrize(
    ("given", "own", "seen"),
    [
        ({"devices": ["cuda:0", "cuda:1"]}, "cpu", "devices=cuda:0, cuda:1 for a denoiser on cpu"),
        ({"devices": ["cuda:0"] * 2, "backend": "nccl"}, "cuda:0", "a device of its own"),
        ({"count": 2, "backend": "nccl"}, "cpu", "it connects CUDA devices only"),
    ],
)
def test_places_that_are_refused(given: dict[str, Any], own: str, seen: str) -> None:
    with pytest.raises(InputError, match=seen):
        Ranks(**given).placed(torch.device(own))


def test_denoisers_that_lie_on_several_devices_are_refused() -> None:
    module = tiny.build()
    module.leave.to(OWN)
    with pytest.raises(InputError, match=rf"Tiny has weights on cpu, {OWN}, and a rank computes"):
        RankGroup(maskfx.compile(module), 2)


def test_a_request_whose_denoiser_ranks_cant_compute_ends_with_the_reason() -> None:
    name = "FluxInpaintPipeline"
    pipe = maskfx.compile(PIPES[name].build().to(OWN), inductor=True)
    with maskfx.Engine(ranks=Ranks(devices=DEVICES, backend="rings")) as engine:
        ticket = engine.submit(pipe, **emulated.to(call_of(PIPES[name], 1, square()), OWN))
        with pytest.raises(InputError, match="is compiled by Inductor on .*CPUs only"):
            ticket.result(60)
        assert not engine.runner.rank_groups()


@pytest.mark.slow
def test_requests_of_an_engine(make: Make) -> None:
    """Pictures are those of the pipeline on a CPU; weights are on the device of each rank."""
    name = "FluxInpaintPipeline"
    here, there = (
        maskfx.compile(PIPES[name].build().to(device), quality="all-steps")
        for device in (OWN, "cpu")
    )

    def given(seed: int, device: torch.device | str) -> dict[str, Any]:
        call: dict[str, Any] = emulated.to(call_of(PIPES[name], seed, square()), device)
        return {**call, "output_type": "latent", "return_dict": False}

    here(**given(0, OWN))  # records the template
    there(**given(0, "cpu"))
    wanted = [there(**given(seed, "cpu"))[0] for seed in (1, 2)]
    with maskfx.Engine(ranks=Ranks(devices=DEVICES, backend="rings")) as engine:
        tickets = [engine.submit(here, **given(seed, OWN)) for seed in (1, 2)]
        found = [ticket.result()[0] for ticket in tickets]
        (group,) = engine.runner.rank_groups()
        assert group.computed_here == group.failures == 0
        assert group.last
        ranks = group.pool.ranks
        assert ranks is not None
        assert [rank.device for rank in ranks.all] == DEVICES
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.device == OWN
        assert error(ours.cpu(), theirs) < BOUND
