"""Pipelines that reuse patches across steps: with and without a mask, alone and in a batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.fitting.observed_runs import Everything
from maskfx.pipelines.quality import Quality
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.reuse.judges import Bools, PatchFeatures, Threshold
from maskfx.runtime.reuse.patches import PatchReuse
from tests.factories.pipelines import (
    PIPES,
    Steps,
    anew,
    call_of,
    distance,
    latents,
    noise,
    plain,
    square,
)

FLUX, UNET, EDIT = "FluxPipeline", "StableDiffusionPipeline", "FluxInpaintPipeline"
STEPS = 7
slow = pytest.mark.slow
KINDS = [
    FLUX,
    pytest.param(UNET, marks=slow),
    pytest.param("StableDiffusion3Pipeline", marks=slow),
    pytest.param("FluxImg2ImgPipeline", marks=slow),
    pytest.param("StableDiffusionImg2ImgPipeline", marks=slow),
    pytest.param("ZImagePipeline", marks=slow),
]


class Turns(Everything):
    """Computes every second patch, the others at the next call."""

    def computes(self, features: PatchFeatures) -> Bools:
        turn = (np.arange(features.change.shape[1]) + features.step) % 2 == 0
        return np.broadcast_to(turn, features.change.shape)


class Nothing(Everything):
    """Keeps all patches."""

    def computes(self, features: PatchFeatures) -> Bools:
        return np.zeros(features.change.shape, bool)


def reuse(**settings: Any) -> Quality:
    every = settings.pop("every", 1)
    own = PatchReuse(**{"side": 2, "first": 2, "last": 1, **settings})
    return Quality(reuse="steps", refresh=3, every=every, patches=own)


@cache
def shared(name: str) -> Any:
    return maskfx.compile(PIPES[name].build(), quality=Quality(patches=0.1))


def pipe_of(name: str) -> Any:
    return anew(name, compiled_pipe=shared(name), pool=RollingPool(1 << 30))


def call(name: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    return call_of(PIPES[name], seed, num_inference_steps=STEPS, **more)


def edit(name: str, mask: Any = None) -> dict[str, Any]:
    return {**call(name), "mask_image": square() if mask is None else mask}


def share(pipe: Any) -> float:
    """The computed share of the patches since the last look; nothing is held any more."""
    state = pipeline_state_of(pipe)
    assert state.notes == Counter()
    found = state.patches.share
    state.patches.clear()
    state.pool.nbytes()
    assert all(block.unused and block.own == 0 for block in state.pool._all())
    return found


@pytest.mark.parametrize("name", KINDS)
def test_everything_computed_is_the_dense_run_and_less_is_near_it(name: str) -> None:
    pipe = pipe_of(name)
    wanted = latents(plain(name), **call(name))
    found = latents(pipe, **call(name), quality=reuse(threshold=0.0))
    assert distance(found, wanted) < 1e-5  # the module itself, whose bits depend on alignment
    assert share(pipe) == 1
    found = latents(pipe, **call(name), quality=reuse(judge=Everything()))
    assert distance(found, wanted) < 1e-4
    assert share(pipe) == 1
    kept = latents(pipe, **call(name), quality=reuse(judge=Nothing(), age=STEPS))
    none = share(pipe)
    found = latents(pipe, **call(name), quality=reuse(judge=Turns()))
    assert 1e-4 < distance(found, wanted) < distance(kept, wanted)
    assert none < share(pipe) < 0.9


def test_a_call_without_that_quality_is_the_module_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, steps = pipe_of(FLUX), Steps(monkeypatch)
    latents(pipe, **call(FLUX), quality="all-steps")
    assert steps.kinds() == {"itself"}


def test_the_first_and_last_steps_and_those_between_extrapolated_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, steps = pipe_of(FLUX), Steps(monkeypatch)
    latents(pipe, **call(FLUX), quality=reuse(first=3, last=2, judge=Turns()))
    asked = [kind for [kind] in steps.taken()]
    assert asked == ["itself", "RecordStep", *["EditStep"] * 3, "itself", "itself"]
    quality = reuse(every=2, judge=Turns())
    given = {**call(FLUX), "num_inference_steps": 12}
    latents(pipe, **given, quality=quality)
    assert len(steps.taken()) == sum(quality.selection.computes(s, 12) for s in range(12)) < 12


@pytest.mark.parametrize("name", [EDIT, pytest.param("StableDiffusionInpaintPipeline", marks=slow)])
def test_an_edit_without_a_template_computes_the_masks_patches_that_changed(name: str) -> None:
    pipe = pipe_of(name)
    quality = reuse(judge=Everything(), outputs="hold")
    found = latents(pipe, **edit(name), quality=quality)
    masked = share(pipe)
    assert 0.3 < masked < 0.9
    kept = latents(pipe, **edit(name), quality=Quality(reuse="steps", refresh=3))
    assert distance(found, kept) < 0.3  # what edits of earlier steps without patches make
    latents(pipe, **edit(name), quality=reuse(judge=Turns()))
    assert share(pipe) < masked
    found = latents(pipe, **edit(name, square(0, 32)), quality=quality)
    assert distance(found, latents(plain(name), **edit(name, square(0, 32)))) < 1e-4
    assert share(pipe) == 1


def test_requests_of_other_sizes_steps_and_kinds_share_steps() -> None:
    """Each picture is the one that the request gets alone, and the memory comes back."""
    pipe = pipe_of(FLUX)
    calls = [
        {**call(FLUX, seed), "num_inference_steps": STEPS + seed, "height": 32 + 16 * (seed % 2)}
        for seed in range(4)
    ]
    qualities = [reuse(judge=Turns(), sets=("alike", "each")[n % 2]) for n in range(3)]
    named: list[Quality | str] = [*qualities, "all-steps"]
    options: list[dict[str, Any]] = [{"quality": quality} for quality in named]
    wanted = [
        latents(pipe, **{**c, **o, "generator": noise(n)})
        for n, (c, o) in enumerate(zip(calls, options, strict=True))
    ]
    share(pipe)
    with maskfx.Engine(maskfx.BatchPolicy(patience=0.5)) as engine:
        tickets = [
            engine.submit(
                pipe, **{**c, "generator": noise(n)}, **o, output_type="latent", return_dict=False
            )
            for n, (c, o) in enumerate(zip(calls, options, strict=True))
        ]
        found = [ticket.result()[0] for ticket in tickets]
        assert max(step.requests for step in engine.steps) > 1
        assert 0 < tickets[0].sites < tickets[0].whole
    for one, other in zip(found, wanted, strict=True):
        assert distance(one, other) < 1e-4
    share(pipe)


def test_a_judge_is_asked_once_for_all_requests_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose own judge fails fails by itself."""
    pipe, asked = pipe_of(FLUX), list[int]()
    original = Threshold.computes

    def computes(judge: Threshold, features: PatchFeatures) -> Bools:
        asked.append(features.change.shape[1])
        return original(judge, features)

    class Broken(Everything):
        def computes(self, features: PatchFeatures) -> Bools:
            raise RuntimeError("no decision")

    monkeypatch.setattr(Threshold, "computes", computes)
    wanted = [
        latents(pipe, **{**call(FLUX, n), "generator": noise(n)}, quality=reuse(threshold=0.3))
        for n in range(3)
    ]
    alone = set(asked)
    asked.clear()
    qualities = [*[reuse(threshold=0.3)] * 3, reuse(judge=Broken())]
    with maskfx.Engine(maskfx.BatchPolicy(patience=0.5)) as engine:
        tickets = [
            engine.submit(
                pipe,
                **{**call(FLUX, n), "generator": noise(n)},
                quality=quality,
                output_type="latent",
                return_dict=False,
            )
            for n, quality in enumerate(qualities)
        ]
        found = [ticket.result()[0] for ticket in tickets[:3]]
        with pytest.raises(RuntimeError, match="no decision"):
            tickets[3].result()
    for one, other in zip(found, wanted, strict=True):
        assert distance(one, other) < 1e-4
    assert len(alone) == 1
    assert max(asked) == 3 * max(alone)
    share(pipe)


def test_a_request_that_fails_or_is_cancelled_gives_its_memory_back() -> None:
    pipe = pipe_of(FLUX)

    def stop(pipe: Any, step: int, time: object, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 4:
            assert pipeline_state_of(pipe).pool.nbytes() > 0
            raise RuntimeError("stopped")
        return tensors

    given = {**call(FLUX), "callback_on_step_end": stop, "quality": reuse(judge=Turns())}
    with pytest.raises(RuntimeError, match="stopped"):
        latents(pipe, **given)
    share(pipe)
    with maskfx.Engine() as engine:
        ticket = engine.submit(pipe, **given)
        with pytest.raises(RuntimeError, match="stopped"):
            ticket.result()

        def cancel(pipe: Any, step: int, time: object, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 4:
                later.cancel()
            return tensors

        later = engine.submit(pipe, **{**given, "callback_on_step_end": cancel})
        with pytest.raises(maskfx.Cancelled):
            later.result()
    share(pipe)


def test_what_cant_reuse_patches_runs_in_full_with_a_note() -> None:
    pipe = maskfx.compile(PIPES[FLUX].build())
    wanted = latents(plain(FLUX), **call(FLUX))
    assert torch.equal(latents(pipe, **call(FLUX), quality=Quality(patches=0.1)), wanted)
    assert any("without stretches" in note for note in pipeline_state_of(pipe).notes)
    small = anew(FLUX, compiled_pipe=shared(FLUX), pool=RollingPool(1000))
    assert distance(latents(small, **call(FLUX), quality=reuse()), wanted) < 1e-4
    assert any("doesn't fit" in note for note in pipeline_state_of(small).notes)
    with pytest.raises(InputError, match="a relative change such as 0.1"):
        Quality(patches="often")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [EDIT, pytest.param("StableDiffusionInpaintPipeline", marks=slow)])
def test_an_edit_of_a_template_keeps_patches_of_the_mask(name: str) -> None:
    """Computing all of them makes what the edit of the template does."""
    pipe = pipe_of(name)
    wanted = latents(pipe, **edit(name), quality=Quality())
    whole = replace(reuse(judge=Everything(), outputs="hold"), reuse="template")
    assert distance(latents(pipe, **edit(name), quality=whole), wanted) < 1e-4
    masked = share(pipe)
    assert masked < 0.7
    quality = replace(reuse(judge=Turns()), reuse="template")
    found = latents(pipe, **edit(name), quality=quality)
    assert 1e-4 < distance(found, wanted) < 0.6
    assert share(pipe) < masked


@pytest.mark.parametrize("name", KINDS)
def test_patches_chosen_stretch_by_stretch_make_the_same_picture(name: str) -> None:
    """With decisions that don't depend on the inputs; then with those of a threshold."""
    pipe = pipe_of(name)
    wanted = latents(pipe, **call(name), quality=reuse(judge=Turns()))
    computed = share(pipe)
    found = latents(pipe, **call(name), quality=reuse(judge=Turns(), order="stretch"))
    assert distance(found, wanted) < 1e-4
    assert share(pipe) == computed < 1
    dense = latents(plain(name), **call(name))
    shares, errors = [], []
    for threshold in (1e-6, 0.5):
        quality = reuse(threshold=threshold, order="stretch", sets="each", outputs="hold")
        errors.append(distance(latents(pipe, **call(name), quality=quality), dense))
        shares.append(share(pipe))
    assert shares[0] == 1 > shares[1]
    assert errors[0] < 1e-4 < errors[1]


@pytest.mark.parametrize("name", [EDIT, pytest.param("StableDiffusionInpaintPipeline", marks=slow)])
@pytest.mark.parametrize("source", ["steps", "template"])
def test_edits_choose_patches_stretch_by_stretch(name: str, source: str) -> None:
    pipe = pipe_of(name)
    for judge in (Everything(), Turns()):
        found = {}
        for order in ("step", "stretch"):
            quality = replace(reuse(judge=judge, outputs="hold", order=order), reuse=source)
            picture = latents(pipe, **edit(name), quality=quality)
            found[order] = picture, share(pipe)
        assert distance(found["stretch"][0], found["step"][0]) < 1e-4
        assert found["stretch"][1] == pytest.approx(found["step"][1])
    assert found["stretch"][1] < 0.7


def test_requests_of_both_orders_share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the picture that it gets alone; the sites of a step are those that it computed."""
    pipe = pipe_of(FLUX)
    qualities = [reuse(judge=Turns(), order=order) for order in ("stretch", "step", "stretch")]
    calls = [{**call(FLUX, seed), "height": 32 + 16 * (seed % 2)} for seed in range(3)]
    wanted = [
        latents(pipe, **{**c, "quality": quality, "generator": noise(n)})
        for n, (c, quality) in enumerate(zip(calls, qualities, strict=True))
    ]
    share(pipe)
    with maskfx.Engine(maskfx.BatchPolicy(patience=0.5)) as engine:
        tickets = [
            engine.submit(
                pipe,
                **{**c, "quality": quality, "generator": noise(n)},
                output_type="latent",
                return_dict=False,
            )
            for n, (c, quality) in enumerate(zip(calls, qualities, strict=True))
        ]
        found = [ticket.result()[0] for ticket in tickets]
        assert max(step.requests for step in engine.steps) > 1
        for ticket in tickets:
            assert ticket.sites / ticket.whole == pytest.approx(ticket.patches.share, abs=0.02)
    for one, other in zip(found, wanted, strict=True):
        assert distance(one, other) < 1e-4
    share(pipe)
