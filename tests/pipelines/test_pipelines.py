"""A compiled pipeline is the pipeline: the same object, called as before, and edits narrow."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import maskfx
from maskfx.errors import InputError, MaskError
from maskfx.pipelines.masks.masks import grown
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.cache.stores.store import SUFFIX, Store
from maskfx.runtime.cache.tiers import Tiers
from tests.factories.pipelines import (
    PIPES,
    SIDE,
    STEPS,
    Steps,
    anew,
    call_of,
    compiled,
    distance,
    latents,
    noise,
    picture,
    plain,
    square,
    strokes,
    white,
)

FLUX, TRUE = "FluxInpaintPipeline", "FluxInpaintPipeline-truecfg"
SPOKEN, TEXT = "FluxInpaintPipeline-spoken", "FluxPipeline"
SAID = "FluxPipeline-spoken"

OLD = np.asarray(picture())


def edit(name: str = FLUX, seed: int = 0, mask: Image.Image | None = None, **more: Any) -> Any:
    return call_of(PIPES[name], seed, square() if mask is None else mask, **more)


def pixels(name: str = FLUX, **more: Any) -> np.ndarray[Any, Any]:
    found: Image.Image = compiled(name)(**edit(name, **more)).images[0]
    return np.asarray(found)


def masked(mask: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(mask) > 127


# The object.


def test_compile_gives_the_same_object_of_a_class_of_the_same_name():
    pipe: Any = PIPES[FLUX].build()
    forward = pipe.transformer.forward
    assert maskfx.compile(pipe, quality="all-steps") is pipe
    assert type(pipe).__name__ == "FluxInpaintPipeline"
    assert issubclass(type(pipe), diffusers.FluxInpaintPipeline)
    assert maskfx.decompile(pipe) is pipe
    assert pipe.transformer.forward == forward
    assert type(pipe) is diffusers.FluxInpaintPipeline
    assert not any("maskfx" in name for name in vars(pipe))


@pytest.mark.parametrize("name", [FLUX, TEXT])
def test_its_signature_has_the_pipelines_arguments_and_the_added_ones(name: str):
    pipe = PIPES[name].build()
    own = inspect.signature(pipe.__call__).parameters
    documented = pipe.__call__.__doc__
    maskfx.compile(pipe)
    found = inspect.signature(pipe.__call__).parameters
    assert list(found)[: len(own)] == list(own)
    assert all(found[name] == own[name] for name in own)
    added = {"quality", "template", "record", "lora", "image", "mask_image"}
    assert set(found) == set(own) | added
    assert pipe.__call__.__doc__ == documented
    assert inspect.signature(type(pipe).__call__).parameters.keys() == {"self", *found}


def test_compiling_twice_and_decompiling_twice_are_errors():
    pipe = maskfx.compile(PIPES[FLUX].build(), quality="all-steps")
    with pytest.raises(InputError, match=r"is compiled already; .* maskfx.decompile\(pipe\) first"):
        maskfx.compile(pipe, quality="all-steps")
    maskfx.decompile(pipe)
    with pytest.raises(InputError, match=r"isn't compiled; pass what maskfx.compile\(\) returned"):
        maskfx.decompile(pipe)


def test_two_pipelines_may_share_a_denoiser():
    one = maskfx.compile(PIPES[FLUX].build(), quality="all-steps")
    other: Any = diffusers.FluxPipeline(
        **{n: one.components[n] for n in parts(diffusers.FluxPipeline)}
    )
    other.set_progress_bar_config(disable=True)
    wanted = latents(plain(TEXT), **call_of(PIPES[TEXT]))
    maskfx.compile(other, quality="all-steps")
    assert torch.equal(latents(other, **call_of(PIPES[TEXT])), wanted)
    maskfx.decompile(one)
    assert hasattr(other.transformer.forward, "maskfx_standin")
    maskfx.decompile(other)
    assert not hasattr(other.transformer.forward, "maskfx_standin")
    assert torch.equal(latents(other, **call_of(PIPES[TEXT])), wanted)


def parts(factory: Any) -> list[str]:
    required, _ = factory._get_signature_keys(factory)
    return list(required)


def test_saved_and_loaded_it_is_the_original(tmp_path: Path):
    pipe = compiled(TEXT)
    absent = {name: None for name in parts(type(pipe)) if getattr(pipe, name) is None}
    pipe.save_pretrained(tmp_path / "compiled")
    plain(TEXT).save_pretrained(tmp_path / "plain")

    def made(factory: Any, folder: Path) -> tuple[Any, Tensor]:
        loaded = factory.from_pretrained(folder, **absent)
        loaded.set_progress_bar_config(disable=True)
        return loaded, latents(loaded, **call_of(PIPES[TEXT]))

    # loaded both, for weights that lie elsewhere in memory may round elsewhere
    _, wanted = made(diffusers.FluxPipeline, tmp_path / "plain")
    for factory in (diffusers.FluxPipeline, type(pipe)):
        loaded, found = made(factory, tmp_path / "compiled")
        assert torch.equal(found, wanted)
    maskfx.compile(
        loaded, quality="all-steps"
    )  # one that the class of a compiled pipeline made isn't compiled yet
    assert torch.equal(latents(loaded, **call_of(PIPES[TEXT])), wanted)
    assert type(maskfx.decompile(loaded)) is diffusers.FluxPipeline


@pytest.mark.slow
def test_decompiled_it_gives_the_original_bits_again():
    pipe = PIPES[FLUX].build()
    arguments: Callable[[], Any] = lambda: edit(seed=3)  # noqa: E731
    before = latents(pipe, **arguments())
    maskfx.compile(pipe, quality="all-steps")
    assert not torch.equal(latents(pipe, **arguments()), before)
    maskfx.decompile(pipe)
    assert torch.equal(latents(pipe, **arguments()), before)


# Without a mask.


@pytest.mark.parametrize("name", [TEXT, "FluxKontextPipeline-truecfg"])
def test_calls_without_a_mask_have_the_original_bits(name: str):
    found = latents(compiled(name), **call_of(PIPES[name]))
    assert torch.equal(found, latents(plain(name), **call_of(PIPES[name])))


# Edits.


@pytest.mark.parametrize("name", [FLUX, TRUE, SPOKEN])
def test_a_full_mask_is_the_dense_run(name: str):
    wanted = latents(plain(name), **edit(name, mask=white()))
    assert distance(latents(compiled(name), **edit(name, mask=white())), wanted) < 1e-4


def test_pixels_outside_the_mask_are_the_pictures_own_bytes():
    outside = ~masked(square())
    done = pixels()
    assert np.array_equal(done[outside], OLD[outside])
    assert not np.array_equal(done[~outside], OLD[~outside])
    floats = np.asarray(picture(), np.float32) / 255
    [as_np] = compiled(FLUX)(**edit(output_type="np")).images
    assert np.array_equal(as_np[outside], floats[outside])
    [as_pt] = compiled(FLUX)(**edit(output_type="pt"), return_dict=False)[0]
    assert np.array_equal(as_pt.movedim(0, -1).numpy()[outside], floats[outside])


def test_floats_outside_the_mask_are_the_tensors_own():
    given = torch.rand(1, 3, SIDE, SIDE, generator=noise(9))
    found = compiled(FLUX)(**edit(image=given, output_type="pt")).images
    outside = torch.from_numpy(~masked(square()))
    assert torch.equal(found[0][:, outside], given[0][:, outside])


def test_feather_stays_inside_the_mask():
    hard, soft = pixels(), pixels(quality=maskfx.Quality(feather=3))
    outside = ~masked(square())
    assert np.array_equal(soft[outside], OLD[outside])
    changed = (soft != hard).any(-1)
    assert changed.any()
    assert masked(square(8, 20))[changed].all()
    assert not changed[11:17, 11:17].any()


def test_strokes_of_one_pixel_change_the_picture_there_and_only_there():
    done = pixels(mask=strokes())
    inside = masked(strokes())
    assert np.array_equal(done[~inside], OLD[~inside])
    assert (done[inside] != OLD[inside]).any(-1).mean() > 0.9


def test_a_first_edit_records_and_later_ones_only_edit(monkeypatch: pytest.MonkeyPatch):
    pipe = anew(FLUX)
    steps = Steps(monkeypatch)
    latents(pipe, **edit())
    assert steps.taken() == [["RecordStep"]] * STEPS + [["EditStep"]] * STEPS
    latents(pipe, **edit(seed=1, mask=strokes(), guidance_scale=3.0))
    assert steps.taken() == [["EditStep"]] * STEPS
    latents(pipe, **edit(image=picture(1)))
    assert steps.taken() == [["RecordStep"]] * STEPS + [["EditStep"]] * STEPS
    assert all(d.programs for d in pipe._maskfx.denoisers.values())
    assert "calls of" not in maskfx.explain(pipe)


def test_the_first_edit_of_a_picture_decides_nothing():
    one, other = anew(FLUX), anew(FLUX)
    latents(one, **edit(seed=1))
    latents(other, **edit(seed=2, mask=strokes(), guidance_scale=2.0))
    assert torch.equal(latents(one, **edit(seed=3)), latents(other, **edit(seed=3)))


def test_both_calls_of_a_true_guidance_are_in_one_step(monkeypatch: pytest.MonkeyPatch):
    latents(compiled(TRUE), **edit(TRUE))
    steps = Steps(monkeypatch)
    latents(compiled(TRUE), **edit(TRUE, seed=1))
    assert steps.taken() == [["EditStep", "EditStep"]] * STEPS


@pytest.mark.parametrize("more", [{"num_images_per_prompt": 2}, {"prompt": ["a cat", "two dogs"]}])
def test_several_pictures_of_one_call_are_those_of_single_calls(more: dict[str, Any]):
    def given(index: int | None) -> dict[str, Any]:
        start = torch.randn(2, 4, SIDE // 2, SIDE // 2, generator=noise(4))
        prompts = more.get("prompt", ["a cat", "a cat"])
        if index is None:
            return edit(SPOKEN, **more, latents=start, strength=1.0)
        own = {"prompt": prompts[index], "latents": start[index : index + 1]}
        return edit(SPOKEN, **own, strength=1.0)

    both = latents(compiled(SPOKEN), **given(None))
    single = [latents(compiled(SPOKEN), **given(i)) for i in (0, 1)]
    assert distance(both, torch.cat(single)) < 1e-4


def test_a_crop_around_the_mask_is_edited():
    mask = square(10, 16)
    done = pixels(mask=mask, padding_mask_crop=4)
    inside = masked(mask)
    assert np.array_equal(done[~inside], OLD[~inside])
    assert (done[inside] != OLD[inside]).any()


@pytest.mark.parametrize("quality", ["fast", "balanced", "faithful"])
def test_named_qualities_keep_the_background(quality: str):
    done = pixels(quality=quality)
    outside = ~masked(square())
    assert np.array_equal(done[outside], OLD[outside])


def test_first_and_last_steps_are_computed_in_full(monkeypatch: pytest.MonkeyPatch):
    latents(compiled(FLUX), **edit())
    steps = Steps(monkeypatch)
    latents(compiled(FLUX), **edit(quality=maskfx.Quality(first=1, last=1)))
    assert steps.taken() == [["itself"], ["EditStep"], ["itself"]]


def test_by_its_own_steps_an_edit_needs_no_template(monkeypatch: pytest.MonkeyPatch):
    steps = Steps(monkeypatch)
    own = maskfx.Quality(reuse="steps", refresh=2)
    latents(compiled(FLUX), **edit(num_inference_steps=6, quality=own))
    kinds = [kind for [kind] in steps.taken()]
    assert kinds == ["itself", "RecordStep", "EditStep", "RecordStep", "EditStep", "RecordStep"]


def test_auto_records_what_is_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    pipe = anew(FLUX, quality=maskfx.Quality(reuse="auto"))
    steps = Steps(monkeypatch)
    latents(pipe, **edit())
    assert len(steps.taken()) == STEPS
    latents(pipe, **edit(seed=1))
    assert steps.taken() == [["RecordStep"]] * STEPS + [["EditStep"]] * STEPS


# Pictures from nothing.


def test_a_recorded_run_is_reproduced_by_an_edit_of_it(monkeypatch: pytest.MonkeyPatch):
    pipe = compiled(TEXT)
    result = pipe(**call_of(PIPES[TEXT], 7), record=True)
    wanted = latents(plain(TEXT), **call_of(PIPES[TEXT], 7))
    steps = Steps(monkeypatch)
    more = {"template": result.template, "mask_image": square()}
    assert distance(latents(pipe, **call_of(PIPES[TEXT], 7), **more), wanted) < 1e-4
    assert steps.kinds() == {"EditStep"}
    # with another prompt and noise the latents outside the mask are the recorded ones
    other = latents(pipe, **call_of(PIPES[TEXT], 8), **more)
    sites = torch.from_numpy(masked(square())).view(8, 4, 8, 4).any(3).any(1)
    sites = grown(sites, maskfx.Quality().margin).flatten()
    assert distance(other[:, ~sites], wanted[:, ~sites]) < 1e-4
    assert distance(other[:, sites], wanted[:, sites]) > 0.1
    steps.taken()
    # the picture itself finds its template
    done = pipe(**call_of(PIPES[TEXT], 8), image=result.images[0], mask_image=square()).images[0]
    assert steps.kinds() == {"EditStep"}
    outside = ~masked(square())
    old = np.asarray(result.images[0])
    assert np.array_equal(np.asarray(done)[outside], old[outside])
    assert not np.array_equal(np.asarray(done), old)


@pytest.mark.slow
def test_each_of_several_recorded_pictures_has_its_own_template():
    pipe = compiled(SAID)
    given = call_of(PIPES[SAID], 7)
    both = pipe(
        **{**given, "generator": [noise(1), noise(2)]}, num_images_per_prompt=2, record=True
    )
    for seed, image in zip((1, 2), both.images, strict=True):
        arguments = {**given, "generator": noise(seed)}
        wanted = latents(plain(SAID), **arguments)
        arguments = {**given, "generator": noise(seed), "image": image, "mask_image": square()}
        assert distance(latents(pipe, **arguments), wanted) < 1e-4


def test_without_a_template_a_picture_from_nothing_goes_by_its_own_steps():
    pipe = compiled(TEXT)
    arguments = {**call_of(PIPES[TEXT]), "image": picture(5), "mask_image": square()}
    done = np.asarray(pipe(**arguments).images[0])
    outside = ~masked(square())
    assert np.array_equal(done[outside], np.asarray(picture(5))[outside])


def test_template_prepares_an_edit(monkeypatch: pytest.MonkeyPatch):
    pipe = anew(FLUX)
    given = PIPES[FLUX].inputs(0)
    made = maskfx.template(pipe, image=picture(), **given)
    steps = Steps(monkeypatch)
    latents(pipe, **edit())
    latents(pipe, **edit(template=made))
    latents(pipe, **edit(template=made.name))
    assert steps.kinds() == {"EditStep"}


# What users do while it runs.


def test_templates_are_listed_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps, before = Steps(monkeypatch), anew(FLUX, library=on_disk(tmp_path))
    pinned = maskfx.template(before, **{**edit(), "image": picture(3)})
    used = before(**edit()).template
    listed = {one.name: one for one in before.templates()}
    assert set(listed) == {pinned.name, used.name}
    assert {name for name, one in listed.items() if one.pinned} == {pinned.name}
    assert all(one.nbytes["host"] > 0 and one.nbytes["disk"] > 0 for one in listed.values())
    before.forget(pinned)
    assert [one.name for one in before.templates()] == [used.name]

    after = anew(FLUX, library=on_disk(tmp_path))  # the process of another day
    assert after.templates() == []
    after.forget(used.name)
    assert not list(tmp_path.rglob("*" + SUFFIX))
    with pytest.raises(InputError, match="no template has this name; pipe.templates"):
        after.forget(used)
    with pytest.raises(InputError, match="expected the result of maskfx.template"):
        after.forget(3)
    steps.taken()
    after(**edit())
    assert ["RecordStep"] in steps.taken()


def on_disk(folder: Path) -> TemplateLibrary:
    return TemplateLibrary(Tiers(Store(folder), host_bytes=1 << 30))


def test_callbacks_change_latents_and_end_the_run():
    seen: list[int] = []

    def halve(pipe: Any, step: int, _: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append(step)
        assert type(given["latents"]) is torch.Tensor
        return {"latents": given["latents"] / 2}

    def stop(pipe: Any, step: int, _: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append(step)
        pipe._interrupt = True
        return given

    given: dict[str, Any] = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    wanted = latents(plain(FLUX), **edit(mask=white(), callback_on_step_end=halve, **given))
    found = latents(compiled(FLUX), **edit(mask=white(), callback_on_step_end=halve, **given))
    assert seen == [*range(STEPS)] * 2
    assert distance(found, wanted) < 1e-4
    seen.clear()
    stopped = latents(compiled(FLUX), **edit(callback_on_step_end=stop))
    assert seen == [0]
    assert distance(stopped, latents(compiled(FLUX), **edit())) > 1e-3


def test_a_recording_that_was_interrupted_serves_the_steps_it_has():
    pipe = anew(TEXT)

    def stop(pipe: Any, step: int, _: Any, given: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = True
        return given

    made = pipe(**call_of(PIPES[TEXT]), record=True, callback_on_step_end=stop).template
    done = pipe(**call_of(PIPES[TEXT]), mask_image=square(), template=made)
    assert done.images[0].size == (SIDE, SIDE)
    assert "no recording of a step; it goes by its own steps" in maskfx.explain(pipe)


def test_the_progress_bar_is_the_pipelines_own(capsys: pytest.CaptureFixture[str]):
    pipe = anew(FLUX)
    pipe.set_progress_bar_config(disable=False)
    latents(pipe, **edit(seed=1))
    assert f"{STEPS}/{STEPS}" in capsys.readouterr().err


@pytest.mark.slow
def test_another_precision_is_another_template(monkeypatch: pytest.MonkeyPatch):
    pipe = maskfx.compile(PIPES[FLUX].build(), quality="all-steps")
    latents(pipe, **edit())
    assert pipe.to(torch.bfloat16) is pipe
    steps = Steps(monkeypatch)
    half = {n: v.bfloat16() for n, v in edit().items() if "embeds" in n}
    found = latents(pipe, **edit(**half))
    assert found.dtype == torch.bfloat16
    assert bool(found.isfinite().all())
    assert steps.kinds() == {"RecordStep", "EditStep"}


# What doesn't fit.


def test_a_template_of_another_size_runs_dense_and_explain_tells(monkeypatch: Any):
    pipe = anew(TEXT)
    made = pipe(**call_of(PIPES[TEXT]), record=True).template
    large = {**call_of(PIPES[TEXT]), "height": 48, "width": 48, "mask_image": square(size=48)}
    found = latents(pipe, **large, template=made)
    given = {**call_of(PIPES[TEXT]), "height": 48, "width": 48}
    assert torch.equal(found, latents(plain(TEXT), **given))
    assert "transformer: computed in full: EditStep.cache was recorded at" in maskfx.explain(pipe)


def test_tiers_too_small_for_a_template_leave_the_edits_to_their_own_steps():
    pipe = anew(FLUX, library=TemplateLibrary(Tiers(host_bytes=100_000)))
    done = np.asarray(pipe(**edit()).images[0])
    outside = ~masked(square())
    assert np.array_equal(done[outside], OLD[outside])
    assert "a template is larger than the tiers that hold it" in maskfx.explain(pipe)


def test_a_recording_that_failed_is_tried_again_ever_more_seldom(monkeypatch: pytest.MonkeyPatch):
    pipe, tried = anew(FLUX), list[int]()
    finish, broken = TemplateLibrary.finish, True

    def finishing(library: TemplateLibrary, template: str, *kept: Any) -> None:
        tried.append(library.attempts.asked[template])
        if broken:
            raise torch.OutOfMemoryError("no room just now")
        finish(library, template, *kept)

    monkeypatch.setattr(TemplateLibrary, "finish", finishing)
    for _ in range(1, 8):
        assert not hasattr(pipe(**edit()), "template")
    assert tried == [1, 2, 4]
    assert "no room just now; edits go by their own steps" in maskfx.explain(pipe)
    broken = False
    for _ in range(8, 10):
        assert hasattr(pipe(**edit()), "template")
    assert tried == [1, 2, 4, 8]


def test_hooked_denoisers_run_by_themselves():
    pipe = anew(FLUX)
    block = pipe.transformer.transformer_blocks[0]
    block._hf_hook = object()
    try:
        found = latents(pipe, **edit(mask=white()))
    finally:
        del block._hf_hook
    assert torch.equal(found, latents(plain(FLUX), **edit(mask=white())))
    assert "transformer: hooks act on it or its parts" in maskfx.explain(pipe)


@pytest.mark.parametrize("mode", ["patch_batch", "dense"])
def test_modes_that_keep_nothing_edit_densely(mode: str):
    pipe = maskfx.compile(PIPES[FLUX].build(), mode=mode, quality="all-steps")
    assert torch.equal(latents(pipe, **edit()), latents(plain(FLUX), **edit()))
    assert "the mode keeps no templates" in maskfx.explain(pipe)
    for option in ({"template": "x"}, {"record": True}):
        with pytest.raises(InputError, match="compiled with a mode that records nothing"):
            pipe(**edit(**option))


def test_a_masks_kind_and_a_lonely_template_are_errors():
    pipe = compiled(FLUX)
    with pytest.raises(MaskError, match="mask_image: expected a picture, an array or a tensor"):
        pipe(**{**edit(), "mask_image": "here"})
    with pytest.raises(InputError, match="template= without a mask"):
        compiled(TEXT)(**call_of(PIPES[TEXT]), template="x")
    with pytest.raises(InputError, match="template='x': no such template, .*; record it again"):
        pipe(**edit(template="x"))
    with pytest.raises(InputError, match="template=3: expected the result of maskfx.template"):
        pipe(**edit(template=3))
    with pytest.raises(InputError, match="record=True with a mask"):
        pipe(**edit(record=True))
    with pytest.raises(InputError, match="quality='best': choose one of fast, balanced"):
        pipe(**edit(quality="best"))
    with pytest.raises(InputError, match="quality='best': choose one of fast, balanced"):
        compiled(TEXT)(**call_of(PIPES[TEXT]), quality="best")
    with pytest.raises(InputError, match="image= without a mask"):
        compiled(TEXT)(**call_of(PIPES[TEXT]), image=picture())
    for kind in (InputError, TypeError):
        with pytest.raises(kind, match="FluxInpaintPipeline.__call__: .*'colour'; it accepts"):
            pipe(**edit(colour="red"))
