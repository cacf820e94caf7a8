"""mode="patch_batch": dense requests of several sizes share steps the way that measures faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.runs import dense_members
from maskfx.pipelines.runs.dense_members import run_by_module
from maskfx.pipelines.runs.step_members import CallMember
from maskfx.runtime.dense_ways import TRIES, DenseBatch, DenseWay, DenseWays
from maskfx.runtime.reuse.patches import PatchReuse
from maskfx.runtime.steps import DenseStep, EditStep
from tests.factories.pipelines import (
    PIPES,
    call_of,
    distance,
    latents,
    noise,
    plain,
    square,
)
from tests.passes.tools import error
from tests.pipelines.test_patches import EDIT, FLUX, UNET, Turns
from tests.runtime.backends.test_inductor import Stack, inputs

SIZES = ((8, 8), (6, 10), (8, 8))


def members() -> list[CallMember]:
    """One per request, of two sizes."""
    steps = [DenseStep(inputs(1, *size)) for size in SIZES]
    found: list[Any] = [
        CallMember(SimpleNamespace(run=object()), SimpleNamespace(), step)  # type: ignore[arg-type]
        for step in steps
    ]
    return found


@pytest.fixture(scope="module")
def module() -> Any:
    return Stack(1).eval()


@pytest.mark.parametrize("faster", list(DenseWay))
def test_either_way_gives_the_modules_results(
    module: Any, faster: DenseWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, ran = DenseWays.add, list[DenseWay]()

    def faked(own: DenseWays, batch: DenseBatch, way: DenseWay, took: float, n: int) -> None:
        assert (batch.members, batch.sizes, n) == (3, 2, 8 * 8 + 6 * 10 + 8 * 8)
        assert took > 0
        ran.append(way)
        add(own, batch, way, 1.0 if way is faster else 2.0, n)

    monkeypatch.setattr(DenseWays, "add", faked)
    denoiser = maskfx.compile(module, mode="patch_batch")
    for _ in range(2 * TRIES + 3):
        own = members()
        assert run_by_module(denoiser, own) == []
        for member in own:
            assert error(member.result, module(**member.step.inputs)) < 1e-5
    assert ran[2 * TRIES :] == [faster] * 3
    assert "3 dense requests of 2 sizes" in denoiser.explain()
    assert f"runs as {faster}" in denoiser.explain()


def test_a_step_in_rows_that_fails_is_left_and_the_module_takes_over(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser = maskfx.compile(module, mode="patch_batch")

    def broken(steps: object) -> Any:
        raise MemoryError("no room for rows")

    monkeypatch.setattr(denoiser, "step", broken)
    left = [len(run_by_module(denoiser, members())) for _ in range(2 * TRIES + 2)]
    assert left == [3] * TRIES + [0] * (TRIES + 2)


def test_other_modes_run_the_module_alone(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Any:
        raise AssertionError("nothing is measured")

    monkeypatch.setattr(dense_members, "run_measured", refused)
    for mode in ("dense", "mask_cache"):
        denoiser = maskfx.compile(module, mode=mode)
        own = members()
        assert run_by_module(denoiser, own) == []
        for member in own:
            assert error(member.result, module(**member.step.inputs)) < 1e-5
        assert not denoiser.programs


@pytest.mark.parametrize("name", [FLUX, pytest.param(UNET, marks=pytest.mark.slow)])
def test_requests_keep_patches_from_step_to_step(name: str) -> None:
    """As with mode="mask_cache", alone and in a batch with requests that compute everything."""
    pipe = maskfx.compile(PIPES[name].build(), mode="patch_batch", quality=Quality(patches=0.1))
    other = maskfx.compile(PIPES[name].build(), quality=Quality(patches=0.1))
    quality = Quality(patches=PatchReuse(side=2, first=2, judge=Turns()))
    state = pipeline_state_of(pipe)

    def call(seed: int) -> dict[str, Any]:
        return {**call_of(PIPES[name], seed, num_inference_steps=7), "generator": noise(seed)}

    qualities = [quality, quality, "all-steps", "all-steps"]
    wanted = [latents(other, **call(n), quality=q) for n, q in enumerate(qualities)]
    found = latents(pipe, **call(0), quality=quality)
    assert distance(found, wanted[0]) < 1e-4
    assert 0 < state.patches.share < 0.9
    assert not state.notes
    with maskfx.Engine(maskfx.BatchPolicy(patience=0.5)) as engine:
        tickets = [
            engine.submit(
                pipe,
                **call(n),
                quality=q,
                output_type="latent",
                return_dict=False,
            )
            for n, q in enumerate(qualities)
        ]
        pictures = [ticket.result()[0] for ticket in tickets]
        assert max(step.requests for step in engine.steps) == 4
    for one, other_ in zip(pictures, wanted, strict=True):
        assert distance(one, other_) < 1e-4
    state.pool.nbytes()
    assert all(block.unused and block.own == 0 for block in state.pool._all())


def test_an_edit_keeps_patches_of_the_whole_picture() -> None:
    """There is no template; a template's recording is refused as before."""
    pipe = maskfx.compile(PIPES[EDIT].build(), mode="patch_batch", quality=Quality(patches=0.1))

    def given() -> dict[str, Any]:
        return {**call_of(PIPES[EDIT], num_inference_steps=7), "mask_image": square()}

    dense = latents(pipe, **given(), quality="all-steps")
    assert distance(dense, latents(plain(EDIT), **given())) < 1e-5
    state = pipeline_state_of(pipe)
    assert state.patches.total == 0
    quality = Quality(patches=PatchReuse(side=2, first=2, judge=Turns()))
    assert 1e-4 < distance(latents(pipe, **given(), quality=quality), dense) < 1
    assert 0 < state.patches.share < 0.9
    with pytest.raises(InputError, match="compiled with a mode that records nothing"):
        pipe(**given(), record=True)


def test_only_rows_of_the_request_itself_are_edited(module: Any) -> None:
    denoiser = maskfx.compile(module, mode="patch_batch", stretches=True)
    given = inputs(1, 8, 8)
    found, cache = denoiser.record(**given)
    assert error(found, module(**given)) < 1e-5
    with pytest.raises(InputError, match="edits of the rows that a request keeps in a RollingPool"):
        denoiser.edit([EditStep(given, torch.ones(8, 8, dtype=torch.bool), cache)])
