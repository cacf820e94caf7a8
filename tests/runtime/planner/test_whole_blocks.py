"""Blocks that are computed whole: a plan's third choice, which loads nothing of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import maskfx
from maskfx.errors import InputError
from maskfx.runtime.cache.computed_rows import ComputedCache, computed_taps
from maskfx.runtime.cache.quantize import Encoding, Format
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.planner.blocks import find_blocks
from maskfx.runtime.planner.calibration import calibrate, one_batch, trial_batches
from maskfx.runtime.planner.choices import INPUT, KEYS, WHOLE, choices_of_member
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.planner.step_planner import StepPlanner
from maskfx.runtime.planner.timeline import BlockChoice, BlockTimes, simulate
from tests.factories import masks
from tests.factories.planned import compiled, loader_of
from tests.factories.zoo import ZOO, Case, slow_unet
from tests.passes.tools import error
from tests.runtime.planner.test_step_planner import costs_of, edits
from tests.runtime.test_oracle import assert_near

FLUX = "FluxTransformer2DModel"
CASES = ("UNet2DConditionModel-sd15", FLUX)


@pytest.fixture(autouse=True)
def small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The denoisers are so small that their inputs are much of a recording."""
    from maskfx.runtime.execution import step_results

    monkeypatch.setattr(step_results, "LEAST", 0)


def slow_link(denoiser: maskfx.CompiledDenoiser, steps: list[maskfx.EditStep]) -> Costs:
    """A link that is slower than computing anything."""
    return costs_of(denoiser, steps, 1e-3)


@pytest.mark.parametrize("name", slow_unet(CASES))
def test_edits_compute_the_first_blocks_whole_and_load_nothing_of_them(name: str) -> None:
    """Each number of them repeats the edit that loads all, of changed inputs too."""
    case, denoiser = compiled(name, loading=True)
    steps = edits(case, denoiser, 2, inputs_kept=True)
    wanted, loader = denoiser.edit(steps), loader_of(name, True)
    program, members = one_batch(denoiser, steps)
    costs = slow_link(denoiser, steps)
    blocks = find_blocks(program, members[0].sites)
    each = [choices_of_member(program, blocks, member, costs) for member in members]
    loaded = []
    for count in sorted({0, 1, len(blocks) // 2, len(blocks) - 1}):
        selection = [len(menu) - 1 if 0 < n <= count else 0 for n, menu in enumerate(each[0].menus)]
        planned = [own.planned(s, selection) for own, s in zip(each, steps, strict=True)]
        before = loader.loaded_bytes
        assert error(denoiser.edit(planned), wanted) < 1e-5
        loaded.append(loader.loaded_bytes - before)
        for edit in planned:
            assert not (isinstance(edit.cache, ComputedCache) and edit.cache.left)
        kept = [own.names_of(selection).count(WHOLE) for own in each]
        assert kept == [count, count]
    assert loaded == sorted(loaded, reverse=True)
    assert loaded[0] > 0
    assert loaded[-1] == 0, "all of it was computed"


@pytest.mark.parametrize("name", slow_unet(CASES))
def test_a_plan_over_a_slow_link_repeats_the_recorded_run(name: str) -> None:
    """The oracle: an edit with the recorded inputs gives what the module does."""
    case, denoiser = compiled(name, loading=True)
    inputs, size = case.inputs(case.sizes[0], 3), case.sizes[0]
    step = maskfx.EditStep(
        inputs, masks.random(case.mask_shape(size), 1), denoiser.record(**inputs)[1]
    )
    planner = StepPlanner(denoiser, slow_link(denoiser, [step]))
    [planned] = planner.plan_step([step])
    before = loader_of(name, True).loaded_bytes
    denoiser.ahead([planned], only=True)
    assert_near(denoiser.step([planned])[0], denoiser.plain(**inputs))
    assert loader_of(name, True).loaded_bytes == before
    assert planner.whole[0] == planner.whole[1] > 0
    assert f"{planner.whole[0]} of {planner.whole[1]} blocks computed whole" in planner.describe()


def test_a_link_between_gets_some_blocks_of_each_choice() -> None:
    case, denoiser = compiled(FLUX, loading=True)
    steps = edits(case, denoiser, 1, inputs_kept=True)
    found = {}
    for slow in (1e-14, 2e-9, 1e-3):
        planned = StepPlanner(denoiser, costs_of(denoiser, steps, slow)).plan(steps)
        found[slow] = [names[0] for names in planned.names]
        whole = [n for n, name in enumerate(found[slow]) if name == WHOLE]
        assert whole == list(range(1, len(whole) + 1)), "it needs the block before"
    assert WHOLE not in found[1e-14]
    assert WHOLE in found[2e-9]
    assert {KEYS, INPUT} & set(found[2e-9][1:])
    assert found[1e-3][1:] == [WHOLE] * (len(found[1e-3]) - 1)


def test_an_edit_that_loads_joins_one_that_computes() -> None:
    """Loads ahead serve the one alone; what the other computes isn't loaded beside it."""
    case, denoiser = compiled(FLUX, loading=True)
    steps = edits(case, denoiser, 2, inputs_kept=True)
    steps[1] = dataclasses.replace(steps[1], cache=dataclasses.replace(steps[1].cache, given=[]))
    wanted, loader = denoiser.edit(steps), loader_of(FLUX, True)
    before = loader.loaded_bytes
    denoiser.edit(steps[1:])
    alone = loader.loaded_bytes - before
    planner = StepPlanner(denoiser, dataclasses.replace(slow_link(denoiser, steps), whole=0.1))
    planned = [s for s in planner.plan_step(steps) if isinstance(s, maskfx.EditStep)]
    assert computed_taps(planned[0].cache)
    assert not computed_taps(planned[1].cache)
    planned[1] = dataclasses.replace(planned[1], plan={})
    before = loader.loaded_bytes
    denoiser.ahead(planned, only=True)
    assert error(denoiser.step(planned), wanted) < 1e-5
    assert loader.loaded_bytes - before == alone


def test_an_edit_keeps_what_was_planned_ahead_of_it() -> None:
    case, denoiser = compiled(FLUX, loading=True)
    first, second = edits(case, denoiser, 2, inputs_kept=True)
    planner = StepPlanner(denoiser, slow_link(denoiser, [first]))
    planner.plan_step([first])
    [ahead] = planner.plan_ahead([second])
    [planned] = planner.plan_step([second])
    assert isinstance(planned, maskfx.EditStep)
    assert planned.cache is ahead.cache
    assert computed_taps(planned.cache)


@pytest.mark.parametrize(
    "change",
    [
        {"given": []},
        {"adapters": (("digest", 1.0),)},
    ],
)
def test_loads_what_cant_be_computed(change: dict[str, object]) -> None:
    case, denoiser = compiled(FLUX, loading=True)
    [step] = edits(case, denoiser, 1, inputs_kept=True)
    assert has_whole(denoiser, step)
    assert not has_whole(denoiser, dataclasses.replace(step, cache=_with(step.cache, **change)))


def _with(cache: maskfx.StepCache, **change: object) -> maskfx.StepCache:
    return dataclasses.replace(cache, **change)  # type: ignore[arg-type]


def has_whole(denoiser: maskfx.CompiledDenoiser, step: maskfx.EditStep) -> bool:
    program, [member] = one_batch(denoiser, [dataclasses.replace(step, cache=step.cache)])
    found = choices_of_member(
        program, find_blocks(program, member.sites), member, slow_link(denoiser, [step])
    )
    return any(choice.name == WHOLE for menu in found.menus for choice in menu)


def test_rows_in_fewer_bits_are_loaded() -> None:
    """Computed again they would be more precise, and an edit would depend on its plan."""
    case, denoiser = compiled(FLUX, loading=True)
    [step] = edits(case, denoiser, 1, inputs_kept=True)
    cache = step.cache.packed(Encoding(Format.INT8))
    assert not has_whole(denoiser, dataclasses.replace(step, cache=cache))


def test_steps_between_two_recorded_ones_are_loaded(tmp_path: Path) -> None:
    case, denoiser = compiled(FLUX, loading=True)
    templates = maskfx.Templates(
        denoiser, Tiers(Store(tmp_path), host_bytes=1 << 30), "keys", share=2, steps=3
    )
    size = case.sizes[0]
    for step in range(3):
        templates.put("cat", step, denoiser.record(**case.inputs(size, 0))[1])
    found = [templates.get("cat", step) for step in range(3)]
    assert [bool(one.given) for one in found if one is not None] == [True, False, True]


def test_refuses_a_whole_block_after_one_that_isnt() -> None:
    load = BlockChoice("load", 1.0, 1.0, 1.0)
    whole = BlockChoice(WHOLE, 0, 0, 2.0, True, True, extra_bytes=float("inf"))
    blocks = [BlockTimes(((load, whole),)) for _ in range(2)]
    assert simulate(blocks, [[1], [1]]).end == 4
    with pytest.raises(InputError, match="block 1: .* needs the rows of all sites"):
        simulate(blocks, [[0], [1]])


def test_calibration_measures_what_computing_whole_takes() -> None:
    case, denoiser = compiled(FLUX, loading=True)
    [step] = edits(case, denoiser, 1, inputs_kept=True)
    assert calibrate(denoiser, trial_batches(denoiser, step), repeats=1, seconds=1).whole != 1.0
    bare = dataclasses.replace(step, cache=_with(step.cache, given=[]))
    assert calibrate(denoiser, trial_batches(denoiser, bare), repeats=1, seconds=1).whole == 1.0


def test_recordings_with_plans_keep_their_inputs_where_these_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from maskfx.runtime.execution import step_results

    case, denoiser = compiled(FLUX)
    inputs = case.inputs(case.sizes[0], 0)
    kept = denoiser.record(**inputs)[1].given
    assert any(isinstance(one, torch.Tensor) for one in kept)
    assert not compiled(FLUX, plans=False)[1].record(**inputs)[1].given
    monkeypatch.setattr(step_results, "LEAST", 1 << 20)
    assert not denoiser.record(**inputs)[1].given


def test_a_changed_weight_forgets_what_computes_whole() -> None:
    case: Case = ZOO[FLUX]
    denoiser = maskfx.compile(case.build(), plans=True, loader=maskfx.Loader())
    [step] = edits(case, denoiser, 1, inputs_kept=True)
    planner = StepPlanner(denoiser, slow_link(denoiser, [step]))
    denoiser.edit([planner.plan([step]).steps[0]])
    with torch.no_grad():
        for weight in denoiser.module.parameters():
            weight.mul_(1.01)
    [step] = edits(case, denoiser, 1, inputs_kept=True)
    assert error(denoiser.edit(planner.plan([step]).steps), denoiser.edit([step])) < 1e-5
