"""Pipelines that read more of a denoiser's call than its result, or ask gradients of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.pipelines.compile import is_compiled
from tests.factories.edit_pipelines import kandinsky
from tests.factories.pipelines import (
    PIPES,
    Arguments,
    Steps,
    anew,
    call_of,
    latents,
    noise,
    picture,
    pipe_of,
    plain,
    said,
    square,
)
from tests.factories.small_unets import spoken
from tests.factories.staged_pipelines import combined, with_prior
from tests.factories.zoo import CROSS, Draw

TEXT = "StableDiffusionPipeline"


def attentive(seed: int) -> Arguments:
    focus = {"token_indices": [1], "thresholds": {0: 0.7}, "attn_res": (8, 8)}
    return {**said(seed), **focus, "max_iter_to_alter": 1}


def embedded(seed: int) -> Arguments:
    states = {f"{n}_embeds": Draw(i).normal(4, 16, CROSS) for i, n in enumerate(READ)}
    return {**said(seed), **states}


READ = ("source", "target")
INVERSE = {"inverse_scheduler": diffusers.DDIMInverseScheduler()}
READERS: dict[str, tuple[Any, Any]] = {
    "StableDiffusionSAGPipeline": (spoken, said),
    "StableDiffusionAttendAndExcitePipeline": (spoken, attentive),
    "StableDiffusionPix2PixZeroPipeline": (lambda: {**spoken(), **INVERSE}, embedded),
}


@cache
def reader(name: str) -> Any:
    return pipe_of(name, READERS[name][0])


@pytest.mark.parametrize("name", list(READERS))
def test_a_pipeline_that_reads_attention_maps_gives_what_it_gives_itself(name: str) -> None:
    pipe, given = reader(name), READERS[name][1](0)
    wanted = latents(pipe, **given, generator=noise(0))
    compiled = maskfx.compile(pipe)
    for _ in range(2):  # shapes of results are known in the second call
        assert torch.equal(latents(compiled, **given, generator=noise(0)), wanted)
    maskfx.decompile(compiled)


def test_an_edit_of_such_a_pipeline_reads_the_maps_of_its_own_calls() -> None:
    name = "StableDiffusionSAGPipeline"
    pipe, given = maskfx.compile(pipe_of(name, spoken), quality="all-steps"), said(0)
    wanted = latents(pipe, **given, generator=noise(0))
    template = pipe(**given, generator=noise(0), record=True).template
    edit = {**given, "mask_image": square(), "template": template}
    found = latents(pipe, **edit, generator=noise(0))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    assert "keeps tensors of the module's last call" in maskfx.explain(pipe)


def test_calls_that_gradients_go_through_are_the_modules_own() -> None:
    pipe, given = anew(TEXT), call_of(PIPES[TEXT])
    known: dict[str, Any] = {}

    def gradient(one: Any) -> Tensor:
        seen: list[Tensor] = []

        def ask(own: Any, step: int, time: Any, values: Arguments) -> Arguments:
            with torch.enable_grad():
                sample = values["latents"].detach().clone().requires_grad_()
                text = given["prompt_embeds"]
                result = own.unet(sample, time, text, return_dict=False)[0]
                seen.append(torch.autograd.grad(result.square().mean(), sample)[0])
            return {"latents": values["latents"] - seen[-1]}

        known[type(one).__name__] = latents(one, **call_of(PIPES[TEXT]), callback_on_step_end=ask)
        return torch.stack([*seen, known[type(one).__name__]])

    wanted = gradient(plain(TEXT))
    assert torch.equal(gradient(pipe), wanted)
    assert "gradients are asked of it" in maskfx.explain(pipe)


def test_a_dense_call_computes_each_call_before_the_pipeline_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = anew("FluxInpaintPipeline-truecfg")
    given = call_of(PIPES["FluxInpaintPipeline-truecfg"], 0, square(0, 0))
    steps = Steps(monkeypatch)
    for _ in range(2):
        latents(pipe, **given)
        assert all(len(members) == 1 for members in steps.taken())


def test_a_pipeline_within_a_compiled_one_may_be_compiled_too() -> None:
    name = "KandinskyV22Img2ImgCombinedPipeline"
    parts = with_prior(kandinsky())
    given = combined(0, image=picture(), num_inference_steps=5, strength=0.6, output_type="pt")
    own, pipe = (pipe_of(name, lambda: parts) for _ in range(2))
    for inner in (pipe.prior_pipe, pipe.decoder_pipe):
        assert is_compiled(maskfx.compile(inner))
    maskfx.compile(pipe, quality="all-steps")
    wanted = own(**given, generator=noise(0)).images
    assert torch.equal(pipe(**given, generator=noise(0)).images, wanted)
    found = pipe(**given, mask_image=square(0, 32), generator=noise(0)).images
    assert torch.allclose(found, wanted, atol=1e-4)
    assert "called none of its compiled" not in maskfx.explain(pipe)
