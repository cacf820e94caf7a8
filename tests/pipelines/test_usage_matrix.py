"""Kinds of pipelines by ways to use them: an edit agrees with the pipeline itself in each."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import maskfx
import tests.factories.edit_pipelines
import tests.factories.more_pipelines  # noqa: F401  (cases register themselves)
from maskfx.pipelines.templates.template_key import TEMPLATE, recording_arguments, seeded_noise
from tests.factories import emulated
from tests.factories.pipelines import (
    PIPES,
    Arguments,
    anew,
    call_of,
    distance,
    noise,
    picture,
    plain,
    square,
    white,
)

KINDS = [
    "StableDiffusionInpaintPipeline-spoken",
    "StableDiffusionInpaintPipeline-9",
    "StableDiffusionXLInpaintPipeline",
    "StableDiffusionControlNetInpaintPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionXLControlNetImg2ImgPipeline",
    "StableDiffusion3InpaintPipeline",
    "FluxInpaintPipeline-spoken",
    "FluxFillPipeline",
    "FluxImg2ImgPipeline",
    "FluxKontextPipeline-truecfg",
    "Flux2KleinPipeline",
    "QwenImageEditPlusPipeline",
    "StableDiffusionPipeline",
    "FluxPipeline-spoken",
]
FAMILIES = [  # each use that changes modules is captured for these
    "StableDiffusionImg2ImgPipeline",
    "FluxInpaintPipeline-spoken",
    "StableDiffusionInstructPix2PixPipeline",
    "StableDiffusionControlNetInpaintPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusion3InpaintPipeline",
    "FluxFillPipeline",
    "FluxKontextPipeline-truecfg",
    "Flux2KleinPipeline",
    "QwenImageInpaintPipeline",
    "ChromaInpaintPipeline",
    "ZImageInpaintPipeline",
    "SanaSprintImg2ImgPipeline",
    "KandinskyV22InpaintPipeline",
]
USED = [*KINDS, *(n for n in FAMILIES if n not in KINDS)]
MASKED = [n for n in USED if PIPES[n].edits in ("blend", "channels", "control")]
ALONE = "QwenImageEditPlusPipeline"  # accepts one prompt alone
DEVICE = torch.device(emulated.NAME, 0)

Around = Callable[[str, Any], AbstractContextManager[Any]]


@contextmanager
def as_it_is(name: str, pipe: Any) -> Iterator[Any]:
    yield pipe


@dataclass(frozen=True)
class Usage:
    """One way to use a pipeline: with other arguments, or after something was done to it."""

    arguments: Callable[[str, Arguments], Arguments] = lambda name, given: given
    around: Around = as_it_is
    kinds: tuple[str, ...] = tuple(KINDS)
    own_run: bool = False  # the run of the template is another one: it has no callbacks and prompts
    batch: bool = False  # compared with single calls
    narrow: bool = False  # computed in bfloat16
    builds: bool = False  # the modules change, so that tests can't share them


# Arguments.


def with_values(name: str, given: Arguments, **more: Any) -> Arguments:
    return {**given, **more}


def scaled(pipe: Any, step: int, time: Any, given: Arguments) -> Arguments:
    return {"latents": given["latents"] * 0.9 + 0.01}


def stopped(pipe: Any, step: int, time: Any, given: Arguments) -> Arguments:
    pipe._interrupt = step == 1
    return {}


def with_all_inputs(name: str, given: Arguments) -> Arguments:
    """A callback that gets every tensor that it may ask for, and ends with latents of zeros."""
    own = plain(name)
    last = given["num_inference_steps"] - 1

    def emptied(pipe: Any, step: int, time: Any, given: Arguments) -> Arguments:
        if step == last:
            given["latents"] = torch.zeros_like(given["latents"])
        return given

    inputs = own._callback_tensor_inputs
    return {**given, "callback_on_step_end": emptied, "callback_on_step_end_tensor_inputs": inputs}


def guided_at_first(name: str, given: Arguments) -> Arguments:
    """Guidance ends after the second step, so that later calls are of half as many samples."""
    asked = [n for n in plain(name)._callback_tensor_inputs if n in ("latents", *GUIDED)]

    def ended(pipe: Any, step: int, time: Any, given: Arguments) -> Arguments:
        if step == 1:
            pipe._guidance_scale = 0.0
            count = 2 * len(given["latents"])
            doubled = [n for n in asked if n != "latents" and len(given[n]) == count]
            given |= {n: given[n].chunk(2)[-1] for n in doubled}
        return given

    more = {"callback_on_step_end": ended, "callback_on_step_end_tensor_inputs": asked}
    return {**given, **more, "num_inference_steps": 5}


def on_device(name: str, given: Arguments) -> Arguments:
    found: Arguments = emulated.to(given, DEVICE)
    return found


def of_two(name: str, given: Arguments) -> Arguments:
    return joined(given, {**given, **PIPES[name].inputs(1), "generator": noise(1)})


def joined(one: Arguments, other: Arguments) -> Arguments:
    """A call of the prompts and the noise of two."""
    found = dict(one)
    for name, value in one.items():
        if name == "latents" or "prompt" in name and isinstance(value, Tensor):
            found[name] = torch.cat([value, other[name]])
        elif name in ("generator", "prompt", "negative_prompt"):
            found[name] = [value, other[name]]
    return found


def from_latents(name: str, given: Arguments) -> Arguments:
    size = result_of(plain(name), {**given, "output_type": "latent"}).shape
    drawn = torch.randn(size, generator=copied(given["generator"]))
    packs = name.startswith("Flux2")  # two by two, before its latents lie in rows
    return {**given, "latents": nn.functional.pixel_unshuffle(drawn, 2) if packs else drawn}


# What is done to a pipeline.


@contextmanager
def other_scheduler(name: str, pipe: Any) -> Iterator[Any]:
    if isinstance(pipe.scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    else:
        config = pipe.scheduler.config
        pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(config)
    yield pipe


@contextmanager
def sliced(name: str, pipe: Any) -> Iterator[Any]:
    pipe.vae.enable_slicing()
    if hasattr(pipe, "unet"):
        pipe.enable_attention_slicing(1)
    yield pipe


@contextmanager
def offloaded(name: str, pipe: Any) -> Iterator[Any]:
    pipe.enable_model_cpu_offload(device="cpu")
    yield pipe


@contextmanager
def offloaded_in_parts(name: str, pipe: Any) -> Iterator[Any]:
    pipe.enable_sequential_cpu_offload(device=DEVICE)
    yield pipe


@contextmanager
def offloaded_in_groups(name: str, pipe: Any) -> Iterator[Any]:
    pipe.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    yield pipe


@contextmanager
def cast_by_layers(name: str, pipe: Any) -> Iterator[Any]:
    denoiser_of(pipe).enable_layerwise_casting(torch.bfloat16, torch.float32)
    yield pipe


@contextmanager
def with_cached_blocks(name: str, pipe: Any) -> Iterator[Any]:
    denoiser_of(pipe).enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.8))
    yield pipe


@contextmanager
def moved(name: str, pipe: Any) -> Iterator[Any]:
    given = call_of(PIPES[name], 0, half(name) if masks(name, pipe) else None)
    pipe.to(torch.bfloat16)
    pipe(**narrowed(name, given))
    pipe.to(torch.float32)
    yield pipe


@contextmanager
def in_bfloat16(name: str, pipe: Any) -> Iterator[Any]:
    yield pipe.to(torch.bfloat16)


def narrowed(name: str, given: Arguments) -> Arguments:
    def narrow(value: Any) -> Any:
        if isinstance(value, list):
            return [narrow(one) for one in value]
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.bfloat16() if floats else value

    return {n: narrow(v) if "embeds" in n else v for n, v in given.items()}


@contextmanager
def loaded(name: str, pipe: Any) -> Iterator[Any]:
    """A pipeline that was saved; compiled again if it was."""
    own = type(plain(name))
    required, _ = own._get_signature_keys(own)
    absent = {n: None for n in required if getattr(pipe, n) is None}
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        made = own.from_pretrained(folder, **absent)
    made.set_progress_bar_config(disable=True)
    yield maskfx.compile(made, quality="all-steps") if is_compiled(pipe) else made


@contextmanager
def from_pipe(name: str, pipe: Any) -> Iterator[Any]:
    """A pipeline of the components of another one; compiled if it was."""
    made = type(plain(name)).from_pipe(pipe)
    made.set_progress_bar_config(disable=True)
    yield maskfx.compile(made, quality="all-steps") if is_compiled(pipe) else made


@contextmanager
def fused(name: str, pipe: Any) -> Iterator[Any]:
    denoiser_of(pipe).fuse_qkv_projections()
    yield pipe


@contextmanager
def with_free_u(name: str, pipe: Any) -> Iterator[Any]:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    yield pipe


def denoiser_of(pipe: Any) -> Any:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def is_compiled(pipe: Any) -> bool:
    return hasattr(pipe, "_maskfx")


def masks(name: str, pipe: Any) -> bool:
    return name in MASKED or is_compiled(pipe)


def accepting(parameter: str) -> tuple[str, ...]:
    return tuple(
        n
        for n in KINDS
        if parameter in inspect.signature(getattr(diffusers, n.split("-")[0]).__call__).parameters
    )


QUICK = {(FAMILIES[1], usage) for usage in ("callback", "interrupted", "prompts", "tensors")}
QUICK |= {(n, "in groups") for n in ("FluxFillPipeline", "QwenImageInpaintPipeline")}
QUICK |= {("QwenImageInpaintPipeline", "cached"), ("StableDiffusionXLImg2ImgPipeline", "in groups")}
UNETS = ("StableDiffusionImg2ImgPipeline",)
HALVED = (  # their guidance doubles the batch, and their callbacks get all of it
    "StableDiffusionInpaintPipeline-spoken",
    "StableDiffusionInpaintPipeline-9",
    "StableDiffusionXLInpaintPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionPipeline",
)
GUIDED = ("prompt_embeds", "add_text_embeds", "add_time_ids", "mask", "masked_image_latents")
WHOLE = tuple(n for n in FAMILIES if n != "KandinskyV22InpaintPipeline")  # it can't be split
FUSING = tuple(n for n in WHOLE if n != "ZImageInpaintPipeline")
CONTEXTS = ("FluxPipeline-spoken", "QwenImageInpaintPipeline")
calling = partial(partial, with_values)
USAGES = {
    "as it is": Usage(batch=True),
    "callback": Usage(calling(callback_on_step_end=scaled), own_run=True, batch=True),
    "all inputs": Usage(with_all_inputs, own_run=True),
    "guidance": Usage(guided_at_first, kinds=HALVED, own_run=True, batch=True),
    "interrupted": Usage(
        calling(callback_on_step_end=stopped, num_inference_steps=5), own_run=True, batch=True
    ),
    "prompts": Usage(of_two, kinds=tuple(n for n in KINDS if n != ALONE), own_run=True),
    "pictures": Usage(
        calling(num_images_per_prompt=2, output_type="np"),
        kinds=accepting("num_images_per_prompt"),
    ),
    "latents": Usage(from_latents, kinds=accepting("latents"), own_run=True, batch=True),
    "tensors": Usage(calling(output_type="pt", return_dict=False)),
    "steps": Usage(calling(num_inference_steps=6, output_type="latent")),
    "sigmas": Usage(calling(sigmas=[1.0, 0.8, 0.6, 0.3]), kinds=("FluxInpaintPipeline-spoken",)),
    "eta": Usage(calling(eta=0.7), kinds=UNETS),
    "scheduler": Usage(around=other_scheduler, batch=True),
    "from_pipe": Usage(around=from_pipe, kinds=tuple(FAMILIES)),
    "offloaded": Usage(around=offloaded, kinds=tuple(FAMILIES), builds=True),
    "in parts": Usage(on_device, offloaded_in_parts, tuple(FAMILIES), builds=True),
    "in groups": Usage(around=offloaded_in_groups, kinds=WHOLE, builds=True),
    "cast": Usage(around=cast_by_layers, kinds=WHOLE, builds=True),
    "cached": Usage(around=with_cached_blocks, kinds=CONTEXTS, builds=True),
    "moved": Usage(around=moved, kinds=tuple(FAMILIES), builds=True),
    "bfloat16": Usage(narrowed, in_bfloat16, tuple(FAMILIES), builds=True, narrow=True),
    "loaded": Usage(around=loaded, kinds=tuple(FAMILIES)),
    "fused": Usage(around=fused, kinds=FUSING, builds=True),
    "free u": Usage(around=with_free_u, kinds=UNETS, builds=True),
    "sliced": Usage(around=sliced, kinds=WHOLE, builds=True),
}


@dataclass(frozen=True)
class Cell:
    """A kind used in one way: the pipeline itself and a compiled one."""

    name: str
    usage: Usage
    own: Any
    ours: Any

    def given(self, mask: Any = None, seed: int = 0) -> Arguments:
        """What a call takes; `pipelines_own` of it is what the pipeline itself takes."""
        given = call_of(PIPES[self.name], seed, mask if self.name in MASKED else None)
        given = self.usage.arguments(self.name, given)
        return given if mask is None else {**given, "mask_image": mask}

    def pipelines_own(self, given: Arguments) -> Arguments:
        left = () if self.name in MASKED else ("mask_image", "template")
        return {n: v for n, v in given.items() if n not in left}

    def agree(self, found: Tensor, wanted: Tensor) -> None:
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        bound = 5e-3 if found.dtype == torch.uint8 else 1e-4
        bound = 0.05 if self.usage.narrow else bound
        if not bool(wanted.any()):
            assert torch.equal(found, wanted)
        else:
            assert distance(found.float(), wanted.float()) < bound


def result_of(pipe: Any, arguments: Arguments) -> Tensor:
    """What a call ends with, in any form: pixels, floats or latents."""
    ended = pipe(**{**arguments, "generator": copied(arguments["generator"])})
    images = ended[0] if isinstance(ended, tuple) else ended.images
    if isinstance(images, list):
        images = np.stack([np.asarray(one) for one in images])
    return torch.as_tensor(images).cpu()


def copied(generator: Any) -> Any:
    """Generators in the state of others, which a call doesn't change."""
    if isinstance(generator, list):
        return [copied(one) for one in generator]
    made = torch.Generator()
    made.set_state(generator.get_state())
    return made


def half(name: str) -> Any:
    side = PIPES[name].side
    return square(side // 4, side // 2 + 2, side)


def check_nothing_masked(cell: Cell) -> None:
    given = cell.pipelines_own(cell.given(square(0, 0, PIPES[cell.name].side)))
    wanted, found = result_of(cell.own, given), result_of(cell.ours, given)
    cell.agree(found, wanted)
    if not torch.equal(found, wanted):  # bits depend on where its tensors lie in memory
        assert not torch.equal(result_of(cell.own, given), wanted), "it has other bits"


def check_everything_masked(cell: Cell) -> None:
    given = cell.given(white(PIPES[cell.name].side))
    cell.agree(result_of(cell.ours, given), result_of(cell.own, cell.pipelines_own(given)))


def check_half_masked(cell: Cell) -> None:
    """Outside of the mask the pixels are the picture's own."""
    old = picture(size=PIPES[cell.name].side)
    given = cell.given(half(cell.name))
    given.setdefault("image", old)
    found = result_of(cell.ours, given)
    assert bool(found.float().isfinite().all())
    form = given.get("output_type")
    if form == "latent":
        return
    pixels = (found.movedim(1, -1) if form == "pt" else found).numpy()
    inside = np.asarray(half(cell.name)) > 127
    known = np.asarray(old) if found.dtype == torch.uint8 else np.asarray(old, np.float32) / 255
    for one in pixels:
        assert np.array_equal(one[~inside], known[~inside])
        assert (one[inside] != known[inside]).any(-1).mean() > 0.5


def check_the_templates_own_prompt(cell: Cell) -> None:
    """With the prompt and the noise of the template an edit is the run without a mask."""
    name, shared = cell.name, cell.ours._maskfx
    if name in MASKED:  # their template is of the picture, without an edit
        return
    given = cell.given()
    if PIPES[name].edits == "text":
        recorded = {**given, "generator": copied(given["generator"]), "return_dict": True}
        made = cell.ours(**recorded, record=True).template
        found = result_of(cell.ours, {**given, "mask_image": half(name), "template": made})
        cell.agree(found, result_of(cell.own, given))
    elif not cell.usage.own_run:
        given |= recording_arguments(shared.call, given, False, shared.usual, own_prompt=True)[0]
        given |= {"generator": seeded_noise(TEMPLATE), "output_type": "latent"}
        if "num_images_per_prompt" in given:
            given["generator"] = [seeded_noise(TEMPLATE) for _ in range(2)]
        wanted = result_of(cell.own, given)
        if len(wanted) > 1 and not torch.equal(*wanted):
            return  # it draws other noise for the second
        cell.agree(result_of(cell.ours, {**given, "mask_image": half(name)}), wanted)


def check_batch(cell: Cell) -> None:
    """Each picture of a batch is edited as alone."""
    singles = [cell.given(half(cell.name), seed) for seed in (0, 1)]
    for i, one in enumerate(singles):
        one |= {"generator": noise(i), "output_type": "latent"}
    batch = batch_of(cell, singles)
    if PIPES[cell.name].edits == "text":
        for one in (*singles, batch):
            given = {**cell.pipelines_own(one), "output_type": "pil"}
            given["generator"] = copied(given["generator"])
            one["template"] = cell.ours(**given, record=True).template
    alone = torch.cat([result_of(cell.ours, one) for one in singles])
    cell.agree(result_of(cell.ours, batch), alone)


def batch_of(cell: Cell, singles: list[Arguments]) -> Arguments:
    """The call of two that gives what the pipeline itself gives for each."""
    alone = torch.cat([result_of(cell.own, cell.pipelines_own(one)) for one in singles])
    both = joined(*singles)
    pictures = [n for n in ("image", "control_image", "mask_image") if n in both]
    listed = both | {n: [both[n]] * 2 for n in pictures}
    for batch in (both, listed):
        try:
            found = result_of(cell.own, cell.pipelines_own(batch))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            continue
        if found.shape == alone.shape and distance(found, alone) < 1e-4:
            return batch
    raise AssertionError("the pipeline's own batch is not its single runs")


CHECKS = (
    check_nothing_masked,
    check_everything_masked,
    check_half_masked,
    check_the_templates_own_prompt,
)


@contextmanager
def cell_of(name: str, usage: Usage) -> Iterator[Cell]:
    own, ours = copy.copy(plain(name)), anew(name) if not usage.builds else None
    if usage.builds:
        own, ours = PIPES[name].build(), maskfx.compile(PIPES[name].build(), quality="all-steps")
    with usage.around(name, own) as used, usage.around(name, ours) as edited:
        yield Cell(name, usage, used, edited)


def cells(batches: bool = False) -> list[Any]:
    """Kinds with usages; those of one kind follow each other, and few are quick."""
    return [
        pytest.param(name, usage, marks=() if (name, usage) in QUICK else pytest.mark.slow)
        for name in USED
        for usage, one in USAGES.items()
        if name in one.kinds and not (batches and (name == ALONE or not one.batch))
    ]


@pytest.mark.parametrize(("name", "usage"), cells())
def test_a_compiled_pipeline_agrees_with_its_own(name: str, usage: str):
    with cell_of(name, USAGES[usage]) as cell:
        for check in CHECKS:
            check(cell)


@pytest.mark.parametrize(("name", "usage"), cells(batches=True))
def test_each_of_a_batch_is_edited_as_alone(name: str, usage: str):
    with cell_of(name, USAGES[usage]) as cell:
        check_batch(cell)
