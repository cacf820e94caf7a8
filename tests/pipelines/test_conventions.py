"""Pipelines that lack what nearly all have: `prepare_latents`, a scheduler, tokens to compare."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    RePaintPipeline,
    RePaintScheduler,
    VisualClozeGenerationPipeline,
)
from PIL import Image
from torch import Tensor

import maskfx
import tests.factories.edit_pipelines
import tests.factories.late_pipelines  # noqa: F401  (cases register themselves)
from maskfx.pipelines.call import PipelineCall
from maskfx.pipelines.compile import pipeline_state_of
from tests.factories.edit_pipelines import unconditional
from tests.factories.pipelines import (
    PIPES,
    SIDE,
    Steps,
    anew,
    call_of,
    compiled,
    distance,
    flux2,
    flux_spoken,
    latents,
    noise,
    picture,
    pipe_of,
    plain,
    square,
    text_of,
    usual,
    white,
)
from tests.factories.zoo import FLUX, tiny


class Bare:
    """Draws its noise and makes its steps by itself."""

    def __init__(self, transformer: Any, shape: tuple[int, ...], **fixed: Any) -> None:
        self.transformer, self.shape, self.fixed = transformer, shape, fixed

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer}

    def __call__(
        self,
        prompt_embeds: Tensor,
        generator: Any = None,
        num_inference_steps: int = 4,
        output_type: str = "latent",
    ) -> tuple[Any]:
        latents = torch.randn(1, *self.shape, generator=generator)
        times = torch.linspace(1.0, 0.0, num_inference_steps + 1)
        for now, then in zip(times[:-1], times[1:], strict=True):
            predicted = self.transformer(
                hidden_states=latents,
                timestep=now.expand(1),
                encoder_hidden_states=prompt_embeds,
                return_dict=False,
                **self.fixed,
            )[0]
            latents = latents + (then - now) * predicted
        if output_type == "latent":
            return (latents,)
        small = latents[0, :3].movedim(0, -1).sigmoid().numpy()
        pixels = Image.fromarray((small * 255).astype(np.uint8)).resize((SIDE, SIDE))
        return ([pixels],)


def bare(name: str, shape: tuple[int, ...], **fixed: Any) -> tuple[Any, Any]:
    """A compiled one over a denoiser that is captured already, and its original."""
    pipe = maskfx.compile(Bare(compiled(name).transformer, shape, **fixed), quality="all-steps")
    pipe._maskfx = replace(pipe._maskfx, denoisers=anew(name)._maskfx.denoisers)
    return pipe, Bare(plain(name).transformer, shape, **fixed)


def test_tokens_without_latents_to_compare_run_dense():
    ids = torch.zeros(8, 8, 3)
    ids[..., 1], ids[..., 2] = torch.arange(8)[:, None], torch.arange(8)
    given = call_of(PIPES["FluxPipeline"], 1)
    fixed = {
        "pooled_projections": given["pooled_prompt_embeds"],
        "guidance": torch.tensor([3.5]),
        "img_ids": ids.flatten(0, 1),
        "txt_ids": torch.zeros(given["prompt_embeds"].shape[1], 3),
    }
    pipe, original = bare("FluxPipeline", (64, 16), **fixed)
    own = {"prompt_embeds": given["prompt_embeds"]}
    wanted = original(**own, generator=noise(0))[0]
    found = pipe(**own, generator=noise(0), mask_image=square(), image=picture())[0]
    assert torch.equal(found, wanted)
    assert "transformer: its sites aren't found on the picture; it runs dense" in maskfx.explain(
        pipe
    )


@pytest.mark.slow
def test_without_a_scheduler_steps_are_told_apart_by_their_time(monkeypatch: Any):
    name = "StableDiffusion3Pipeline"
    given = call_of(PIPES[name], 1)
    pipe, original = bare(name, (16, 16, 16), pooled_projections=given["pooled_prompt_embeds"])
    own = {"prompt_embeds": given["prompt_embeds"]}
    wanted = original(**own, generator=noise(0))[0]
    assert distance(pipe(**own, generator=noise(0), record=True)[0], wanted) < 1e-4
    made = maskfx.template(pipe, **own, generator=noise(0), output_type="pil")
    steps = Steps(monkeypatch)
    edit = {"mask_image": square(), "template": made}
    assert distance(pipe(**own, generator=noise(0), **edit)[0], wanted) < 1e-4
    assert steps.taken() == [["EditStep"]] * 4
    other = given["prompt_embeds"] + 1
    [done] = pipe(other, generator=noise(0), output_type="pil", **edit)[0]
    outside = np.asarray(square()) <= 127
    assert np.array_equal(np.asarray(done)[outside], np.asarray(made.images[0])[outside])
    assert steps.taken() == [["EditStep"]] * 4
    # by its own steps, too
    pipe(other, generator=noise(0), mask_image=square(), num_inference_steps=6)
    assert "EditStep" in steps.kinds()
    assert "steps distinguished by their timestep" in maskfx.explain(pipe)


@pytest.mark.parametrize(
    ("name", "edited"),
    [("FluxImg2ImgPipeline", True), ("StableDiffusionControlNetPipeline", False)],
)
def test_latents_that_replace_the_pictures_leave_it_the_one_to_edit(name: str, edited: bool):
    """With them the pipeline doesn't encode it; a control image is no picture to edit."""
    pipe: Any = maskfx.compile(PIPES[name].build(), quality="all-steps")
    given = {**call_of(PIPES[name]), "image": picture(), "latents": torch.randn(1, 4, 16, 16)}
    if name.startswith("Flux"):
        given["latents"] = torch.randn(1, 64, 16)
    assert PipelineCall.bind(pipe, pipe._maskfx, (), given).accepts_image() is edited
    assert not pipe._maskfx.notes


def test_objects_that_a_denoiser_makes_are_its_own_runs():
    """This one hands keys and values of its reference on from its first step, in an object."""
    made = partial(flux2, guidance_embeds=False)
    own, ours = (pipe_of("Flux2KleinKVPipeline", made) for _ in range(2))
    maskfx.compile(ours, quality="all-steps")
    text = partial(text_of, negative=False)
    for seed in (0, 1):
        given = {**usual(seed, text, height=64, width=64), "image": picture(seed, 64)}
        wanted = latents(own, **given, generator=noise(seed))
        assert torch.equal(latents(ours, **given, generator=noise(seed)), wanted)
    given = usual(0, text, height=64, width=64)
    mask = square(16, 34, 64)
    for seed in (0, 1):  # the first records
        done = ours(**given, image=picture(0, 64), mask_image=mask, generator=noise(seed))
        inside = np.asarray(mask) > 127
        new, old = np.asarray(done.images[0]), np.asarray(picture(0, 64))
        assert np.array_equal(new[~inside], old[~inside])
        assert (new[inside] != old[inside]).any(-1).mean() > 0.5
    found = pipeline_state_of(ours).denoisers["transformer"].compilations
    assert len(found) > 1, "the first call returns the keys that others take"
    assert all(one.program is not None and not one.reasons for one in found)
    assert "object at 0x" not in maskfx.explain(ours), "a note of its own for every request"


@pytest.mark.slow
def test_a_call_before_the_first_step_writes_keys_that_all_steps_read(
    monkeypatch: Any,
) -> None:
    """It is no step of the run: the template has the run's times, and edits are on rows."""
    kind = PIPES["GlmImagePipeline-pictured"]
    own, ours = kind.build(), kind.build()
    maskfx.compile(ours, quality="all-steps")
    for seed in (0, 1):  # the scheduler has the times of the run before
        wanted = latents(own, **call_of(kind, seed))
        assert torch.equal(latents(ours, **call_of(kind, seed)), wanted)
        assert distance(latents(ours, **call_of(kind, seed, white())), wanted) < 1e-4
    ours(**call_of(kind, 0, square()))
    steps = Steps(monkeypatch)
    ours(**call_of(kind, 1, square()))
    assert steps.taken() == [["itself"], *[["EditStep"] * 2] * 3]
    assert "steps distinguished" not in maskfx.explain(ours)
    assert "a template isn't used" not in maskfx.explain(ours)


def test_a_scheduler_that_applies_the_mask_decides_what_white_means() -> None:
    def run(pipe: Any) -> Any:
        made = pipe(
            picture(),
            square(),
            num_inference_steps=4,
            jump_length=2,
            jump_n_sample=2,
            generator=noise(1),
            output_type="np",
        )
        return made.images

    def repaint() -> Any:
        pipe: Any = RePaintPipeline(unet=unconditional(3), scheduler=RePaintScheduler())
        pipe.set_progress_bar_config(disable=True)
        return pipe

    pipe = maskfx.compile(repaint())
    assert np.array_equal(run(pipe), run(repaint()))
    assert "its scheduler applies the mask" in maskfx.explain(pipe)


def test_a_mask_over_a_grid_of_pictures_is_refused():
    """Before, the mask was laid over the whole grid."""
    pipe = maskfx.compile(visual_cloze())
    pipe.set_progress_bar_config(disable=True)
    grid = [[picture(1), picture(2)], [picture(3), None]]
    given = {"image": grid, "task_prompt": "", "content_prompt": "a cat", "num_inference_steps": 2}
    given |= {"max_sequence_length": 16, "output_type": "np"}
    with pytest.raises(maskfx.errors.InputError, match="place in it isn't known"):
        pipe(**given, mask_image=square())
    found, wanted = (
        one(**given, generator=torch.Generator().manual_seed(0)).images
        for one in (pipe, maskfx.decompile(pipe))
    )
    assert np.array_equal(found, wanted)


def visual_cloze() -> VisualClozeGenerationPipeline:
    vae = AutoencoderKL(
        block_out_channels=(4,), latent_channels=1, norm_num_groups=1, shift_factor=0.0
    )
    # patches of latents, of the pictures' latents and of masks
    net = tiny("FluxTransformer2DModel", **FLUX | {"in_channels": 3 * 4, "out_channels": 4})
    parts = {**flux_spoken(), "vae": vae, "transformer": net}
    return VisualClozeGenerationPipeline(**parts, resolution=SIDE)
