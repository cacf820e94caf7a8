"""Adapters in the weights: results of low-rank terms, weights as before, and when they pay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch
from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn

import maskfx
from maskfx import CompiledDenoiser, DenseStep, EditStep, RecordStep
from maskfx.runtime import weights as weights_module
from maskfx.runtime.backends import eager
from maskfx.runtime.in_place import shared
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.in_place_costs import (
    AGAIN,
    LEAST,
    ChosenBy,
    InPlaceCosts,
    SharedStep,
)
from maskfx.runtime.lora.patch import WeightPatch
from maskfx.runtime.weights import Weights
from tests.factories.lora import difference_of, merged, update_of
from tests.factories.offloading import Elsewhere
from tests.passes.tools import error
from tests.runtime.backends.test_inductor import MASKS, Stack, inputs
from tests.runtime.test_adapters import Odd, odd_inputs

TOLERANCE = 1e-5
KIND = SharedStep.of(1, 64, 1000)


class Always(InPlaceCosts):
    """Writes the adapters of each step."""

    def pays(self, kind: SharedStep, work: int, sites: int, left: int) -> bool:
        return True

    def stays(self, kind: SharedStep) -> bool:
        return True


@pytest.fixture
def module() -> nn.Module:
    return Stack(2).eval()


@pytest.fixture
def denoiser(module: nn.Module) -> Iterator[CompiledDenoiser]:
    before = [value.clone() for value in module.parameters()]
    made = maskfx.compile(module)
    made.in_place.costs = Always()
    yield made
    made.in_place.end()
    assert all(map(torch.equal, module.parameters(), before))


def recorded_edit(
    denoiser: CompiledDenoiser, own: Updates, call: dict[str, Tensor]
) -> tuple[Tensor, EditStep]:
    output, cache = denoiser.step([RecordStep(call, own)])[0]
    return output, EditStep(call, MASKS["some"]((8, 8)), cache, adapters=own)


@pytest.mark.parametrize("whole", [False, True])
def test_results_are_those_of_the_changed_module(
    whole: bool, denoiser: CompiledDenoiser, module: nn.Module
) -> None:
    own = (difference_of(module, 4) if whole else update_of(module, 4, 1),)
    calls = [inputs(1, 8, 8, seed) for seed in range(2)]
    wanted = [merged(module, own)(**call) for call in calls]
    fingerprint = denoiser.fingerprint()
    edits = [recorded_edit(denoiser, own, call)[1] for call in calls]
    with denoiser.in_place.step(own, 2, 128, 10) as written:
        assert written
        assert error(module(**calls[0]), wanted[0]) < TOLERANCE
        found = denoiser.step([*edits, *(RecordStep(call, own) for call in calls)])
        dense = [denoiser.plain_step(DenseStep(call, own)) for call in calls]
        [group] = denoiser.alike(calls, [own, own])
        together = denoiser.plain_together(group)
    for i, expected in enumerate(wanted):
        assert error(found[i], expected) < TOLERANCE
        assert error(found[2 + i][0], expected) < TOLERANCE
        assert error(dense[i], expected) < TOLERANCE
        assert error(together[i], expected) < TOLERANCE
    assert denoiser.in_place.written, "it stays for the next step"
    recording = found[2][1]
    assert denoiser.fingerprint() == fingerprint == recording.weights
    assert denoiser.in_place.written, "it has the fingerprint of the weights without"
    again = EditStep(calls[0], MASKS["some"]((8, 8)), recording, adapters=own)
    assert error(denoiser.step([again])[0], wanted[0]) < TOLERANCE
    assert not denoiser.in_place.written, "other uses take it out"


class Pointwise(nn.Module):
    """A 1x1 convolution, whose weight programs hold as a view of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(sample).tanh()) * timestep.view(-1, 1, 1, 1)
        return found


def test_written_weights_are_no_change_in_any_step() -> None:
    module = Pointwise().eval()
    denoiser = maskfx.compile(module)
    own = (difference_of(module, 4),)
    call = {"sample": torch.randn(1, 4, 8, 8), "timestep": torch.ones(1)}
    fingerprint, (_, edit) = denoiser.fingerprint(), recorded_edit(denoiser, own, call)
    wanted = merged(module, own)(**call)
    for _ in range(3):
        with denoiser.in_place.step(own, 1, 64, 10, ChosenBy.COUNTS) as written:
            assert written
            assert error(denoiser.step([edit])[0], wanted) < TOLERANCE
            assert denoiser.fingerprint() == fingerprint
            assert denoiser.in_place.written


def test_weights_are_not_written_while_they_are_read_for_the_fingerprint(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, reading, go_on, entered = Weights(module), Event(), Event(), Event()
    wanted, compute = Weights(module).fingerprint(), weights_module.checksum

    def slow(value: Tensor) -> bytes:
        reading.set()
        assert go_on.wait(30)
        return compute(value)

    def write() -> None:
        with weights.writing():
            entered.set()

    monkeypatch.setattr(weights_module, "checksum", slow)
    with ThreadPoolExecutor(2) as pool:
        found = pool.submit(weights.fingerprint)
        assert reading.wait(30)
        written = pool.submit(write)
        assert not entered.wait(0.1)
        go_on.set()
        assert found.result(30) == wanted
        written.result(30)
    assert entered.is_set()


def test_weights_in_other_layouts_follow() -> None:
    module = Odd().eval()
    denoiser, own, call = maskfx.compile(module), (update_of(module, 4, 1),), odd_inputs(1, 8, 8)
    denoiser.in_place.costs = Always()
    plain = merged(module, ())(**call)
    wanted = merged(module, own)(**call)
    for _ in range(2):
        with denoiser.in_place.step(own, 1, 64, 10):
            assert error(denoiser.step([RecordStep(call, own)])[0][0], wanted) < TOLERANCE
        assert error(denoiser.step([RecordStep(call)])[0][0], plain) < TOLERANCE


def test_another_thread_gets_the_module_as_it_is(
    denoiser: CompiledDenoiser, module: nn.Module
) -> None:
    own, call = (update_of(module, 4, 1),), inputs(1, 8, 8)
    plain, found = merged(module, ())(**call), list[Tensor]()
    thread = threading.Thread(target=lambda: found.append(denoiser.plain(**call)))
    with denoiser.in_place.step(own, 1, 64, 10) as written:
        assert written
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "it waits for the step"
    thread.join(60)
    assert error(found[0], plain) < TOLERANCE
    assert not denoiser.in_place.written


def test_a_change_of_the_weights_is_still_seen(module: nn.Module) -> None:
    denoiser, own, call = maskfx.compile(module), (update_of(module, 4, 1),), inputs(1, 8, 8)
    denoiser.in_place.costs = Always()
    before = denoiser.fingerprint()
    with denoiser.in_place.step(own, 1, 64, 10):
        assert not denoiser._weights.overwritten()
    denoiser.in_place.end()
    assert denoiser.fingerprint() == before
    with torch.no_grad():
        next(module.parameters()).mul_(1.1)
    assert denoiser.fingerprint() != before
    assert error(denoiser.record(**call)[0], merged(module, ())(**call)) < TOLERANCE


def test_a_step_with_other_members_takes_it_out(
    denoiser: CompiledDenoiser, module: nn.Module
) -> None:
    one, other, call = (update_of(module, 4, 1),), (update_of(module, 4, 2),), inputs(1, 8, 8)
    assert shared([one, one]) == one
    assert shared([one, other]) == shared([one, ()]) == ()
    with denoiser.in_place.step(one, 1, 64, 10) as written:
        assert written
    with denoiser.in_place.step((), 2, 128, 10) as written:
        assert not written
        found = denoiser.step([RecordStep(call, one), RecordStep(call, other)])
    for own, (result, _) in zip((one, other), found, strict=True):
        assert error(result, merged(module, own)(**call)) < TOLERANCE
    assert denoiser.in_place.costs.fell_back == 1
    assert "taken out early 1 times" in denoiser.explain()


@pytest.mark.parametrize(
    "how", [{"prepack": True}, pytest.param({"inductor": True}, marks=pytest.mark.slow)]
)
def test_weights_of_other_backends_follow(
    how: dict[str, Any], module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "WORTH", 0)
    denoiser, own, call = maskfx.compile(module, **how), (update_of(module, 4, 1),), inputs(1, 8, 8)
    denoiser.in_place.costs = Always()
    calls, sets = [call, inputs(1, 8, 8, 1)], (own, ())
    changed = [[merged(module, updates)(**one) for one in calls] for updates in sets]
    edits = [recorded_edit(denoiser, updates, call)[1] for updates in sets]
    edits = [replace(edit, inputs=calls[1], any_step=True) for edit in edits]
    wanted = [denoiser.edit([edit])[0] for edit in edits]
    assert error(wanted[0], wanted[1]) > 1e-3
    for _ in range(2):
        with denoiser.in_place.step(own, 1, 64, 10) as written:
            assert written
            assert error(denoiser.edit(edits[:1])[0], wanted[0]) < TOLERANCE
            found = denoiser.step([DenseStep(one, own) for one in calls])
        assert error(found, changed[0]) < TOLERANCE
        assert torch.equal(denoiser.edit(edits[1:])[0], wanted[1])
        assert error(denoiser.step([DenseStep(one) for one in calls]), changed[1]) < TOLERANCE


def test_a_module_that_is_moved_about_keeps_them(module: nn.Module) -> None:
    denoiser, hook = maskfx.compile(module), Elsewhere()
    add_hook_to_module(module, hook)
    denoiser.in_place.costs = Always()
    own, call = (update_of(module, 4, 1),), inputs(1, 8, 8)
    before = [value.clone() for value in module.parameters()]
    fingerprint, wanted = denoiser.fingerprint(), merged(module, own)(**call)
    for _ in range(2):
        with denoiser.in_place.step(own, 1, 64, 10) as written:
            assert written
            found, cache = denoiser.step([RecordStep(call, own)])[0]
            assert error(found, wanted) < TOLERANCE
            assert cache.weights == fingerprint
        hook.away = True
    assert len(denoiser.programs) == 1
    denoiser.in_place.end()
    assert denoiser.fingerprint() == fingerprint
    assert all(map(torch.equal, module.parameters(), before))
    assert hook.brought == 3


def test_why_nothing_is_written_is_said(module: nn.Module) -> None:
    denoiser, own = maskfx.compile(module, inductor=True, prepack=True), (update_of(module, 4, 1),)
    denoiser.in_place.costs = Always()
    with denoiser.in_place.step(own, 1, 64, 10) as written:
        assert not written
    assert "aren't written: Inductor's code holds packed weights" in denoiser.explain()


def test_weights_that_other_processes_read_stay_as_they_are(module: nn.Module) -> None:
    denoiser, own = maskfx.compile(module), (update_of(module, 4, 1),)
    denoiser.in_place.costs = Always()
    denoiser.share_memory()
    with denoiser.in_place.step(own, 1, 64, 10) as written:
        assert not written
    assert "in memory that other processes read" in denoiser.explain()


def test_a_change_before_they_are_written_is_seen(module: nn.Module) -> None:
    denoiser, own, call = maskfx.compile(module), (update_of(module, 4, 1),), inputs(1, 8, 8)
    denoiser.in_place.costs = Always()
    fingerprint = denoiser.fingerprint()
    denoiser.step([RecordStep(call, own)])
    with torch.no_grad():
        module.get_parameter("into.weight").mul_(1.1)
    wanted = merged(module, own)(**call)
    with denoiser.in_place.step(own, 1, 64, 10) as written:
        assert written
        assert denoiser.fingerprint() != fingerprint
        assert error(denoiser.step([RecordStep(call, own)])[0][0], wanted) < TOLERANCE
    denoiser.in_place.end()


def test_a_thread_that_looks_while_they_are_written_sees_no_change(
    denoiser: CompiledDenoiser, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, before, seen = (update_of(module, 4, 1),), denoiser.fingerprint(), list[str]()
    other = threading.Thread(target=lambda: seen.append(denoiser._weights.change().name))
    apply = WeightPatch.apply

    def slow(self: WeightPatch, updates: Updates, private: bool) -> None:
        apply(self, updates, private)
        other.start()
        other.join(0.2)

    monkeypatch.setattr(WeightPatch, "apply", slow)
    with denoiser.in_place.step(own, 1, 64, 10) as written:
        assert written
        other.join(60)
        assert seen == ["NONE"]
        assert denoiser.fingerprint() == before


def test_equal_runs_alone_are_decided_by_counts(
    denoiser: CompiledDenoiser, module: nn.Module
) -> None:
    denoiser.in_place.costs = InPlaceCosts()
    own = (update_of(module, 4, 1),)
    for left, wanted in ((LEAST - 1, False), (1000, True)):
        with denoiser.in_place.step(own, 1, 64, left, ChosenBy.COUNTS) as written:
            assert written is wanted
        denoiser.in_place.end()


def test_what_a_failing_step_leaves_is_taken_out(
    denoiser: CompiledDenoiser, module: nn.Module
) -> None:
    with (
        pytest.raises(RuntimeError, match="the step fails"),
        denoiser.in_place.step((update_of(module, 4, 1),), 1, 64, 10),
    ):
        raise RuntimeError("the step fails")
    denoiser.plain(**inputs(1, 8, 8))
    assert not denoiser.in_place.written


# Costs: pure numbers.


def steps(costs: InPlaceCosts, in_place: bool, seconds: float, count: int = 2) -> None:
    for _ in range(count):
        costs.add_step(KIND, in_place, 64, seconds)


def test_both_ways_are_measured_and_the_better_one_is_used() -> None:
    costs = InPlaceCosts()
    costs.begin(KIND, 20)
    assert not costs.pays(KIND, 1000, 64, 20), "low-rank terms are measured first"
    steps(costs, False, 1.3)
    assert costs.pays(KIND, 1000, 64, 18), "then the weights"
    assert not costs.pays(KIND, 1000, 64, LEAST - 1)
    steps(costs, True, 1.0)
    costs.add_write(1000, 1.0)
    assert costs.write_seconds(2000) == pytest.approx(2.0)
    assert costs.pays(KIND, 1000, 64, 4)  # saves 1.2
    assert not costs.pays(KIND, 2000, 64, 4)
    assert costs.stays(KIND)
    steps(costs, True, 9.0, 3)
    assert not costs.stays(KIND)
    assert "1.00 times" not in costs.describe()


def test_steps_that_dont_come_count() -> None:
    costs = InPlaceCosts()
    steps(costs, False, 1.3)
    steps(costs, True, 1.0)
    costs.add_write(1000, 1.0)
    costs.end()
    assert costs.pays(KIND, 1000, 64, 10)
    for _ in range(8):  # another request joins after a step, each time
        costs.begin(KIND, 10)
        steps(costs, False, 1.3, 1)
        costs.end()
    assert costs.lasted < 0.2
    assert not costs.pays(KIND, 1000, 64, 10)
    for _ in range(8):
        costs.begin(KIND, 10)
        steps(costs, False, 1.3, 10)
        costs.end()
    assert costs.pays(KIND, 1000, 64, 10)


def test_a_way_that_lost_is_measured_again() -> None:
    costs = InPlaceCosts()
    steps(costs, False, 1.0)
    steps(costs, True, 2.0)
    for _ in range(AGAIN - 1):
        costs.begin(KIND, 10)
        assert not costs.pays(KIND, 1000, 64, 10)
        steps(costs, False, 1.0, 10)
    costs.begin(KIND, 10)
    assert costs.pays(KIND, 1000, 64, 10)
