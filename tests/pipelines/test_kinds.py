"""Every kind of pipeline: a full mask is the dense run; edits narrow and keep the background."""

from typing import Any

import numpy as np
import pytest
import torch

import maskfx
import tests.factories.dit_pipelines
import tests.factories.edit_pipelines
import tests.factories.late_pipelines
import tests.factories.modular_pipelines
import tests.factories.more_pipelines
import tests.factories.staged_pipelines
import tests.factories.unet_pipelines  # noqa: F401  (cases register themselves)
from maskfx.pipelines.runs.run import PipelineRun
from maskfx.pipelines.templates.template_key import TEMPLATE, recording_arguments, seeded_noise
from tests.factories.pipelines import (
    PIPES,
    Steps,
    anew,
    call_of,
    compiled,
    distance,
    latents,
    picture,
    plain,
    square,
    strokes,
    white,
)

pytestmark = pytest.mark.slow

# calls of DiffEdit's own take no picture, only its latents
KINDS = [
    n for n in PIPES if PIPES[n].output == "latent" and PIPES[n].side <= 64 and "DiffEdit" not in n
]
DENSE = {  # a denoiser of theirs runs dense: docs/pipelines.md
    "Flux2KleinKVPipeline",
    "GlmImagePipeline",
    "KandinskyV22Img2ImgCombinedPipeline",
    "KandinskyV22InpaintCombinedPipeline",
    "StableDiffusion3PAGImg2ImgPipeline",
    "ZImageOmniPipeline",
}
# after a call for latents, its attention processors stay in the UNet: other settings, other key
ALTERED = {"StableDiffusionXLPAGInpaintPipeline"}
MASKED = [n for n in KINDS if PIPES[n].edits in ("blend", "channels", "control")]
TOLD = [n for n in KINDS if PIPES[n].edits == "channels"]
FROM_NOTHING = [n for n in KINDS if PIPES[n].edits == "text"]
PICTURED = [n for n in KINDS if PIPES[n].edits != "text"]
CONTROLLED = [n for n in KINDS if PIPES[n].edits == "control"]


def small(name: str) -> Any:
    side = PIPES[name].side
    return square(side // 4, side // 2 + 2, side)


@pytest.mark.parametrize("name", KINDS)
def test_a_full_mask_is_the_dense_run(name: str):
    kind = PIPES[name]
    mask = white(kind.side)
    wanted = latents(plain(name), **call_of(kind, 0, mask if name in MASKED else None))
    assert distance(latents(compiled(name), **call_of(kind, 0, mask)), wanted) < 1e-4


@pytest.mark.parametrize("name", [n for n in KINDS if n not in MASKED])
def test_calls_without_a_mask_have_the_original_bits(name: str):
    found = torch.as_tensor(latents(compiled(name), **call_of(PIPES[name])))
    wanted, again = (
        torch.as_tensor(latents(plain(name), **call_of(PIPES[name]))) for _ in range(2)
    )
    if torch.equal(wanted, again):
        assert torch.equal(found, wanted)
    else:  # the bits of the pipeline itself depend on where its tensors lie in memory
        assert distance(found, wanted) < 1e-5


@pytest.mark.parametrize("name", [n for n in PICTURED if n not in DENSE | ALTERED])
def test_an_edit_narrows_every_denoiser(name: str, monkeypatch: pytest.MonkeyPatch):
    kind, pipe = PIPES[name], anew(name)
    latents(pipe, **call_of(kind, 0, small(name)))
    steps = Steps(monkeypatch)
    latents(pipe, **call_of(kind, 1, small(name)))
    assert steps.kinds() == {"EditStep"}
    for denoiser in pipe._maskfx.denoisers.values():
        assert denoiser.programs, denoiser.explain()
    assert not pipe._maskfx.notes


@pytest.mark.parametrize("name", TOLD)
def test_a_template_of_nothing_masked_serves_every_mask(name: str, monkeypatch: Any):
    kind, pipe = PIPES[name], anew(name)
    latents(pipe, **call_of(kind, 0, small(name)))
    steps = Steps(monkeypatch)
    latents(pipe, **call_of(kind, 1, strokes(kind.side)))
    assert steps.kinds() == {"EditStep"}
    # a full mask leaves nothing that the template could say
    wanted = latents(plain(name), **call_of(kind, 0, white(kind.side)))
    made = latents(pipe, **call_of(kind, 0, white(kind.side)))
    assert distance(made, wanted) < 1e-4


@pytest.mark.parametrize("name", TOLD)
def test_without_any_mask_a_recording_is_of_the_mask_that_is_told(name: str, monkeypatch: Any):
    kind, pipe = PIPES[name], anew(name, quality=maskfx.Quality(any_mask=False))
    latents(pipe, **call_of(kind, 0, small(name)))
    steps = Steps(monkeypatch)
    latents(pipe, **call_of(kind, 0, strokes(kind.side)))
    assert "RecordStep" in steps.kinds()
    # with the recording's own prompt and noise an edit is the dense run
    given = call_of(kind, 0, small(name))
    shared = pipe._maskfx
    own, _ = recording_arguments(shared.call, given, True, own_prompt=True)  # none has an encoder
    wanted = latents(plain(name), **{**own, "generator": seeded_noise(TEMPLATE)})
    steps.taken()
    assert distance(latents(pipe, **{**own, "generator": seeded_noise(TEMPLATE)}), wanted) < 1e-4


@pytest.mark.parametrize("name", PICTURED)
def test_pixels_outside_the_mask_are_the_pictures_own(name: str):
    kind = PIPES[name]
    mask = small(name)
    done = np.asarray(compiled(name)(**call_of(kind, 2, mask)).images[0])
    old = np.asarray(picture(size=kind.side))
    inside = np.asarray(mask) > 127
    assert np.array_equal(done[~inside], old[~inside])
    assert (done[inside] != old[inside]).any(-1).mean() > 0.5


@pytest.mark.parametrize("name", PICTURED)
def test_strokes_of_one_pixel_change_the_picture_there(name: str):
    kind = PIPES[name]
    mask = strokes(kind.side)
    done = np.asarray(compiled(name)(**call_of(kind, 2, mask)).images[0])
    old = np.asarray(picture(size=kind.side))
    inside = np.asarray(mask) > 127
    assert np.array_equal(done[~inside], old[~inside])
    assert (done[inside] != old[inside]).any(-1).mean() > 0.5


@pytest.mark.parametrize("name", [n for n in FROM_NOTHING if n not in DENSE])
def test_a_recorded_run_is_reproduced_by_an_edit_of_it(name: str, monkeypatch: Any):
    kind, pipe = PIPES[name], anew(name)
    wanted = latents(plain(name), **call_of(kind, 7))
    made = pipe(**call_of(kind, 7), record=True).template
    latents(pipe, **call_of(kind, 9, small(name)), template=made)  # probes the denoiser's inputs
    steps = Steps(monkeypatch)
    found = latents(pipe, **call_of(kind, 7, small(name)), template=made)
    assert steps.kinds() == {"EditStep"}
    assert distance(found, wanted) < 1e-4
    assert distance(latents(pipe, **call_of(kind, 8, small(name)), template=made), wanted) > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_two_pictures_of_one_call(name: str):
    kind, mask = PIPES[name], white(PIPES[name].side)
    own = mask if name in MASKED else None
    two = {"num_images_per_prompt": 2}
    try:
        wanted = latents(plain(name), **call_of(kind, 0, own), **two)
    except (RuntimeError, TypeError, ValueError):
        pytest.skip("the pipeline itself makes no two pictures of what it is given")
    assert distance(latents(compiled(name), **call_of(kind, 0, mask), **two), wanted) < 1e-4
    if kind.edits != "text":
        form = "pil" if kind.modular else "np"  # all that Qwen-Image's blocks accept with a mask
        done = compiled(name)(**call_of(kind, 0, small(name)), **two, output_type=form).images
        outside = np.asarray(small(name)) <= 127
        old = np.asarray(picture(size=kind.side), np.float32) / (1 if kind.modular else 255)
        assert len(done) == 2
        assert all(np.array_equal(np.asarray(one)[outside], old[outside]) for one in done)


@pytest.mark.parametrize("name", CONTROLLED)
def test_the_nets_calls_wait_for_one_another(name: str, monkeypatch: pytest.MonkeyPatch):
    """The calls of ControlNets and denoiser are answered together: nothing forces the first."""
    kind, pipe = PIPES[name], anew(name)
    latents(pipe, **call_of(kind, 0, small(name)))
    resolved: list[set[str]] = []
    resolve = PipelineRun._resolve

    def resolving(run: PipelineRun, calls: Any) -> None:
        resolved.append({call.name for call in calls})
        resolve(run, calls)

    monkeypatch.setattr(PipelineRun, "_resolve", resolving)
    latents(pipe, **call_of(kind, 1, small(name)))
    names = set(pipe._maskfx.denoisers)
    assert len(names) > 1
    assert resolved
    assert all(step == names for step in resolved)  # MultiControlNetModel's sums wait too


@pytest.mark.parametrize("name", ["StableDiffusionInpaintPipeline"])
def test_guidance_that_ends_during_the_run(name: str):
    kind = PIPES[name]

    def unguided(pipe: Any, step: int, _: Any, given: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            pipe._guidance_scale = 0.0
            given["prompt_embeds"] = given["prompt_embeds"][-1:]
            given["mask"] = given["mask"][-1:]
        return given

    def arguments(mask: Any) -> dict[str, Any]:
        inputs = ["latents", "prompt_embeds", "mask"]
        more = {"callback_on_step_end_tensor_inputs": inputs, "callback_on_step_end": unguided}
        return {**call_of(kind, 0, mask), **more}

    wanted = latents(plain(name), **arguments(white()))
    assert distance(latents(compiled(name), **arguments(white())), wanted) < 1e-4
    assert bool(latents(compiled(name), **arguments(square())).isfinite().all())
    one = call_of(kind, 0, white(), guidance_scale=1.0)
    wanted = latents(plain(name), **one)
    one = call_of(kind, 0, white(), guidance_scale=1.0)
    assert distance(latents(compiled(name), **one), wanted) < 1e-4


def test_a_control_image_is_no_picture_to_edit():
    """This pipeline's `image` is passed to its ControlNet, not laid over the result."""
    from tests.factories.pipelines import pipe_of, sd_control, text_of

    pipe = maskfx.compile(
        pipe_of("StableDiffusionControlNetPipeline", sd_control), quality="all-steps"
    )
    given = {**text_of(0), "num_inference_steps": 3, "image": picture(50)}
    result = pipe(**given, generator=torch.Generator().manual_seed(0), record=True)
    old = np.asarray(result.images[0])
    given["generator"] = torch.Generator().manual_seed(1)
    done = np.asarray(pipe(**given, mask_image=square(), template=result.template).images[0])
    outside = np.asarray(square()) <= 127
    assert np.array_equal(done[outside], old[outside])
    assert not np.array_equal(done[outside], np.asarray(picture(50))[outside])


@pytest.mark.parametrize("count", [1, 2])
def test_of_several_references_the_first_is_edited(count: int):
    """They are no batch: pictures per prompt are what makes several results."""
    name = "Flux2KleinPipeline"
    kind, pipe, mask = PIPES[name], compiled(name), small(name)
    given = call_of(kind, 0, mask) | {"num_images_per_prompt": count, "output_type": "np"}
    made = []
    for second in (1, 2):
        pictures = [picture(0, kind.side), picture(second, kind.side)]
        made.append(pipe(**{**given, "image": pictures}).images)
    outside = np.asarray(mask) <= 127
    first = np.asarray(picture(0, kind.side), np.float32) / 255
    for images in made:
        assert len(images) == count
        assert all(np.array_equal(one[outside], first[outside]) for one in images)
    assert not np.array_equal(*made), "the second is looked at"


@pytest.mark.parametrize(
    "name", ["StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"]
)
def test_of_a_batch_of_pictures_each_is_edited(name: str):
    kind, pipe, mask = PIPES[name], compiled(name), small(name)
    given = call_of(kind, 0, mask) | {"strength": 1.0}
    states = {n: torch.cat([v, v]) for n, v in given.items() if n.endswith("prompt_embeds")}
    pictures = [picture(seed, kind.side) for seed in (0, 1)]
    made = pipe(**{**given, **states, "image": pictures, "output_type": "np"}).images
    outside = np.asarray(mask) <= 127
    for image, own in zip(made, pictures, strict=True):
        assert np.array_equal(image[outside], np.asarray(own, np.float32)[outside] / 255)
