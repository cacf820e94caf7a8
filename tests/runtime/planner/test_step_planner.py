"""From costs to plans that edits obey."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maskfx
from maskfx.errors import CacheError, InputError
from maskfx.runtime.batch.flops import row_flops
from maskfx.runtime.planner import known_costs, step_planner
from maskfx.runtime.planner.blocks import FLOPS, KINDS, find_blocks
from maskfx.runtime.planner.calibration import calibrate, measure, one_batch
from maskfx.runtime.planner.choices import INPUT, KEYS, with_plan, work_of
from maskfx.runtime.planner.costs import Costs, Sample, fit, r_squared
from maskfx.runtime.planner.plan import QUICK, plan
from maskfx.runtime.planner.step_planner import StepPlanner, plan_surely
from maskfx.runtime.planner.timeline import NOW, BlockChoice, BlockTimes
from maskfx.runtime.sites.mask import Mask
from tests.factories import masks
from tests.factories.planned import compiled, loader_of
from tests.factories.zoo import ZOO, Case, slow_unet
from tests.passes.tools import error

CASES = ("UNet2DConditionModel-sd15", "FluxTransformer2DModel")


def edits(
    case: Case, denoiser: maskfx.CompiledDenoiser, count: int = 3, inputs_kept: bool = False
) -> list[maskfx.EditStep]:
    """Edits of several sizes; without the recorded inputs no block can be computed whole."""
    out = []
    for index in range(count):
        size = case.sizes[index % len(case.sizes)]
        torch.manual_seed(index)
        _, cache = denoiser.record(**case.inputs(size, index))
        if not inputs_kept:
            cache = dataclasses.replace(cache, given=[])
        mask = masks.random(case.mask_shape(size), index)
        inputs = case.inputs(size, index + 10)
        out.append(maskfx.EditStep(inputs, mask, cache, any_step=True))
    return out


def costs_of(denoiser: maskfx.CompiledDenoiser, steps: list[maskfx.EditStep], slow: float) -> Costs:
    """A made-up device: 1 TFLOP/s, and a number of seconds per byte."""
    program, members = one_batch(denoiser, steps)
    count = len(find_blocks(program, members[0].sites))
    return Costs((1e-6,) * count, ((1e-12, 1e-12, 0.0),) * count, 0.0, 0.0, slow)


@pytest.mark.parametrize("name", slow_unet(CASES))
def test_blocks_have_all_of_the_graphs_work(name: str) -> None:
    case, denoiser = compiled(name)
    [step] = edits(case, denoiser, 1)
    program, [member] = one_batch(denoiser, [step])
    blocks = find_blocks(program, member.sites)
    work = work_of(blocks, member.sites, member.batch)[:, :FLOPS].sum()
    assert work == pytest.approx(sum(row_flops(program, member.sites, member.batch).values()))
    assert {b.region for b in blocks} == {0, *range(1, len(denoiser.regions) + 1)}
    every = {r: Mask(step.mask).everywhere for r in range(1, len(denoiser.regions) + 1)}
    more = work_of(blocks, with_plan(member.sites, every), member.batch).sum(1)
    less = work_of(blocks, member.sites, member.batch).sum(1)
    for block, a, b in zip(blocks, less, more, strict=True):
        assert b >= a if block.region else b == a, "a plan changes the work of its regions only"
    assert more.sum() > less.sum()
    assert find_blocks(program, member.sites) is blocks, "counted once"


@pytest.mark.parametrize("name", slow_unet(CASES))
def test_edits_obey_the_plan_and_load_what_it_says(name: str) -> None:
    case, denoiser = compiled(name, loading=True)
    loader = loader_of(name, True)
    steps = edits(case, denoiser)
    plain = compiled(name, plans=False)[1]
    wanted = plain.edit(edits(case, plain))
    chosen = {}
    for slow in (1e-14, 3e-11, 1e-6):
        planned = StepPlanner(denoiser, costs_of(denoiser, steps, slow)).plan(steps)
        before = loader.loaded_bytes
        assert error(denoiser.edit(planned.steps), wanted) < 1e-5
        moved = sum(cost.staged for cost in planned.plan.timeline.costs)
        assert loader.loaded_bytes - before == moved
        chosen[slow] = {name for names in planned.names for name in names}
    assert INPUT not in chosen[1e-14], "loads that cost nothing: load all"
    assert INPUT in chosen[1e-6], "slow loads: project what can be"
    assert all(KEYS in names for names in chosen.values()), "what has one choice"


def test_plans_again_for_the_same_masks_from_memory() -> None:
    case, denoiser = compiled("FluxTransformer2DModel")
    steps = edits(case, denoiser)
    planner = StepPlanner(denoiser, costs_of(denoiser, steps, 1e-10))
    first = planner.plan(steps)
    assert planner.plan(steps).plan.selection == first.plan.selection
    assert len(planner._choices) == len(steps)


def test_measures_blocks_of_a_batch() -> None:
    case, denoiser = compiled("FluxTransformer2DModel", loading=True)
    steps = edits(case, denoiser)
    sample = measure(denoiser, steps)
    program, members = one_batch(denoiser, steps)
    assert sample.work.shape == (len(find_blocks(program, members[0].sites)), KINDS)
    assert (sample.work[:, -1] == sum(m.batch for m in members)).all()
    assert (sample.seconds >= 0).all()
    assert sample.seconds.sum() > 0
    costs = calibrate(denoiser, [steps, steps[:1], steps[:2]], repeats=1)
    assert costs.step(sample.work) == pytest.approx(sample.seconds.sum(), rel=2)


def test_refuses_to_plan_what_it_cannot() -> None:
    case, denoiser = compiled("FluxTransformer2DModel")
    steps = edits(case, denoiser, 2)
    empty = maskfx.EditStep(
        steps[0].inputs, torch.zeros_like(steps[0].mask), steps[0].cache, any_step=True
    )
    planner = StepPlanner(denoiser, costs_of(denoiser, steps, 1e-10))
    with pytest.raises(InputError, match="at least one masked site each"):
        planner.plan([empty])
    with pytest.raises(InputError, match="calibrate it"):
        StepPlanner(denoiser, Costs((0.0,), ((0.0, 0.0, 0.0),), 0, 0, 0)).plan(steps)
    with pytest.raises(InputError, match="has no loader"):
        calibrate(denoiser, [steps])


@pytest.mark.parametrize("name", slow_unet(CASES))
@pytest.mark.parametrize("kept", ["keys", "inputs"])
def test_half_a_recording_serves_every_plan(name: str, kept: str) -> None:
    (case, denoiser), (_, plain) = compiled(name), compiled(name, plans=False)
    wanted = plain.edit(edits(case, plain))
    steps = [
        dataclasses.replace(s, cache=half(denoiser, s.cache, kept)) for s in edits(case, denoiser)
    ]
    assert error(denoiser.edit(steps), wanted) < 1e-5
    whole = {r: torch.ones_like(steps[0].mask) for r in range(1, len(denoiser.regions) + 1)}
    steps[0] = dataclasses.replace(steps[0], plan=whole)
    assert error(denoiser.edit(steps), wanted) < 1e-5
    planned = StepPlanner(denoiser, costs_of(denoiser, steps, 1e-12)).plan(steps)
    names = {n for row, b in zip(planned.names, planned.blocks, strict=True) for n in row if b}
    assert (INPUT in names) == (kept == "inputs")
    assert error(denoiser.edit(planned.steps), wanted) < 1e-5


def half(denoiser: maskfx.CompiledDenoiser, cache: maskfx.StepCache, kept: str) -> maskfx.StepCache:
    """A recording without what one of the choices loads."""
    [program] = denoiser.programs.values()
    regions = range(1, len(denoiser.regions) + 1)
    both = [program.interface.region_taps(r) for r in regions]
    gone = {
        t for keys, inputs in both for t in (inputs - keys if kept == "keys" else keys - inputs)
    }
    return dataclasses.replace(cache, rows={t: r for t, r in cache.rows.items() if t not in gone})


def test_refuses_a_recording_with_neither() -> None:
    case, denoiser = compiled("FluxTransformer2DModel")
    [step] = edits(case, denoiser, 1)
    rows = half(denoiser, half(denoiser, step.cache, "keys"), "inputs").rows
    step = dataclasses.replace(step, cache=dataclasses.replace(step.cache, rows=rows))
    with pytest.raises(CacheError, match="keeps neither keys and values nor inputs of region 1"):
        denoiser.edit([step])


# Step after step.


@pytest.mark.parametrize("name", slow_unet(CASES))
def test_a_recording_and_edits_share_a_planned_step(name: str) -> None:
    """What computes all sites has no choice; the edits beside it have theirs."""
    case, denoiser = compiled(name, loading=True)
    steps = edits(case, denoiser, 2)
    record = maskfx.RecordStep(case.inputs(case.sizes[0], 7))
    wanted = compiled(name, plans=False)[1].step([*edits(case, compiled(name, plans=False)[1], 2)])
    planner = StepPlanner(denoiser, costs_of(denoiser, steps, 1e-6))
    planned = planner.plan_step([steps[0], record, steps[1]])
    assert planned[1] is record
    assert isinstance(planned[0], maskfx.EditStep)
    assert isinstance(planned[2], maskfx.EditStep)
    assert planned[0].plan
    assert planned[2].plan
    denoiser.ahead(planned, only=True)
    before = loader_of(name, True).loaded_bytes
    found = denoiser.step(planned)
    assert error([found[0], found[2]], wanted) < 1e-5
    assert planner.latest is not None
    staged: float = sum(float(c.staged) for c in planner.latest.costs)
    assert loader_of(name, True).loaded_bytes - before <= staged, (
        "loads that were begun for the edits serve the step with the recording"
    )


def test_an_edit_keeps_the_plan_under_which_its_loads_began() -> None:
    case, denoiser = compiled("FluxTransformer2DModel", loading=True)
    first, second, joins = edits(case, denoiser, 3)
    planner = StepPlanner(denoiser, costs_of(denoiser, [first], 1e-6))
    [now] = planner.plan_step([first])
    denoiser.ahead([now], only=True)
    [ahead] = planner.plan_ahead([second])
    [loading] = denoiser.ahead([ahead])
    denoiser.step([now])
    planned = planner.plan_step([second, joins])
    assert planned[0].plan == ahead.plan  # type: ignore[union-attr]
    assert planned[1].plan  # type: ignore[union-attr]
    loading.wait()
    both = denoiser.ahead(planned, only=True)
    assert loading in both, "loaded for a step that another request joined"
    plain = compiled("FluxTransformer2DModel", plans=False)[1]
    wanted = plain.edit(edits(case, plain)[1:])
    assert error(denoiser.step(planned), wanted) < 1e-5


def test_the_next_step_is_planned_from_where_this_one_leaves_the_loads() -> None:
    """Loads that take longer than compute leave no slack, those that take shorter do."""
    case, denoiser = compiled("FluxTransformer2DModel", loading=True)
    first, second = edits(case, denoiser, 2)
    starts = []
    for slow in (1e-14, 1e-6):
        planner = StepPlanner(denoiser, costs_of(denoiser, [first], slow))
        planner.plan_step([first])
        planner.plan_ahead([second])
        assert planner.latest is not None
        starts.append(planner.latest.start.load)
    assert starts[0] < 0, "the loads of the next step begin while this one computes"
    assert starts[1] > starts[0]


def test_a_buffer_too_small_for_a_block_leaves_the_step_unplanned() -> None:
    case, denoiser = compiled("FluxTransformer2DModel", loading=True)
    steps = edits(case, denoiser, 2)
    planner = StepPlanner(denoiser, costs_of(denoiser, steps, 1e-10), buffer_bytes=1.0)
    assert planner.plan_step(steps) == steps


@pytest.mark.parametrize(("loads", "again"), [(1.02, False), (1.5, True)])
def test_projects_again_only_for_a_sure_gain(loads: float, again: bool) -> None:
    """Loads of a step take this share of its compute; half of them can be avoided."""
    keys = BlockChoice(KEYS, load_bytes=2, load_seconds=loads, compute_seconds=1.0)
    inputs = BlockChoice(INPUT, load_bytes=1, load_seconds=loads / 2, compute_seconds=1.005)
    blocks = [BlockTimes(((keys, inputs),)) for _ in range(40)]
    best, found = plan(blocks, widths=QUICK), plan_surely(blocks, math.inf, NOW, QUICK)
    assert any(map(any, best.selection))
    assert any(map(any, found.selection)) == again
    assert found.end <= best.end * 1.05


def test_steps_that_repeat_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case, denoiser = compiled("FluxTransformer2DModel", loading=True)
    steps = edits(case, denoiser, 2)
    planner, made = StepPlanner(denoiser, costs_of(denoiser, steps, 3e-11)), list[int]()
    original: Any = vars(step_planner)["plan"]

    def counting(*given: Any, **named: Any) -> Any:
        made.append(1)
        return original(*given, **named)

    monkeypatch.setattr(step_planner, "plan", counting)
    first = planner.plan_step(steps)
    planner._begun.clear()
    again = planner.plan_step(steps)
    assert len(made) == 1
    assert [s.plan for s in first] == [s.plan for s in again]  # type: ignore[union-attr]


def test_costs_are_measured_once_and_read_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ZOO["FluxTransformer2DModel"]
    module = case.build()

    def planner_of() -> tuple[StepPlanner, list[maskfx.EditStep]]:
        denoiser = maskfx.compile(
            module, plans=True, loader=maskfx.Loader(bandwidth=1e9), programs=tmp_path
        )
        return StepPlanner(denoiser), edits(case, denoiser, 2)

    planner, steps = planner_of()
    assert "not measured yet" in planner.describe()
    planned = planner.plan_step(steps)
    assert "costs measured in" in planner.describe()
    trade = planner.trade()
    assert trade is not None
    assert 1e6 < trade.bandwidth <= 1.1e9
    assert 0 < trade.avoidable < 1
    assert 0 < trade.loaded <= 1
    [found] = tmp_path.glob("costs/*.json")

    def fail(*given: Any, **named: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(known_costs, "calibrate", fail)
    other, steps = planner_of()
    assert [bool(s.plan) for s in other.plan_step(steps)] == [bool(s.plan) for s in planned]  # type: ignore[union-attr]
    assert found.name in other.describe()


def test_an_edit_is_no_worse_off_where_costs_cant_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, denoiser = compiled("FluxTransformer2DModel", loading=True)
    steps = edits(case, denoiser, 2)

    def fail(*given: Any, **named: Any) -> Any:
        raise RuntimeError("no clock")

    monkeypatch.setattr(known_costs, "calibrate", fail)
    planner = StepPlanner(denoiser)
    assert planner.plan_step(steps) == steps
    assert planner.plan_ahead(steps) == steps
    assert "no plans: RuntimeError: no clock" in planner.describe()
    with pytest.raises(InputError, match="no clock"):
        planner.plan(steps)


def test_costs_are_measured_again_after_a_damaged_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, denoiser = compiled("FluxTransformer2DModel", loading=True)
    steps = edits(case, denoiser, 2)

    def damaged(*given: Any, **named: Any) -> Any:
        raise CacheError("rows of a recorded step are damaged")

    planner = StepPlanner(denoiser)
    with monkeypatch.context() as patched:
        patched.setattr(known_costs, "calibrate", damaged)
        assert planner.plan_step(steps) == steps
    assert "not measured yet" in planner.describe()
    planner.plan_step(steps)
    assert "costs measured in" in planner.describe()


# Costs.


def test_fits_lines_through_measurements() -> None:
    draw = np.random.default_rng(0)
    slopes, fixed = np.array([[2e-12, 5e-12], [1e-12, 0.0]]), np.array([1e-3, 2e-4])
    samples = []
    for _ in range(9):
        work = draw.uniform(1e8, 1e10, (2, 2))
        seconds = (work * slopes).sum(1) + fixed
        samples.append(Sample(work, seconds * draw.normal(1, 0.005, 2), around=1e-3))
    costs = fit(samples, [(n, 1e-5 + n * 1e-9) for n in (1e4, 1e5, 1e6)])
    held_out = draw.uniform(1e8, 1e10, (20, 2, 2))
    found = [costs.step(work) for work in held_out]
    wanted = [((w * slopes).sum(1) + fixed).sum() + 1e-3 for w in held_out]
    assert r_squared(found, wanted) > 0.99
    assert costs.load(1e6) == pytest.approx(1e-5 + 1e-3, rel=1e-3)
    assert costs.load(0) == 0


def test_costs_survive_a_file(tmp_path: Path) -> None:
    costs = Costs((0.1, 0.2), ((1e-12, 2e-12), (0.0, 1e-12)), 0.01, 1e-5, 1e-10)
    costs.save(tmp_path / "costs.json")
    assert Costs.read(tmp_path / "costs.json") == costs
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(InputError, match="calibrate and save them"):
        Costs.read(tmp_path / "costs.json")


def test_refuses_too_few_measurements() -> None:
    with pytest.raises(InputError, match="measure at least 3 and 2"):
        fit([], [])
