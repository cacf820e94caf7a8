"""Warm-up: test runs that find out what a model can do before the first request.

One edit of two steps at the model's default size captures its denoisers, so that no request waits
for the capture. Then follow one generation without an image, if the model supports it, and a few
small runs that the preview map is fitted to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from maskfx.engine.engine import Engine
from maskfx.errors import InputError
from maskfx.ir import progress
from maskfx.pipelines.call import PipelineCall
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.serve.models.call_signature import CALLBACK, TENSORS
from maskfx.serve.models.canvas import Canvas
from maskfx.serve.models.control_images import control_argument
from maskfx.serve.models.pipeline_set import PipelineMember, PipelineSet
from maskfx.serve.models.previews import PreviewMap, fit, sites_of
from maskfx.serve.request import Pixels

log = logging.getLogger(__name__)

STEPS = 2
FITTED = 4  # images that the preview map is fitted to
FITTED_SIDE = 256  # their side in pixels, at most
NEAR = 20  # steps, of which only the last runs: the decoded image is close to the encoded one


@dataclass(frozen=True)
class WarmupFindings:
    """The results of the warm-up."""

    generates: bool
    mixes: bool  # combines several input images into one result; the first one is edited
    site: int  # pixels along a site of the latents
    sketcher: PreviewMap | None


def warm_up(family: PipelineSet, engine: Engine) -> WarmupFindings:
    """Run each kind of call once; raise InputError if the model supports none of them."""
    seen: list[Tensor] = []
    with progress.work("warm-up", "warm-up of the model", 4):
        progress.stage(0, "first edit, which captures the denoisers")
        if family.editor is not None:
            try_edit(family, family.editor, engine, seen)
        progress.stage(1, "generation without a picture")
        generates = try_generation(family, engine, seen)
        if family.editor is None and not generates:
            raise InputError(
                f"{kind_of(family)} can't be served: it neither edits pictures nor makes them "
                "from a prompt alone; the log has the errors of both attempts"
            )
        width, height = family.size()
        site = site_of(seen[-1], (width, height)) if seen else family.multiple
        progress.stage(2, "number of pictures per edit")
        mixed = mixes(family)
        progress.stage(3, "previews")
        return WarmupFindings(generates, mixed, site, sketcher_of(family))


def try_edit(
    family: PipelineSet, member: PipelineMember, engine: Engine, seen: list[Tensor]
) -> None:
    """Record a template and run one edit, collect its latents in `seen`, and drop the template."""
    canvas = square_on(scene(0, family.size()), family.multiple)
    quality = replace(pipeline_state_of(member.pipe).quality, reuse="template")
    given = arguments_of(member, canvas) | {"image": canvas.image(), "quality": quality}
    if member.signature.calls_back:
        given |= {CALLBACK: hearing(seen), TENSORS: ["latents"]}
    try:
        result = engine.submit(member.pipe, mask_image=canvas.mask_image(), **given).result()
    except Exception as error:
        raise InputError(
            f"{kind_of(family)} can't be served: a first edit of {canvas.padded[0]}x"
            f"{canvas.padded[1]} fails with {type(error).__name__}: {error}"
        ) from error
    served = getattr(result, "template", None)
    if served is not None:
        family.library.forget(served.name)


def try_generation(family: PipelineSet, engine: Engine, seen: list[Tensor]) -> bool:
    """Return True if the model generates without an image; drop a generator whose run fails.

    An editor with a mask argument can generate too, by editing a whole blank image.
    """
    if family.generator is None:
        return family.editor is not None and family.editor.signature.has("mask_image")
    member, canvas = family.generator, Canvas.blank(family.size(), family.multiple)
    given = arguments_of(member, canvas)
    if member.signature.calls_back and not seen:
        given |= {CALLBACK: hearing(seen), TENSORS: ["latents"]}
    try:
        engine.submit(member.pipe, **given).result()
    except Exception as error:
        log.info("%s can't generate without a picture: %s", type(member.plain).__name__, error)
        family.generator = None
        return try_generation(family, engine, seen)
    return True


def mixes(family: PipelineSet) -> bool:
    """Return True if the model combines several images into one; never for models with a mask."""
    member = family.editor
    if member is None or member.signature.has("mask_image"):
        return False
    picture = Canvas.blank(family.size(), family.multiple)
    given = arguments_of(member, picture) | {"image": [picture.image()] * 2}
    state = pipeline_state_of(member.pipe)
    return PipelineCall.bind(member.pipe, state, (), given).combines_images()


def arguments_of(member: PipelineMember, canvas: Canvas, steps: int = STEPS) -> dict[str, Any]:
    """Return the arguments of a minimal call."""
    signature = member.signature
    width, height = canvas.padded
    given: dict[str, object] = {**signature.told, "prompt": "", **member.ip_adapters.blank()}
    if signature.has("num_inference_steps"):
        given["num_inference_steps"] = steps
    if "strength" in signature.told:  # a low strength could skip all of the few steps
        given["strength"] = 1.0
    if signature.has("height") and signature.has("width"):
        given |= {"height": height, "width": width}
    if signature.has("max_area"):
        given["max_area"] = height * width
    if signature.has("generator"):
        given["generator"] = torch.Generator().manual_seed(0)
    given |= control_argument(signature, canvas, [canvas.image()] * signature.controls)
    if (mode := signature.mode(None)) is not None:
        given["control_mode"] = mode
    if (scales := signature.default_scale()) is not None:
        given[str(signature.scaling)] = scales
    return given


def hearing(seen: list[Tensor]) -> Callable[..., dict[str, object]]:
    """Return a step callback that appends a copy of each step's latents to `seen`."""

    def stepped(pipe: object, index: int, time: object, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(tensors["latents"].detach().clone())
        return {}

    return stepped


def kind_of(family: PipelineSet) -> str:
    return type(family.main.plain).__name__


# Previews.


def sketcher_of(family: PipelineSet) -> PreviewMap | None:
    """Fit a preview map to images that the pipeline decodes.

    Returns None if the pipeline has no step callback with latents or the fit fails.
    """
    member = family.main
    if not member.signature.calls_back:
        return None
    pairs = [pair for seed in range(FITTED) if (pair := decoded(family, member, seed)) is not None]
    made = fit(pairs)
    if made is not None:
        log.info(
            "previews explain %.0f%% of the variance of the pictures they were fitted to",
            100 * made.explained,
        )
    return made


def decoded(
    family: PipelineSet, member: PipelineMember, seed: int
) -> tuple[Tensor, Image.Image] | None:
    """Run the original pipeline and return its last latents and the image decoded from them.

    With a `strength` argument only one step runs on a synthetic image, so that the result is close
    to that image. Without one, the result is the output of a few steps.
    """
    size = (min(FITTED_SIDE, family.size()[0]),) * 2
    canvas = Canvas(scene(seed, size), np.ones(size[::-1], bool), family.multiple)
    signature, seen = member.signature, list[Tensor]()
    near = signature.has("strength")
    given = arguments_of(member, canvas, NEAR if near else STEPS)
    given |= {CALLBACK: hearing(seen), TENSORS: ["latents"]}
    if near:
        given["strength"] = 1 / NEAR
    if member is family.editor:
        given["image"] = canvas.image()
    if signature.has("mask_image"):
        given["mask_image"] = canvas.mask_image()
    if "generator" in given:
        given["generator"].manual_seed(seed)
    with torch.no_grad():
        picture = member.plain(**given).images[0]
    if not seen or not isinstance(picture, Image.Image):
        return None
    return seen[-1], picture.convert("RGB").resize(canvas.padded)


def scene(seed: int, size: tuple[int, int]) -> Pixels:
    """Return a synthetic image with smooth gradients and sharp edges in all colours."""
    width, height = size
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)).copy()
    for _ in range(8):
        top, left = draw.integers(0, height), draw.integers(0, width)
        tall, wide = draw.integers(1, height // 3 + 2), draw.integers(1, width // 3 + 2)
        pixels[top : top + tall, left : left + wide] = draw.integers(0, 256, 3)
    return pixels


def square_on(picture: Pixels, multiple: int) -> Canvas:
    """Return a canvas of the image whose mask covers the middle ninth."""
    height, width = picture.shape[:2]
    mask = np.zeros((height, width), bool)
    mask[height // 3 : -(-2 * height // 3), width // 3 : -(-2 * width // 3)] = True
    return Canvas(picture, mask, multiple)


def site_of(latents: Tensor, size: tuple[int, int]) -> int:
    """Return the pixels along one site of the latents of an image of this width and height."""
    sites = sites_of(latents, size)
    return 1 if sites is None else max(1, size[0] // sites.shape[1])
