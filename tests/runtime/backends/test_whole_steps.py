"""Steps captured whole equal those that aren't; a recorder that calls again takes CUDA's place."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped,unused-ignore]

import maskfx
from maskfx import Loader
from maskfx.runtime.backends import cuda_graphs, whole_steps
from maskfx.runtime.batch import captured_inputs
from maskfx.runtime.batch.captured_inputs import BatchInputs
from maskfx.runtime.batch.row_addresses import AddressBook
from maskfx.runtime.cache.step_cache import with_tensors
from maskfx.runtime.sites.masks import Masks, find_reach
from tests.factories import emulated, masks
from tests.factories.offloading import Elsewhere
from tests.factories.zoo import ZOO, slow_unet
from tests.passes.test_fuse_kernels import Blocks
from tests.passes.tools import shared, timed
from tests.runtime.backends.test_cuda_graphs import RerunRecorder, assert_same, steps_of


class CopiesInMemory:
    """Takes the place of `copy_kernel`: copies by the same table of addresses."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(jobs: torch.Tensor, *_: object, **__: object) -> None:
            self.launches += 1
            for source, index, target, count, width in jobs.tolist():
                places = (ctypes.c_int64 * count).from_address(index)
                for line, place in enumerate(places):
                    start = source + 8 * width * place
                    ctypes.memmove(target + 8 * width * line, start, 8 * width)

        return launch


@pytest.fixture
def by_address(monkeypatch: pytest.MonkeyPatch) -> CopiesInMemory:
    """Cached rows are copied by address, as on a GPU."""
    rows, found = pytest.importorskip("maskfx.ops.kernels.rows"), CopiesInMemory()
    monkeypatch.setattr(rows, "copy_kernel", found)
    monkeypatch.setattr(captured_inputs, "has_kernels", lambda device: True)
    return found


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
    return sum(len(whole._kept) for whole in denoiser._executor.graphs.replays._whole.values())


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


def test_inputs_that_do_not_fit_leave_the_memory_as_it_was() -> None:
    denoiser = maskfx.compile(shared(Blocks))
    [(program, frame, members)] = denoiser.prepared(steps_of(denoiser, 4, kinds=("random",)))
    book = AddressBook(program.interface, frame.device)
    step = BatchInputs(frame, members, book)
    memory = step.memory()
    before = {name: memory.fetch()(name) for name in program.interface.inputs}
    values = [v.half() if isinstance(v, torch.Tensor) else v for v in members[0].given["step"]]
    other = replace(members[0], given={**members[0].given, "step": values})
    assert not memory.bring(BatchInputs(frame, [other], book))
    assert all(torch.equal(memory.fetch()(name), value) for name, value in before.items())
    assert memory.bring(step)


def test_what_cannot_be_captured_runs_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def pool(self) -> object:
            return object()

        def capture(self, run: Any, pool: object = None) -> Any:
            raise torch.OutOfMemoryError("no memory for a capture")

    monkeypatch.setattr(cuda_graphs, "recorder_on", lambda device: Failing())
    plain, replayed = both()
    executor = replayed._executor
    monkeypatch.setattr(executor.graphs.replays, "pieces", False)
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
    pools = [pool for pool in recorder.pools if pool is not None]
    assert len(set(map(id, pools))) == 1, "they share what they compute with"
    replayed._executor.forget()
    assert captures(replayed) == 0
    for _ in range(2):
        replayed.edit(steps)
    assert recorder.pools[-1] is not pools[0], "a pool without captures is gone"


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


@pytest.mark.parametrize("early", [True, False])
def test_rows_whose_loads_began_in_an_earlier_step_are_replayed_whole(
    recorder: RerunRecorder, early: bool
) -> None:
    """A step whose loads begin with it computes what it can until they arrive."""
    device = torch.device(emulated.NAME, 0)
    case = ZOO["FluxTransformer2DModel"]
    module, size = case.build().to(device), case.sizes[0]
    loader = Loader()
    replayed = maskfx.compile(module, cuda_graphs=True, loader=loader)
    mask = masks.random(case.mask_shape(size), 1)
    for seed in range(5):
        inputs = emulated.to(case.inputs(size, seed), device)
        wanted, kept = replayed.record(**inputs)
        step = maskfx.EditStep(inputs, mask, with_tensors(kept, lambda t: t.cpu()))
        replayed.ahead([step], only=not early or not seed)  # the first step's begin with it
        if seed == 3:  # what was taken for a capture that can't take it is used by the other way
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(captured_inputs, "fits", lambda value, kept: False)
                found = replayed.edit([step])
        else:
            found = replayed.edit([step])
        assert_same(emulated.to(found, "cpu"), emulated.to([wanted], "cpu"))
        assert captures(replayed) == (early and seed > 0)
    assert loader.staged == 0, "what was copied is free for the next loads"


def test_steps_are_replayed_whole_unless_graphs_are_refused(recorder: RerunRecorder) -> None:
    usual, refused = (
        maskfx.compile(shared(Blocks)),
        maskfx.compile(shared(Blocks), cuda_graphs=False),
    )
    steps = steps_of(usual, 3, kinds=("random",))
    for _ in range(3):
        assert_same(usual.edit(steps), refused.edit(steps))
    assert (captures(usual), captures(refused)) == (1, 0)
    assert "come again are replayed whole from CUDA graphs (1 captured)." in usual.explain()
    assert "operator by operator: it is compiled with cuda_graphs=False." in refused.explain()
    assert not len(usual._executor.graphs.replays.paddings), "pieces are asked for"


def test_without_much_free_memory_nothing_is_captured(
    recorder: RerunRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, replayed = both()
    one, two = (steps_of(plain, seed, kinds=("random",)) for seed in (1, 2))
    for _ in range(2):
        replayed.edit(one)
    assert captures(replayed) == 1
    [whole] = replayed._executor.graphs.replays._whole.values()
    monkeypatch.setattr(whole, "_free", lambda: 0.1)
    for _ in range(3):
        assert_same(replayed.edit(two), plain.edit(two))
    assert captures(replayed) == 0, "what they hold is given back"
    assert caplog.text.count("less than 12% of the device's memory is free") == 1


def test_weights_that_are_moved_about_are_not_captured_again(recorder: RerunRecorder) -> None:
    """A capture reads them where they were: offloading has them elsewhere in each call."""
    module, hook = ZOO["FluxTransformer2DModel"].build(), Elsewhere()
    add_hook_to_module(module, hook)
    case, replayed = ZOO["FluxTransformer2DModel"], maskfx.compile(module, cuda_graphs=True)
    inputs = case.inputs(case.sizes[0], 1)
    wanted, kept = replayed.record(**inputs)
    step = maskfx.EditStep(inputs, masks.random(case.mask_shape(case.sizes[0]), 1), kept)
    for moves, found in ((False, 0), (False, 1), (True, 0), (False, 0), (False, 0)):
        hook.away = moves
        assert_same(replayed.edit([step]), [wanted])
        assert captures(replayed) == found
    assert not any(key[-1] for key in replayed._executor.graphs.runners), "nor pieces"


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", slow_unet(["FluxTransformer2DModel", "UNet2DConditionModel-sdxl"]))
def test_rows_copied_by_address_give_what_the_others_give(
    name: str, seed: int, recorder: RerunRecorder, by_address: CopiesInMemory
) -> None:
    """Other recordings of the layout need no other capture; those of other sites do."""
    case, draw = ZOO[name], random.Random(seed)
    module, size = case.build(), replace(case.sizes[0], batch=draw.randint(1, 2))
    plain, replayed = (maskfx.compile(module, cuda_graphs=on) for on in (False, True))
    shape = case.mask_shape(size)
    own = [masks.random(shape, draw.randrange(99)) for _ in range(draw.randint(1, 3))]
    narrow = draw.random() < 0.5
    for number in range(4):
        steps = []
        for mask in own:
            inputs = case.inputs(size, draw.randrange(99))
            _, kept = plain.record(**inputs)
            if narrow:  # of these sites alone
                allowed, interface = Masks.exactly(mask), plain.programs[kept.program].interface
                kept = kept.within(allowed, find_reach(interface, kept.sizes, allowed))
            changed = case.inputs(size, draw.randrange(99))
            steps.append(maskfx.EditStep(changed, mask, kept, any_step=True))
        assert_same(replayed.edit(steps), plain.edit(steps))
        assert captures(replayed) == (number > 0)
    assert by_address.launches == 3
