"""From costs to plans that edits obey."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import maskfx
from maskfx.errors import CacheError, InputError
from maskfx.runtime.batch.flops import row_flops
from maskfx.runtime.planner.blocks import find_blocks
from maskfx.runtime.planner.costs import Costs, Sample, fit, r_squared
from maskfx.runtime.planner.step_planner import (
    INPUT,
    KEYS,
    StepPlanner,
    calibrate,
    measure,
    one_batch,
    with_plan,
    work_of,
)
from maskfx.runtime.sites.mask import Mask
from tests.factories import masks
from tests.factories.planned import compiled, loader_of
from tests.factories.zoo import Case
from tests.passes.tools import error

CASES = ("UNet2DConditionModel-sd15", "FluxTransformer2DModel")


def edits(case: Case, denoiser: maskfx.CompiledDenoiser, count: int = 3) -> list[maskfx.EditStep]:
    out = []
    for index in range(count):
        size = case.sizes[index % len(case.sizes)]
        torch.manual_seed(index)
        _, cache = denoiser.record(**case.inputs(size, index))
        mask = masks.random(case.mask_shape(size), index)
        inputs = case.inputs(size, index + 10)
        out.append(maskfx.EditStep(inputs, mask, cache, any_step=True))
    return out


def costs_of(denoiser: maskfx.CompiledDenoiser, steps: list[maskfx.EditStep], slow: float) -> Costs:
    """A made-up device: 1 TFLOP/s, and so many seconds per byte."""
    program, members = one_batch(denoiser, steps)
    count = len(find_blocks(program, members[0].sites))
    return Costs((1e-6,) * count, ((1e-12, 1e-12),) * count, 0.0, 0.0, slow)


@pytest.mark.parametrize("name", CASES)
def test_blocks_have_all_of_the_graphs_work(name: str) -> None:
    case, denoiser = compiled(name)
    [step] = edits(case, denoiser, 1)
    program, [member] = one_batch(denoiser, [step])
    blocks = find_blocks(program, member.sites)
    work = work_of(blocks, member.sites, member.batch).sum()
    assert work == pytest.approx(sum(row_flops(program, member.sites, member.batch).values()))
    assert {b.region for b in blocks} == {0, *range(1, len(denoiser.regions) + 1)}
    every = {r: Mask(step.mask).everywhere for r in range(1, len(denoiser.regions) + 1)}
    more = work_of(blocks, with_plan(member.sites, every), member.batch).sum(1)
    less = work_of(blocks, member.sites, member.batch).sum(1)
    for block, a, b in zip(blocks, less, more, strict=True):
        assert b >= a if block.region else b == a, "a plan changes the work of its regions only"
    assert more.sum() > less.sum()


@pytest.mark.parametrize("name", CASES)
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
    assert sample.work.shape == (len(find_blocks(program, members[0].sites)), 2)
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
        StepPlanner(denoiser, Costs((0.0,), ((0.0, 0.0),), 0, 0, 0)).plan(steps)
    with pytest.raises(InputError, match="has no loader"):
        calibrate(denoiser, [steps])


@pytest.mark.parametrize("name", CASES)
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
