"""Steps captured whole equal those that aren't; a recorder that calls again takes CUDA's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import maskfx
from maskfx import Loader
from maskfx.runtime.backends import cuda_graphs, whole_steps
from maskfx.runtime.backends.eager import Runner
from maskfx.runtime.cache.step_cache import with_tensors
from tests.factories import emulated, masks
from tests.factories.zoo import ZOO
from tests.passes.test_fuse_kernels import Blocks
from tests.passes.tools import shared, timed
from tests.runtime.backends.test_cuda_graphs import RerunRecorder, assert_same, steps_of


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RerunRecorder:
    found = RerunRecorder()
    monkeypatch.setattr(cuda_graphs, "recorder_on", lambda device: found)
    return found


def both() -> tuple[Any, Any]:
    plain, replayed = (maskfx.compile(shared(Blocks), cuda_graphs=on) for on in (False, True))
    return plain, replayed


def changed(steps: list[Any], by: float) -> list[Any]:
    return [
        maskfx.EditStep(
            {**step.inputs, "sample": step.inputs["sample"] + by},
            step.mask,
            step.cache,
            any_step=True,
        )
        for step in steps
    ]


def captures(denoiser: Any) -> int:
    whole = denoiser._executor.replays._whole
    return 0 if whole is None else len(whole._kept)


@pytest.mark.parametrize("kinds", [("random",), ("random", "stroke"), ("full", "border")])
def test_a_layout_that_comes_again_is_captured_whole(
    recorder: RerunRecorder, kinds: tuple[str, ...]
) -> None:
    plain, replayed = both()
    steps = steps_of(plain, 3, kinds=kinds)
    for number in range(5):
        given = changed(steps, 0.1 * number)
        assert_same(replayed.edit(given), plain.edit(given))
        assert captures(replayed) == (number > 0)
    before = recorder.captures
    assert_same(replayed.edit(steps), plain.edit(steps))
    assert recorder.captures == before


def test_other_recordings_and_masks_are_read_as_they_are(recorder: RerunRecorder) -> None:
    plain, replayed = both()
    steps = steps_of(plain, 0, kinds=("random", "random"))
    for _ in range(3):
        assert_same(replayed.edit(steps), plain.edit(steps))
    for seed in (20, 30):  # the captured masks over other pictures
        for own, step in enumerate(steps):
            _, kept = plain.record(**timed(seed + own))
            other = [maskfx.EditStep(timed(seed + own), step.mask, kept, any_step=True)]
            for _ in range(3):
                assert_same(replayed.edit(other), plain.edit(other))
    assert captures(replayed) >= 2


def test_results_are_not_written_by_later_steps(recorder: RerunRecorder) -> None:
    plain, replayed = both()
    steps = steps_of(plain, 5, kinds=("stroke",))
    found = [replayed.edit(changed(steps, 0.1 * n)) for n in range(5)]
    for number, own in enumerate(found):
        assert_same(own, plain.edit(changed(steps, 0.1 * number)))


def test_inputs_that_do_not_fit_leave_the_capture_as_it_was() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.add, (x, y)),))
    runner = Runner(torch.fx.GraphModule({}, graph))
    own = whole_steps.Graph("code", lambda: runner, ("x", "y"), frozenset())
    steps, layout = whole_steps.WholeSteps(RerunRecorder()), object()

    def run(**given: Any) -> Any:
        return steps.run(layout, own, given.__getitem__, lambda name: None)

    one, two = torch.ones(3), torch.full((3,), 2.0)
    assert run(x=one, y=one) is None
    assert run(x=one, y=one)[0].tolist() == [2.0] * 3
    assert run(x=two, y=torch.ones(4)) is None
    assert run(x=two, y=one)[0].tolist() == [3.0] * 3


def test_what_cannot_be_captured_runs_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def capture(self, run: Any) -> Any:
            raise torch.OutOfMemoryError("no memory for a capture")

    monkeypatch.setattr(cuda_graphs, "recorder_on", lambda device: Failing())
    plain, replayed = both()
    executor = replayed._executor
    monkeypatch.setattr(executor.replays, "pieces", False)
    steps = steps_of(plain, 7, kinds=("random",))
    for _ in range(4):
        assert_same(replayed.edit(steps), plain.edit(steps))
    assert caplog.text.count("isn't captured") == 1


def test_captures_are_bounded(recorder: RerunRecorder) -> None:
    plain, replayed = both()
    for seed in range(whole_steps.KEPT + 3):
        steps = steps_of(plain, seed, kinds=("random",))
        for _ in range(2):
            replayed.edit(steps)
    assert captures(replayed) == whole_steps.KEPT
    replayed._executor.forget()
    assert captures(replayed) == 0


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_loader_keeps_steps_whole_whose_rows_are_on_the_device(
    recorder: RerunRecorder, where: str
) -> None:
    device = torch.device(emulated.NAME, 0)
    case = ZOO["FluxTransformer2DModel"]
    module, size = case.build().to(device), case.sizes[0]
    replayed = maskfx.compile(module, cuda_graphs=True, loader=Loader())
    mask = masks.random(case.mask_shape(size), 1)
    for seed in range(4):
        inputs = emulated.to(case.inputs(size, seed), device)
        wanted, kept = replayed.record(**inputs)
        there = with_tensors(kept, lambda t: t if where == "device" else t.cpu())
        found = replayed.edit([maskfx.EditStep(inputs, mask, there)])
        assert_same(emulated.to(found, "cpu"), emulated.to([wanted], "cpu"))
    assert captures(replayed) == (where == "device")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["FluxTransformer2DModel", "SD3Transformer2DModel-sd35", "UNet2DConditionModel-sdxl"]
)
def test_families(name: str, recorder: RerunRecorder) -> None:
    case = ZOO[name]
    module = case.build()
    plain, replayed = (maskfx.compile(module, cuda_graphs=on) for on in (False, True))
    steps = []
    for seed, size in enumerate(case.sizes[:2]):
        _, kept = plain.record(**case.inputs(size, seed))
        mask = masks.random(case.mask_shape(size), seed)
        steps.append(maskfx.EditStep(case.inputs(size, seed + 5), mask, kept, any_step=True))
    wanted = plain.edit(steps)
    for _ in range(3):
        assert_same(replayed.edit(steps), wanted)
    assert captures(replayed) == 1
