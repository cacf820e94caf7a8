"""Modular pipelines: their arguments, results, latents, guiders and offloading."""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from accelerate.hooks import add_hook_to_module  # type: ignore[import-untyped,unused-ignore]
from diffusers.hooks.layer_skip import LayerSkipConfig
from diffusers.modular_pipelines.components_manager import CustomOffloadHook
from diffusers.modular_pipelines.modular_pipeline import PipelineState as State

import maskfx
from maskfx.engine.own_pipeline import copy_over
from maskfx.ops.kernels.serves import SWITCH
from maskfx.pipelines.compile import call_of as pipeline_call
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.parts.alterations import alters_modules
from maskfx.pipelines.parts.modular import ObservedLoop, call_of_blocks, latents_in, loops_of
from maskfx.pipelines.templates.template_key import TEMPLATE, seeded_noise
from tests.factories.modular_pipelines import guided, modular_of
from tests.factories.pipelines import (
    PIPES,
    Steps,
    anew,
    call_of,
    compiled,
    distance,
    flux,
    latents,
    noise,
    picture,
    plain,
    sdxl,
    square,
    white,
)
from tests.factories.video_pipelines import FRAMES, moving, texts, wan_times, wan_vae
from tests.factories.videos import WAN
from tests.factories.zoo import tiny
from tests.pipelines.test_deferred import Desk

FLUX = "FluxModularPipeline"
XL = "StableDiffusionXLModularPipeline"
BLOCKS = "FluxAutoBlocks"
MASK = square()
OUTSIDE = np.asarray(MASK) <= 127


def edit(seed: int = 0, **more: Any) -> dict[str, Any]:
    return call_of(PIPES[FLUX], seed, MASK, **more)


def test_a_call_returns_the_state_or_what_it_names() -> None:
    pipe = anew(FLUX)
    state = pipe(**edit())
    assert type(state) is type(plain(FLUX)(**call_of(PIPES[FLUX])))
    image, old = np.asarray(state.images[0]), np.asarray(picture())
    assert np.array_equal(image[OUTSIDE], old[OUTSIDE])
    assert (image[~OUTSIDE] != old[~OUTSIDE]).any()
    assert state.template.name in {one.name for one in pipe.templates()}
    assert np.array_equal(np.asarray(pipe(**edit(), output="images")[0]), image)
    several = pipe(**edit(), output=["images", "latents"])
    assert np.array_equal(np.asarray(several["images"][0]), image)
    assert type(several["latents"]) is torch.Tensor
    assert torch.equal(several["latents"], pipe(**edit(), output="latents"))
    with pytest.raises(maskfx.InputError, match="output=3: expected the name of a value"):
        pipe(**edit(), output=3)


def test_an_edit_with_the_recordings_prompt_and_noise_is_the_dense_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, pipe = edit(), anew(FLUX)
    latents(pipe, **given)
    for name in ("prompt_embeds", "pooled_prompt_embeds"):
        given[name] = torch.zeros_like(given[name])
    own = {name: value for name, value in given.items() if name != "mask_image"}
    wanted = latents(plain(FLUX), **{**own, "generator": seeded_noise(TEMPLATE)})
    steps = Steps(monkeypatch)
    found = latents(pipe, **{**given, "generator": seeded_noise(TEMPLATE)})
    assert steps.kinds() == {"EditStep"}
    assert distance(found, wanted) < 1e-4


def test_the_background_is_that_of_the_template_whatever_the_noise() -> None:
    one, other = (latents(anew(FLUX), **edit(seed)) for seed in (0, 1))
    sites = torch.as_tensor(OUTSIDE)[::2, ::2] & torch.as_tensor(OUTSIDE)[1::2, 1::2]
    sites[2:12, 2:12] = False  # those beside the mask are computed, too
    assert torch.equal(one[..., sites], other[..., sites])
    assert not torch.equal(one, other)


def test_arguments_may_come_in_the_state_of_an_earlier_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first pipeline, of the encoder's block alone, hands on what it made."""
    monkeypatch.setenv(SWITCH, "0")  # a recording has the module's bits with its operators alone
    blocks: Any = diffusers.FluxAutoBlocks()
    encoder = blocks.sub_blocks["vae_encoder"].init_pipeline()
    parts = flux()
    encoder.update_components(vae=parts["vae"])
    given = call_of(PIPES[FLUX])
    sizes = {name: given[name] for name in ("height", "width")}
    state = encoder(image=given.pop("image"), generator=given["generator"], **sizes)
    assert state.image_latents is not None

    def made() -> Any:
        return modular_of(BLOCKS, flux, without=("text_encoder", "vae_encoder"))

    given["generator"] = seeded_noise("test")
    wanted = made()(state=copy.deepcopy(state), **given)
    given["generator"] = seeded_noise("test")
    compiled_pipe = maskfx.compile(made(), quality="all-steps")
    assert "image_latents" in pipeline_state_of(compiled_pipe).parameters
    found = compiled_pipe(state=state, record=True, **given)
    assert torch.equal(found.latents, wanted.latents)
    again = compiled_pipe(
        state=state,
        template=found.template,
        mask_image=MASK,
        **{**given, "generator": seeded_noise("test")},
    )
    assert distance(again.latents, wanted.latents) < 1e-4


def test_what_a_state_holds_is_part_of_the_templates_key() -> None:
    pipe = maskfx.compile(modular_of(BLOCKS, flux, without=("text_encoder", "vae_encoder")))
    names = [
        pipeline_call(pipe, (), {"state": State({"image_latents": torch.full((1, 4, 16, 16), n)})})
        .template_key()
        .name
        for n in (0.0, 0.0, 1.0)
    ]
    assert names[0] == names[1] != names[2]


def test_no_value_of_the_state_is_deferred() -> None:
    desk, wanted = Desk(), torch.ones(2, 3)
    made = State({"noise_pred": desk.defer(wanted), "height": 8})
    result = call_of_blocks(plain(FLUX), lambda self, **given: made)(plain(FLUX))
    found = result.output(["noise_pred", "height"])
    assert type(found["noise_pred"]) is torch.Tensor
    assert torch.equal(found["noise_pred"], wanted)
    assert found["height"] == 8


def test_the_blocks_themselves_are_unchanged() -> None:
    pipe = anew(FLUX)
    before = pipe._blocks
    pipe(**edit())
    assert pipe._blocks is before
    assert loops_of(pipe)
    assert not any(isinstance(loop, ObservedLoop) for loop in loops_of(pipe))
    own = plain(FLUX)
    compiled_pipe = maskfx.compile(modular_of(BLOCKS, flux))
    assert type(maskfx.decompile(compiled_pipe)) is type(own)


def test_unknown_arguments_are_ignored_with_diffusers_warning() -> None:
    with pytest.warns(UserWarning, match="'brightness'"):
        compiled(FLUX)(**call_of(PIPES[FLUX]), brightness=2)


def test_a_pipeline_without_its_denoiser_is_refused() -> None:
    blocks: Any = diffusers.FluxAutoBlocks()
    pipe = blocks.init_pipeline()
    with pytest.raises(maskfx.InputError, match=r"transformer isn't loaded; call .*load_comp"):
        maskfx.compile(pipe)


def test_probes_and_restarts_log_no_errors_of_blocks(caplog: pytest.LogCaptureFixture) -> None:
    pipe = anew(FLUX)
    pipe(**edit())
    assert "Error in block" not in caplog.text
    with pytest.raises(Exception, match="prompt"):
        pipe(**{**edit(), "prompt_embeds": None})
    assert "Error in block" in caplog.text


def test_latents_are_found_with_what_has_their_form() -> None:
    sites = torch.zeros(1, 16, 4)
    values = {
        "noise": sites,
        "prompt_embeds": sites,
        "mask": torch.zeros(1, 16, 1),
        "latents": sites,
        "ids": torch.zeros(1, 16, 4, dtype=torch.long),
        "height": 8,
    }
    assert latents_in(values) == ["latents", "noise"]
    assert latents_in({"latents": None}) == []


# Guidance.


def skipping() -> Any:
    config = LayerSkipConfig([0], fqn="mid_block.attentions.0.transformer_blocks")
    return guided(
        "StableDiffusionXLAutoBlocks",
        sdxl,
        "SkipLayerGuidance",
        guidance_scale=3.0,
        skip_layer_config=config,
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
    )


def test_each_request_of_an_engine_has_a_guider_of_its_own() -> None:
    pipe = compiled(FLUX)
    pipe = copy.copy(pipe)
    pipe.__dict__["guider"] = diffusers.ClassifierFreeGuidance(guidance_scale=2.0)
    own = copy_over(pipe, threading.RLock())
    assert own.guider is not pipe.guider
    assert own.guider.guidance_scale == 2.0
    assert own.transformer is pipe.transformer


def test_guidance_that_puts_hooks_on_the_denoiser_runs_alone() -> None:
    assert alters_modules(skipping())
    assert not alters_modules(plain(XL))


def test_other_settings_of_the_guider_have_other_templates() -> None:
    state = pipeline_state_of(maskfx.compile(modular_of("StableDiffusionXLAutoBlocks", sdxl)))
    made = [
        guided("StableDiffusionXLAutoBlocks", sdxl, "ClassifierFreeGuidance", guidance_scale=scale)
        for scale in (3.0, 3.0, 5.0)
    ]
    one, same, other = map(state.digest, made)
    assert one == same != other


@pytest.mark.slow
def test_a_branch_that_skips_layers_runs_in_the_module_and_the_others_on_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = latents(skipping(), **call_of(PIPES[XL], 0, white()))
    pipe = maskfx.compile(skipping(), quality="all-steps")
    assert distance(latents(pipe, **call_of(PIPES[XL], 0, white())), wanted) < 1e-4
    latents(pipe, **call_of(PIPES[XL], 0, MASK))
    steps = Steps(monkeypatch)
    latents(pipe, **call_of(PIPES[XL], 1, MASK))
    assert steps.kinds() == {"EditStep"}
    assert "guidance that skips layers" in maskfx.explain(pipe)


# Offloading.


def test_a_components_managers_hook_moves_the_denoiser_and_it_still_narrows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = anew(FLUX)
    wanted = latents(pipe, **edit())
    module = modular_of(BLOCKS, flux).transformer
    moved = maskfx.compile(modular_of(BLOCKS, flux), quality="all-steps")
    hook = CustomOffloadHook(execution_device=torch.device("cpu"))
    add_hook_to_module(moved.transformer, hook)
    assert type(moved.transformer) is type(module)
    found = latents(moved, **edit())
    assert distance(found, wanted) < 1e-4
    assert "runs dense" not in maskfx.explain(moved)


def test_a_video_made_by_blocks_keeps_the_pixels_outside_of_the_masks() -> None:
    net = tiny("WanTransformer3DModel", **WAN)
    parts = {"transformer": net, "vae": wan_vae(), "scheduler": wan_times()}
    build = partial(modular_of, "WanBlocks", lambda: parts)

    def given(seed: int, **more: Any) -> dict[str, Any]:
        return {**texts(seed), "num_frames": FRAMES, "generator": noise(seed), **more}

    [wanted] = build()(**given(0), output_type="np", output="videos")
    pipe, masks = maskfx.compile(build(), quality="all-steps"), moving()
    state = pipe(**given(0), output_type="np", record=True)
    shown = {"mask_image": masks, "template": state.template, "output_type": "np"}
    [same] = pipe(**given(0), **shown, output="videos")
    [edited] = pipe(**given(1), **shown, output="videos")
    inside = np.stack([np.asarray(mask) > 0 for mask in masks])
    assert distance(same, wanted) < 1e-4
    assert np.array_equal(edited[~inside], state.videos[0][~inside])
    assert np.abs(edited - wanted)[inside].mean() > 1e-3
