"""Which template serves a call: one recorded in the same steps, of the same picture."""

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import maskfx
from maskfx.errors import BudgetError, Cancelled, InputError, NumberError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.masks.masks import pick
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.schedules.schedule import Schedule
from maskfx.pipelines.templates.batches import repeats_each
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.denoiser import CompiledDenoiser
from tests.factories.pipelines import (
    PIPES,
    STEPS,
    Steps,
    anew,
    call_of,
    distance,
    flow,
    latents,
    noise,
    picture,
    plain,
    square,
    white,
)

TEXT, UNET = "FluxPipeline", "StableDiffusionPipeline"
SAID, SAID_INPAINT = "FluxPipeline-spoken", "FluxInpaintPipeline-spoken"
UNET_SAID = "StableDiffusionInpaintPipeline-spoken"
TWO = {"num_images_per_prompt": 2}


def recorded(name: str) -> tuple[Any, Any]:
    """A pipeline and the result of a recorded call."""
    pipe = anew(name)
    return pipe, pipe(**call_of(PIPES[name], 7), record=True)


def edit(name: str, **more: Any) -> dict[str, Any]:
    return call_of(PIPES[name], 8, square(), **more)


# The same steps.


def test_a_template_of_another_number_of_steps_is_refused():
    pipe, result = recorded(TEXT)
    with pytest.raises(InputError, match=f"was recorded in {STEPS} steps, not 5; give this call"):
        pipe(**edit(TEXT, num_inference_steps=5, template=result.template))
    assert latents(pipe, **edit(TEXT, template=result.template)).isfinite().all()


def test_a_template_of_other_settings_of_the_scheduler_is_refused():
    pipe, result = recorded(TEXT)
    pipe.scheduler = flow(shift=3.0)
    with pytest.raises(InputError, match="with other settings of FlowMatchEulerDiscrete"):
        pipe(**edit(TEXT, template=result.template))


def test_a_template_of_other_times_is_refused():
    pipe, result = recorded(TEXT)
    with pytest.raises(InputError, match=r"at the times 1000, .*, not 1000, 500, 100"):
        pipe(**edit(TEXT, sigmas=[1.0, 0.5, 0.1], template=result.template))


@pytest.mark.slow
def test_a_template_of_another_scheduler_is_refused():
    pipe, result = recorded(UNET)
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(InputError, match="with DDIMScheduler, not EulerDiscreteScheduler"):
        pipe(**edit(UNET, template=result.template))


def test_a_picture_recorded_in_other_steps_goes_by_the_runs_own(monkeypatch: pytest.MonkeyPatch):
    pipe, result = recorded(TEXT)
    given = {"num_inference_steps": 5, "image": result.images[0]}
    steps = Steps(monkeypatch)
    found = latents(pipe, **edit(TEXT, **given))
    assert "EditStep" in steps.kinds()
    assert torch.equal(found, latents(pipe, **edit(TEXT, **given, quality=own_steps())))
    [note] = [note for note in pipe._maskfx.notes if "template isn't used" in note]
    assert f"in {STEPS} steps, not 5" in note


def own_steps() -> maskfx.Quality:
    return maskfx.Quality(reuse="steps")


def test_the_steps_of_a_recording_survive_on_disk(tmp_path: Path):
    schedule = Schedule(["DDIMScheduler"], "x", [666.0, 1.0], 2)
    library = TemplateLibrary(Tiers(host_bytes=1 << 20, store=Store(tmp_path)))
    library.begin("t")
    library.put_latents("t", 0, torch.ones(1, 4, 2, 2))
    library.finish("t", [torch.ones(1, 4, 2, 2)], schedule)
    library.tiers.flush()
    other = TemplateLibrary(Tiers(host_bytes=1 << 20, store=Store(tmp_path)))
    assert other.schedule("t") == schedule
    assert other.recorded_calls("t") == library.recorded_calls("t")


# The same picture.


def test_runs_with_noise_of_nobodys_are_templates_of_their_own():
    pipe = anew(TEXT)
    given = {**call_of(PIPES[TEXT], 7), "generator": None}
    torch.manual_seed(0)
    one = pipe(**given, record=True)
    torch.manual_seed(0)
    given["callback_on_step_end"] = brighter
    other = pipe(**given, record=True)
    assert one.template.name != other.template.name
    again = [pipe(**call_of(PIPES[TEXT], 7), record=True).template.name for _ in range(2)]
    assert again[0] == again[1]
    drawn = {**call_of(PIPES[TEXT], 7), "callback_on_step_end": brighter}
    assert pipe(**drawn, record=True).template.name not in again


def brighter(_pipe: Any, _step: int, _time: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {"latents": given["latents"] + 0.5}


def test_a_template_of_several_pictures_serves_as_many_or_one_that_is_named():
    pipe = anew(SAID)
    given = {**call_of(PIPES[SAID], 7), "generator": [noise(1), noise(2)]}
    both = pipe(**given, num_images_per_prompt=2, record=True)
    for number in (1, 3):
        with pytest.raises(InputError, match=f"has 2 pictures, this call makes {number}"):
            pipe(**edit(SAID, num_images_per_prompt=number, template=both.template))
    again: dict[str, Any] = {"template": both.template, "mask_image": square()}
    given["generator"] = [noise(1), noise(2)]
    wanted = latents(plain(SAID), **{**given, "generator": [noise(1), noise(2)]}, **TWO)
    assert distance(latents(pipe, **given, **again, **TWO), wanted) < 1e-4
    for i in (0, 1):
        given["generator"] = noise(1 + i)
        found = latents(pipe, **given, **again, image=both.images[i])
        assert distance(found, wanted[i : i + 1]) < 1e-4


@pytest.mark.parametrize(
    "name", [SAID_INPAINT, pytest.param("StableDiffusionImg2ImgPipeline", marks=pytest.mark.slow)]
)
def test_several_pictures_for_each_prompt_come_in_the_pipelines_order(name: str):
    pictures, masks = [picture(1), picture(2)], [square(2, 12), square(16, 30)]
    given = {**call_of(PIPES[name], 3), "image": pictures, **TWO}
    given |= {"prompt": ["a cat", "two dogs"]} if name == SAID_INPAINT else doubled(given)
    pipe = anew(name)
    given["generator"] = noise(5)
    found = [np.asarray(image) for image in pipe(**given, mask_image=masks).images]
    assert len(found) == 4
    for i, image in enumerate(found):
        outside = np.asarray(masks[i % 2]) <= 127
        assert np.array_equal(image[outside], np.asarray(pictures[i % 2])[outside])
        assert not np.array_equal(image, np.asarray(pictures[i % 2]))


def test_with_everything_masked_each_of_them_is_the_pipelines_own():
    name = SAID_INPAINT
    given = {**call_of(PIPES[name], 3, white()), "image": [picture(1), picture(2)], **TWO}
    given["prompt"] = ["a cat", "two dogs"]
    wanted = latents(plain(name), **{**given, "generator": noise(5)})
    assert distance(latents(anew(name), **{**given, "generator": noise(5)}), wanted) < 1e-4


def doubled(given: dict[str, Any]) -> dict[str, Any]:
    """Text states of two prompts."""
    return {n: v.repeat(2, 1, 1) for n, v in given.items() if n.endswith("prompt_embeds")}


def test_how_pictures_are_repeated_is_seen_from_their_latents():
    a, b = torch.randn(2, 1, 4, 2, 2)
    drawn = torch.randn(4, 4, 2, 2)
    assert repeats_each([drawn, torch.cat([a, a, b, b])], 2)
    assert not repeats_each([drawn, torch.cat([a, b, a, b])], 2)
    assert not repeats_each([drawn, torch.ones(4, 1, 2, 2), None], 2)  # nothing shows it
    assert not repeats_each([torch.cat([a, b])], 2)
    assert [pick(["a", "b"], i, 4) for i in range(4)] == ["a", "a", "b", "b"]
    assert [pick(["a", "b"], i, 4, in_rows=True) for i in range(4)] == ["a", "b", "a", "b"]


# Recordings that can't be kept, or are made at once.


def test_a_template_without_room_is_an_error_and_leaves_nothing():
    roomy = anew(TEXT)
    maskfx.template(roomy, **call_of(PIPES[TEXT], 7))
    [told] = pipeline_state_of(roomy).library.stored_templates()
    room = int(1.5 * sum(told.nbytes.values()))
    pipe = anew(TEXT, library=TemplateLibrary(Tiers(host_bytes=room)))
    first = maskfx.template(pipe, **call_of(PIPES[TEXT], 7))
    with pytest.raises(BudgetError, match="doesn't fit beside those that are pinned"):
        maskfx.template(pipe, **call_of(PIPES[TEXT], 9))
    assert [one.name for one in pipeline_state_of(pipe).library.stored_templates()] == [first.name]
    wanted = latents(roomy, **edit(TEXT), template=first.name)
    assert torch.equal(latents(pipe, **edit(TEXT), template=first), wanted)


def test_a_recorded_picture_without_room_is_noted():
    pipe = anew(TEXT, library=TemplateLibrary(Tiers(host_bytes=1 << 12)))
    made = pipe(**call_of(PIPES[TEXT], 7), record=True)
    assert np.isfinite(np.asarray(made.images[0])).all()
    assert "a picture's template isn't kept" in maskfx.explain(pipe)


def test_a_recorded_call_that_names_a_quality_keeps_the_steps_of_it():
    """As many as an edit in this quality computes: it reads all of them, and misses none."""
    pipe, given = anew(TEXT), call_of(PIPES[TEXT], 7, num_inference_steps=16)
    library = pipeline_state_of(pipe).library
    steps = {}
    for quality in (None, "fast"):
        name = pipe(**given, record=True, quality=quality).template.name
        calls = [call for call in library.recorded_calls(name) if call.name == "transformer"]
        steps[quality] = {call.step for call in calls}
    assert steps[None] == set(range(16))
    selected = Quality.of("fast").selection
    assert steps["fast"] == {step for step in range(16) if selected.computes(step, 16)}
    assert len(steps["fast"]) < 16
    edited = edit(TEXT, num_inference_steps=16, template=name, quality="fast")
    assert latents(pipe, **edited).isfinite().all()
    assert "no recording of a step" not in maskfx.explain(pipe)


@pytest.mark.parametrize("name", ["FluxInpaintPipeline", "StableDiffusionInpaintPipeline"])
def test_a_recording_skips_the_steps_that_its_edits_skip(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """These pipelines restore after each step what isn't masked, so the others are the same."""
    quality, steps = Quality(every=4, least=3), Steps(monkeypatch)
    given = call_of(PIPES[name], 8, square(), num_inference_steps=10, strength=1.0)
    selected = [step for step in range(10) if quality.selection.computes(step, 10)]
    after = {}
    for usual in (quality, Quality()):
        pipe = anew(name, quality=usual)
        latents(pipe, **given, quality=quality)
        library = pipeline_state_of(pipe).library
        [template] = [found.name for found in library.stored_templates()]
        wanted = selected if usual is quality else range(10)
        calls = [call for call in library.recorded_calls(template) if call.name != "latents"]
        assert {call.step for call in calls} == set(wanted)
        kinds = [set(asked) for asked in steps.taken() if "itself" not in asked]
        expected = [{"RecordStep"}] * len(wanted) + [{"EditStep"}] * len(selected)
        assert kinds == expected
        after[usual] = [library.after(template, step)[0] for step in range(10)]
    for step in range(10):
        alike = distance(after[quality][step], after[Quality()][step]) < 1e-5
        assert alike == (step in selected), step


def test_recordings_of_one_name_at_once_do_not_mix():
    pipe = anew(TEXT)
    given = [call_of(PIPES[TEXT], 7) for _ in range(2)]
    with maskfx.Engine() as engine:
        tickets = [engine.submit(pipe, **one, record=True) for one in given]
        names = {ticket.result().template.name for ticket in tickets}
    [name] = names
    wanted, template = recorded(TEXT)
    library = pipeline_state_of(pipe).library
    other = pipeline_state_of(wanted).library
    assert library.recorded_calls(name) == other.recorded_calls(template.template.name)
    assert latents(pipe, **edit(TEXT, template=name)).isfinite().all()


def test_a_recording_with_numbers_that_are_not_finite_is_not_kept():
    pipe, given = anew(TEXT), call_of(PIPES[TEXT], 7)

    def spoil(_pipe: Any, step: int, _time: Any, now: dict[str, Any]) -> dict[str, Any]:
        return {"latents": now["latents"] * (float("nan") if step == 1 else 1)}

    with pytest.raises(NumberError, match="step 2.*aren't finite"):
        pipe(**given, callback_on_step_end=spoil, record=True)
    library = pipeline_state_of(pipe).library
    assert library.stored_templates() == []
    assert not library._placed


def test_an_interrupted_recording_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    """The recording is the first of the pipeline's runs that an edit makes."""
    name = "FluxInpaintPipeline"
    pipe, step, asked = anew(name), CompiledDenoiser.step, list[Any]()
    wanted = latents(anew(name), **edit(name))

    def stopping(denoiser: CompiledDenoiser, steps: Any) -> Any:
        asked.append(steps)
        pipe._interrupt = len(asked) == 2  # as a button does, in another thread
        return step(denoiser, steps)

    monkeypatch.setattr(CompiledDenoiser, "step", stopping)
    latents(pipe, **edit(name))
    assert len(asked) == 2  # the edit is interrupted too
    assert pipe.templates() == []
    assert torch.equal(latents(pipe, **edit(name)), wanted)
    asked.clear()
    with pytest.raises(Cancelled, match="was interrupted"):
        maskfx.template(pipe, **call_of(PIPES[name], 8, strength=0.9))


def test_a_template_recorded_in_autocast_serves_no_call_outside_of_it():
    name = "FluxInpaintPipeline"
    pipe, wanted = anew(name), latents(anew(name), **edit(name))
    with torch.autocast("cpu", torch.bfloat16):
        latents(pipe, **edit(name))
    assert torch.equal(latents(pipe, **edit(name)), wanted)


@pytest.mark.parametrize("name", [UNET_SAID, SAID_INPAINT])
def test_a_prompt_and_its_states_have_one_template(name: str, monkeypatch: pytest.MonkeyPatch):
    pipe = anew(name)
    negative = {"negative_prompt": ""} if name == UNET_SAID else {}
    wanted = latents(pipe, **call_of(PIPES[name], 0, square(), **negative))
    steps = Steps(monkeypatch)
    assert distance(latents(pipe, **with_states(name)), wanted) < 1e-5
    assert steps.kinds() == {"EditStep"}, "nothing is recorded again"


def test_without_a_text_encoder_states_are_recorded_as_zeros():
    found = []
    for missing in (("text_encoder",), ("text_encoder", "tokenizer")):
        pipe = anew(UNET_SAID)
        pipe.register_modules(**dict.fromkeys(missing))
        found.append(latents(pipe, **with_states(UNET_SAID)))
        told = [note for note in pipe._maskfx.notes if "recorded as zeros" in note]
        assert len(told) == (len(missing) == 1), pipe._maskfx.notes
    assert distance(*found) < 1e-5


def with_states(name: str) -> dict[str, Any]:
    """A call with the states of its prompt in its place."""
    given = call_of(PIPES[name], 0, square())
    prompt = given.pop("prompt")
    if name == UNET_SAID:
        states, negative = plain(name).encode_prompt(prompt, "cpu", 1, True)
        return given | {"prompt_embeds": states, "negative_prompt_embeds": negative}
    length = given["max_sequence_length"]
    states, pooled, _ = plain(name).encode_prompt(prompt, None, max_sequence_length=length)
    return given | {"prompt_embeds": states, "pooled_prompt_embeds": pooled}


# A whole picture.


@pytest.mark.parametrize("name", ["FluxInpaintPipeline", "StableDiffusionInpaintPipeline"])
def test_an_edit_of_everything_records_nothing_and_is_the_pipelines_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, pipe = Steps(monkeypatch), anew(name)
    for seed in (0, 1):
        given = call_of(PIPES[name], seed, white()) | {"image": picture(seed)}
        wanted = latents(plain(name), **given)
        given = call_of(PIPES[name], seed, white()) | {"image": picture(seed)}
        assert distance(latents(pipe, **given), wanted) < 1e-6
    assert steps.kinds() == {"itself"}
    library = pipeline_state_of(pipe).library
    assert not library.stored_templates()
    part = call_of(PIPES[name], 1, square()) | {"image": picture(1)}
    latents(pipe, **part)
    assert "RecordStep" in steps.kinds()
    [template] = library.stored_templates()
    part = call_of(PIPES[name], 1, white()) | {"image": picture(1)}
    result = pipe(**part, template=template.name)
    assert result.template.name == template.name


def test_patches_of_a_whole_picture_are_still_kept() -> None:
    name, quality = "FluxInpaintPipeline", Quality(patches=10.0, every=1)
    pipe = maskfx.compile(PIPES[name].build(), quality=quality)
    latents(pipe, **call_of(PIPES[name], 0, white(), num_inference_steps=8))
    assert 0 < pipeline_state_of(pipe).patches.share < 1
