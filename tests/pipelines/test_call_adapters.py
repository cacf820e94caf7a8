"""Calls with `lora=`: pictures are those of a pipeline whose weights have the adapters in them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx import InputError, Lora, Quality
from maskfx.engine.processes.placement import InEngineLoop
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.fitting.profile import similarities
from maskfx.pipelines.runs import execute
from maskfx.pipelines.runs.run import DenoiserCall, PipelineRun
from maskfx.pipelines.runs.step_members import choose_steps
from maskfx.runtime.lora.adapter import Adapter
from maskfx.runtime.programs import program_cache
from tests.factories.lora import adapter_of, low_rank, merge_into
from tests.factories.pipelines import (
    PIPES,
    anew,
    call_of,
    compiled,
    distance,
    latents,
    plain,
    square,
    white,
)

FLUX = "FluxInpaintPipeline"
SPOKEN = "FluxInpaintPipeline-spoken"
TEXT = "FluxPipeline"
CONTROL = "FluxControlNetInpaintPipeline"


@cache
def adapters(name: str, *parts: str) -> tuple[Adapter, Adapter]:
    return (
        adapter_of(plain(name), 4, 1, *parts),
        adapter_of(plain(name), 32, 2, *parts, share=0.5),
    )


def in_weights(name: str, *items: tuple[Adapter, float]) -> Any:
    """Return a pipeline that isn't compiled, with adapters in its weights."""
    return merge_into(PIPES[name].build(), items)


def test_an_edit_has_its_adapters() -> None:
    pipe, (one, other) = anew(FLUX), adapters(FLUX, "transformer")
    call, own = call_of(PIPES[FLUX], 1, white()), [(one, 0.8), other]
    wanted = latents(in_weights(FLUX, (one, 0.8), (other, 1.0)), **call)
    assert distance(latents(plain(FLUX), **call), wanted) > 0.1
    assert distance(latents(pipe, **call_of(PIPES[FLUX], 1, white()), lora=own), wanted) < 1e-4


def test_a_template_is_recorded_with_the_adapters_unless_told_otherwise() -> None:
    pipe, (one, _) = anew(FLUX), adapters(FLUX, "transformer")
    call = {"mask_image": square()}
    merged = maskfx.compile(in_weights(FLUX, (one, 1.0)), quality="all-steps")
    wanted = latents(merged, **call_of(PIPES[FLUX], 1, **call))
    found = latents(pipe, **call_of(PIPES[FLUX], 1, **call), lora=[one])
    assert distance(found, wanted) < 1e-4
    assert len(pipe.templates()) == 1
    latents(pipe, **call_of(PIPES[FLUX], 1, **call))
    assert len(pipe.templates()) == 2
    mixed = latents(pipe, **call_of(PIPES[FLUX], 1, **call), lora=[Lora(one, recorded=False)])
    assert len(pipe.templates()) == 2
    assert distance(mixed, wanted) > 1e-3
    assert not pipeline_state_of(pipe).notes, "no call ran without its recording"
    for changed in (Lora(one, 0.5), Lora(one, first=1)):
        latents(pipe, **call_of(PIPES[FLUX], 1, **call), lora=[changed])
    assert len(pipe.templates()) == 4


def test_an_adapter_acts_from_its_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, (one, _) = anew(TEXT), adapters(TEXT, "transformer")
    seen: list[list[int]] = []
    original = execute.run_parts

    def listen(denoiser: Any, members: Any, *rest: Any) -> None:
        seen.append([len(member.step.adapters) for member in members])
        original(denoiser, members, *rest)

    monkeypatch.setattr(execute, "run_parts", listen)
    call = call_of(PIPES[TEXT], 0)
    none = latents(pipe, **call)
    seen.clear()
    late = latents(pipe, **call_of(PIPES[TEXT], 0), lora=[Lora(one, first=1)])
    assert seen == [[0], [1], [1]]
    whole = latents(pipe, **call_of(PIPES[TEXT], 0), lora=[one])
    assert min(distance(late, none), distance(late, whole)) > 1e-3
    never = latents(pipe, **call_of(PIPES[TEXT], 0), lora=[Lora(one, first=99), (one, 0.0)])
    assert distance(never, none) < 1e-6


@pytest.mark.slow
def test_a_run_alone_has_its_adapters_in_the_weights() -> None:
    pipe, (one, other) = anew(FLUX), adapters(FLUX, "transformer")
    denoiser = pipeline_state_of(pipe).denoisers["transformer"]
    before = [value.clone() for value in pipe.transformer.parameters()]

    def edit(own: list[Any], **more: Any) -> Tensor:
        call = call_of(PIPES[FLUX], 1, square(), num_inference_steps=8, **more)
        return latents(pipe, **call, lora=own)

    found = edit([one, other])
    costs = denoiser.in_place.costs
    assert costs.steps_in_place == costs.steps_in_place + costs.steps_with_terms > 8
    assert all(map(torch.equal, pipe.transformer.parameters(), before))
    assert torch.equal(edit([one, other]), found)
    known = costs.steps_in_place
    # code of the caller may change weights, or have the module in another pipeline
    terms = edit([one, other], callback_on_step_end=lambda *_: {})
    assert 0 < distance(terms, found) < 1e-4
    shared = maskfx.compile(type(pipe).maskfx_original(**pipe.components))
    assert torch.equal(edit([one, other]), terms)
    maskfx.decompile(shared)
    assert costs.steps_in_place == known


def test_forecasts_begin_again_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every third step computed, an adapter acts from the next computed step on."""
    pipe, (one, _) = anew(FLUX), adapters(FLUX, "transformer")
    steps: list[tuple[int, int]] = []
    forgotten: list[int] = []
    original, follow = choose_steps, PipelineRun._follow_adapters

    def listen(call: DenoiserCall) -> Any:
        found = original(call)
        steps.append((call.step, len(found[0].step.adapters)))
        return found

    def following(run: PipelineRun, call: DenoiserCall) -> None:
        before = len(run.forecasts._curves)
        follow(run, call)
        if len(run.forecasts._curves) < before:
            forgotten.append(call.step)

    def edit() -> Tensor:
        call = call_of(PIPES[FLUX], 0, square(), num_inference_steps=12)
        return latents(pipe, **call, quality=Quality(every=3), lora=[Lora(one, first=5)])

    first = edit()
    monkeypatch.setattr(execute, "choose_steps", listen)
    monkeypatch.setattr(PipelineRun, "_follow_adapters", following)
    assert distance(edit(), first) < 1e-6
    begin = next(step for step, count in steps if count)
    assert begin >= 5
    assert forgotten == [begin]
    assert all(bool(count) == (step >= 5) for step, count in steps)
    assert len(steps) < 12
    assert not pipeline_state_of(pipe).notes


def test_text_encoders_have_their_adapters() -> None:
    pipe, parts = anew(SPOKEN), ("transformer", "text_encoder", "text_encoder_2")
    one, _ = adapters(SPOKEN, *parts)
    wanted = latents(in_weights(SPOKEN, (one, 1.0)), **call_of(PIPES[SPOKEN], 1, white()))
    found = latents(pipe, **call_of(PIPES[SPOKEN], 1, white()), lora=[one])
    assert distance(found, wanted) < 1e-4
    only = Adapter("texts", "texts", {"text_encoder": one.parts["text_encoder"]})
    plainly = latents(pipe, **call_of(PIPES[SPOKEN], 1, white()))
    assert (
        distance(latents(pipe, **call_of(PIPES[SPOKEN], 1, white()), lora=[only]), plainly) > 1e-3
    )
    late = latents(pipe, **call_of(PIPES[SPOKEN], 1, white()), lora=[Lora(only, first=1)])
    assert distance(late, plainly) < 1e-4


def test_requests_with_other_adapters_share_steps_and_encoders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, one = compiled(SPOKEN), adapters(SPOKEN, "transformer", "text_encoder")[0]
    other = adapters(SPOKEN, "transformer")[1]
    sets: list[Any] = [None, [one], [other], [one, (other, 0.5)], [(one, 0.3)]]
    alone = [latents(pipe, **call_of(PIPES[SPOKEN], 1, square()), lora=own) for own in sets]
    monkeypatch.setattr(program_cache, "capture", None)  # nothing is captured again
    with maskfx.Engine(maskfx.BatchPolicy(batch=5, patience=5.0)) as engine:
        tickets = [
            engine.submit(
                pipe, **call_of(PIPES[SPOKEN], 1, square()), output_type="latent", lora=own
            )
            for own in (*sets, *sets)
        ]
        found = [ticket.result(120).images for ticket in tickets]
        assert max(step.requests for step in engine.steps) > 1
    for i, own in enumerate(found):
        assert distance(own, alone[i % len(sets)]) < 1e-4, i


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("StableDiffusionInpaintPipeline-spoken", ("unet", "text_encoder")),
        ("StableDiffusionControlNetInpaintPipeline", ("unet", "controlnet")),
        (CONTROL, ("transformer", "controlnet")),
        ("StableDiffusion3InpaintPipeline", ("transformer",)),
    ],
)
def test_families(name: str, parts: tuple[str, ...]) -> None:
    pipe, (one, other) = compiled(name), adapters(name, *parts)
    own = [(one, 0.8), other]
    merged = in_weights(name, (one, 0.8), (other, 1.0))
    wanted = latents(merged, **call_of(PIPES[name], 1, white()))
    assert distance(latents(pipe, **call_of(PIPES[name], 1, white()), lora=own), wanted) < 1e-4
    wanted = latents(
        maskfx.compile(merged, quality="all-steps"), **call_of(PIPES[name], 1, square())
    )
    found = latents(pipe, **call_of(PIPES[name], 1, square()), lora=own)
    assert distance(found, wanted) < 1e-4


@pytest.mark.slow
def test_a_control_net_in_a_process_of_its_own() -> None:
    pipe, (one, other) = compiled(CONTROL), adapters(CONTROL, "transformer", "controlnet")
    sets: list[Any] = [[one], None, [other], [one]]
    alone = [latents(pipe, **call_of(PIPES[CONTROL], 1, square()), lora=own) for own in sets]
    with maskfx.Engine(own_process=["controlnet"]) as engine:
        for _ in range(2):
            tickets = [
                engine.submit(
                    pipe, **call_of(PIPES[CONTROL], 1, square()), output_type="latent", lora=own
                )
                for own in sets
            ]
            for ticket, wanted in zip(tickets, alone, strict=True):
                assert distance(ticket.result(300).images, wanted) < 1e-4
        [service] = engine.services._services
        assert service.pids
        assert service.computed_here == 0
        assert len(service.replicas[0]._layers) == 2


@pytest.mark.slow
@pytest.mark.parametrize("outside", [maskfx.HelperProcesses, InEngineLoop])
def test_encoders_elsewhere_have_the_adapters_of_their_request(outside: Any) -> None:
    pipe, (one, _) = compiled(SPOKEN), adapters(SPOKEN, "text_encoder", "text_encoder_2")
    sets: list[Any] = [[one], None]
    alone = [latents(pipe, **call_of(PIPES[SPOKEN], 1, square()), lora=own) for own in sets]
    with maskfx.Engine(outside=outside(), remember=0) as engine:
        for own, wanted in zip(sets, alone, strict=True):
            call = call_of(PIPES[SPOKEN], 1, square(), output_type="latent")
            assert distance(engine.submit(pipe, **call, lora=own).result(300).images, wanted) < 1e-4


# Checks.


def test_arguments_that_are_wrong() -> None:
    pipe, (one, _) = compiled(FLUX), adapters(FLUX, "transformer")
    call = call_of(PIPES[FLUX], 0, square())
    layer = replace(low_rank(one.parts["transformer"]["x_embedder"]), scale=1.0)
    for given, message in (
        ("name", "no adapter of this name is registered"),
        ([3], "give the name of a registered adapter"),
        ([(one, "strong")], "give a finite number"),
        ([Lora(one, first=0), (one, float("inf"))], "give a finite number"),
        ([replace(one, parts={"unet": {}})], "changes 'unet', and the pipeline has"),
        ([replace(one, parts={"transformer": {"gone": layer}})], "there is no such layer"),
        ([replace(one, parts={"vae": {"gone": layer}})], "there is no such layer"),
    ):
        with pytest.raises(InputError, match=message):
            pipe(**call, lora=given)
    with pytest.raises(InputError, match="give a step's number"):
        Lora(one, first=-1)


def test_a_profile_compares_latents_where_the_last_ones_differ() -> None:
    torch.manual_seed(0)
    without = [torch.randn(1, 4, 16, 16) for _ in range(3)]
    adapted = [one.clone() for one in without]
    adapted[1][..., :2, :2] *= -1
    adapted[2][..., :2, :2] += 1
    assert torch.cosine_similarity(without[1].flatten(), adapted[1].flatten(), dim=0) > 0.9
    assert similarities(without, adapted)[:2] == pytest.approx([1.0, -1.0], abs=1e-5)
    assert similarities(without, without) == [1.0, 1.0, 1.0]
    assert similarities([], []) == []
    prior = [torch.ones(1, 6), *without]
    assert similarities(prior, [-torch.ones(1, 6), *adapted])[0] == pytest.approx(-1.0)
    adapted[2][0, 0, 9, 9] = float("nan")
    assert similarities(without, adapted)[:2] == pytest.approx([1.0, -1.0], abs=1e-5)
