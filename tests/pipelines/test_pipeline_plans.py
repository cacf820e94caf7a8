"""Pipelines whose steps are planned, and whose first blocks compute everything."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maskfx
import maskfx.runtime.denoiser
import maskfx.runtime.validation.validate
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.cache.computed_rows import computed_taps
from maskfx.runtime.cache.step_cache import has_unread
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.planner.blocks import find_blocks
from maskfx.runtime.planner.calibration import one_batch
from maskfx.runtime.planner.costs import Costs
from tests.factories.pipelines import PIPES, call_of, picture, square

NAME = "FluxInpaintPipeline"


def steps_of(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[maskfx.EditStep]:
    """All edits that the pipeline's denoiser computes from now on."""
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    seen: list[maskfx.EditStep] = []
    original = denoiser.step

    def step(steps: Any) -> Any:
        seen.extend(s for s in steps if isinstance(s, maskfx.EditStep))
        return original(steps)

    monkeypatch.setattr(denoiser, "step", step)
    return seen


def edit(pipe: Any, seed: int = 0, **more: Any) -> np.ndarray[Any, Any]:
    found = pipe(**call_of(PIPES[NAME], seed, square()), **more).images[0]
    return np.asarray(found).astype(int)


def test_each_step_obeys_the_plan_that_costs_call_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = maskfx.compile(PIPES[NAME].build(), quality="all-steps")
    wanted = edit(plain)
    pipe = maskfx.compile(
        PIPES[NAME].build(), plans=True, loader=maskfx.Loader(), costs={}, quality="all-steps"
    )
    seen = steps_of(pipe, monkeypatch)
    edit(pipe)
    assert seen
    assert not any(step.plan for step in seen), "planned without costs"
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    program, members = one_batch(denoiser, seen[:1])
    count = len(find_blocks(program, members[0].sites))

    pipe = maskfx.compile(
        PIPES[NAME].build(),
        plans=True,
        loader=maskfx.Loader(),
        costs={"transformer": slow_link(count)},
        quality="all-steps",
    )
    seen = steps_of(pipe, monkeypatch)
    found = edit(pipe)
    assert all(map(loads_less, seen)), "keys and values are loaded over a slow link"
    assert abs(found - wanted).max() <= 1, "a plan changed the picture"


def loads_less(step: maskfx.EditStep) -> bool:
    """Return True if keys and values are projected again, or blocks computed whole."""
    return bool(step.plan) or bool(computed_taps(step.cache))


def test_without_a_link_nothing_is_planned_and_explain_says_why() -> None:
    pipe = maskfx.compile(PIPES[NAME].build(), quality="all-steps")
    edit(pipe)
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    assert denoiser.loader is None
    assert not denoiser.settings.plans
    assert not denoiser.regions
    assert "there is nothing to hide" in maskfx.explain(pipe)


def test_loads_over_a_link_are_planned_by_default(tmp_path: Path) -> None:
    """Costs are measured at the first edit; the picture stays what it is without plans."""
    wanted = edit(maskfx.compile(PIPES[NAME].build(), quality="all-steps"))
    loader = maskfx.Loader(bandwidth=2e7)
    pipe = maskfx.compile(
        PIPES[NAME].build(), loader=loader, programs=tmp_path, quality="all-steps"
    )
    edit(pipe)  # records and calibrates
    assert list(tmp_path.glob("costs/*.json"))
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    assert denoiser.settings.plans
    assert denoiser.regions
    before = loader.loaded_bytes
    found = edit(pipe)
    assert loader.loaded_bytes > before
    assert abs(found - wanted).max() <= 1, "a plan changed the picture"
    text = maskfx.explain(pipe)
    assert "by a plan per batch (costs measured in" in text
    assert "keys and values projected again" in text
    loader.close()


def test_rows_on_disk_are_read_by_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that finds a template on disk reads what its plans choose."""

    def compiled() -> Any:
        tiers = maskfx.Tiers(maskfx.Store(tmp_path), host_bytes=1 << 30)
        module = PIPES[NAME].build()
        return maskfx.compile(module, plans=True, tiers=tiers, quality="all-steps")

    wanted = edit(compiled())  # records
    pipe = compiled()
    monkeypatch.setattr(ReadSpeed, "line", property(lambda _: (0.0, 1e-3)))
    edit(pipe)  # measures the other costs, for which it reads the rows of a step
    seen = steps_of(pipe, monkeypatch)
    found = edit(pipe)
    assert abs(found - wanted).max() <= 1, "a plan changed the picture"
    later = seen[1:]
    assert later
    assert all(map(loads_less, later)), "keys and values are loaded from a slow disk"
    assert all(has_unread(step.cache) for step in later), "keys and values were read too"
    assert "rows on disk read at" in maskfx.explain(pipe)


def test_a_store_is_read_by_plans_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is read from it, nothing is planned, measured or copied."""

    def compiled() -> Any:
        tiers = maskfx.Tiers(maskfx.Store(tmp_path), host_bytes=1 << 30)
        return maskfx.compile(PIPES[NAME].build(), tiers=tiers, quality="all-steps")

    first = compiled()
    edit(first)  # records
    wanted = edit(first)
    denoiser = pipeline_state_of(first).denoisers["transformer"]
    assert denoiser.settings.plans
    assert denoiser.loader is not None
    assert not denoiser.loader.takes_all(torch.device("cpu"))
    assert "costs not measured yet" in maskfx.explain(first), "rows in memory need no plan"
    second = compiled()
    before = denoiser.loader.loaded_bytes
    found = edit(second)
    assert abs(found - wanted).max() <= 1, "a plan changed the picture"
    assert denoiser.loader.loaded_bytes > before
    assert "from a store: ahead of the step" in maskfx.explain(second)
    assert "costs measured in" in maskfx.explain(second)
    third = maskfx.compile(
        PIPES[NAME].build(),
        tiers=maskfx.Tiers(maskfx.Store(tmp_path), host_bytes=1 << 30),
        quality="all-steps",
        plans=False,
    )
    assert maskfx.explain(third).count("when they are read") == 1


def test_plans_can_be_turned_off_over_a_link() -> None:
    loader = maskfx.Loader(bandwidth=1e9)
    pipe = maskfx.compile(PIPES[NAME].build(), loader=loader, plans=False, quality="all-steps")
    edit(pipe)
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    assert loader.loaded_bytes > 0
    assert not denoiser.regions
    assert "without a planner" in maskfx.explain(pipe)
    loader.close()


def test_what_a_step_is_given_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the planner, by the loads of this step and of the next, by the step itself: one check."""
    first = maskfx.compile(
        PIPES[NAME].build(), plans=True, loader=maskfx.Loader(), quality="all-steps"
    )
    seen = steps_of(first, monkeypatch)
    edit(first)
    program, members = one_batch(pipeline_state_of(first).denoisers["transformer"], seen[:1])
    slow = slow_link(len(find_blocks(program, members[0].sites)))
    costs = {"transformer": replace(slow, whole=1e20)}  # nothing is computed whole
    pipe = maskfx.compile(
        PIPES[NAME].build(), plans=True, loader=maskfx.Loader(), costs=costs, quality="all-steps"
    )
    edit(pipe)  # records
    pipeline_state_of(pipe).denoisers["transformer"]._validator.forget()
    counted: Counter[str] = Counter()

    def count(where: Any, name: str) -> None:
        original = getattr(where, name)

        def counting(*given: Any) -> Any:
            counted[name] += 1
            return original(*given)

        monkeypatch.setattr(where, name, counting)

    for name in ("check_arguments", "check_cache"):
        count(maskfx.runtime.validation.validator, name)
    count(maskfx.runtime.denoiser, "check_timesteps")
    count(maskfx.runtime.validation.validate, "check_region")
    seen = steps_of(pipe, monkeypatch)
    edit(pipe)
    assert len(seen) > 2
    regions = sum(len(step.plan) for step in seen)
    assert regions > 0
    assert counted == {
        "check_arguments": len(seen),
        "check_cache": len(seen),
        "check_timesteps": len(seen),
        "check_region": regions,
    }
    counted.clear()
    edit(pipe)
    assert not counted["check_cache"] + counted["check_region"], "a mask equal to a checked one"


def slow_link(blocks: int) -> Costs:
    """Computing is for nothing, loading is dear: what has fewer bytes wins."""
    return Costs((1e-9,) * blocks, ((1e-18, 1e-18, 0.0),) * blocks, 0.0, 0.0, 1e-3)


def test_costs_need_plans_and_a_known_denoiser() -> None:
    with pytest.raises(InputError, match="plans=True"):
        maskfx.compile(
            PIPES[NAME].build(),
            plans=False,
            costs={"transformer": slow_link(1)},
            quality="all-steps",
        )
    with pytest.raises(InputError, match="transformer"):
        maskfx.compile(
            PIPES[NAME].build(), plans=True, costs={"unet": slow_link(1)}, quality="all-steps"
        )


def test_costs_of_another_denoiser_are_an_error() -> None:
    pipe = maskfx.compile(
        PIPES[NAME].build(),
        plans=True,
        loader=maskfx.Loader(),
        costs={"transformer": slow_link(3)},
        quality="all-steps",
    )
    with pytest.raises(InputError, match="3 blocks"):
        edit(pipe)


def test_wide_first_stretches_change_the_picture_and_only_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = maskfx.compile(PIPES[NAME].build(), stretches=True, quality="all-steps")
    seen = steps_of(pipe, monkeypatch)
    narrow = edit(pipe)
    assert not any(step.wide for step in seen)
    seen.clear()
    wide = edit(pipe, quality=maskfx.Quality(wide=1))
    assert all(list(step.wide) == [1] for step in seen)
    assert all(bool(step.wide[1].all()) for step in seen)
    assert (wide != narrow).any(), "the rest saw nothing of the edit"
    outside = np.asarray(square()) < 128
    assert (wide[outside] == np.asarray(picture())[outside]).all()
    assert (edit(pipe) == narrow).all()


def test_wide_needs_stretches() -> None:
    pipe = maskfx.compile(PIPES[NAME].build(), quality="all-steps")
    with pytest.raises(InputError, match="stretches=True"):
        edit(pipe, quality=maskfx.Quality(wide=1))


def events_of(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When loads begin and when steps do."""
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    seen: list[str] = []
    step, loader = denoiser.step, denoiser.loader
    assert loader is not None
    begin = loader.begin

    def stepping(steps: Any) -> Any:
        seen.append("step")
        return step(steps)

    def beginning(*given: Any) -> Any:
        seen.append("load")
        return begin(*given)

    monkeypatch.setattr(denoiser, "step", stepping)
    monkeypatch.setattr(loader, "begin", beginning)
    return seen


@pytest.mark.parametrize("share", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_loads_of_the_next_step_begin_before_this_one(
    share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = edit(maskfx.compile(PIPES[NAME].build(), share=share, quality="all-steps"))
    pipe = maskfx.compile(
        PIPES[NAME].build(), share=share, loader=maskfx.Loader(), quality="all-steps"
    )
    edit(pipe)  # records
    seen = events_of(pipe, monkeypatch)
    found = edit(pipe)
    steps = seen.count("step")
    assert steps > 2
    assert seen == ["load", *["load", "step"] * (steps - 1), "step"]
    assert abs(found - wanted).max() <= 1


def test_a_batch_of_requests_loads_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        edit(maskfx.compile(PIPES[NAME].build(), quality="all-steps"), seed) for seed in (0, 1)
    ]
    pipe = maskfx.compile(PIPES[NAME].build(), loader=maskfx.Loader(), quality="all-steps")
    for seed in (0, 1):
        edit(pipe, seed)
    seen = events_of(pipe, monkeypatch)
    calls = [call_of(PIPES[NAME], seed, square()) for seed in (0, 1)]
    with maskfx.Engine(maskfx.BatchPolicy(patience=5.0, batch=2)) as engine:
        tickets = [engine.submit(pipe, **call) for call in calls]
        found = [np.asarray(t.result().images[0]).astype(int) for t in tickets]
    extra = seen.count("load") - seen.count("step")
    assert 0 <= extra <= 2, "loaded again where the batch changed: a first or last step alone"
    assert seen[-1] == "step"
    assert seen[-2] == "step", "the last step's rows were there before the one before it ran"
    assert all(abs(f - w).max() <= 1 for f, w in zip(found, wanted, strict=True))
