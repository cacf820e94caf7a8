"""Warm-up: what is learnt of a model by trying it, before the first client comes.

One edit of two steps at the model's own size captures its denoisers, so that nobody waits for that
later; the rest is a picture from nothing, if the model makes any, and a few small pictures that
sketches are fitted to.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from maskfx.engine.engine import Engine
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.probe import mixes_pictures
from maskfx.serve.models.call_signature import CALLBACK, TENSORS
from maskfx.serve.models.canvas import Canvas
from maskfx.serve.models.pipeline_set import PipelineMember, PipelineSet
from maskfx.serve.models.previews import PreviewMap, fit, sites_of
from maskfx.serve.request import Pixels

log = logging.getLogger(__name__)

STEPS = 2
FITTED = 4  # pictures that the sketches are fitted to
FITTED_SIDE = 256  # at most
NEAR = 20  # of so many steps the last one: what is decoded is nearly what was encoded


@dataclass(frozen=True)
class WarmupFindings:
    """What was learnt."""

    generates: bool
    mixes: bool  # one picture out of several, the first of which is edited
    site: int  # pixels along a site of the latents
    sketcher: PreviewMap | None


def warm_up(family: PipelineSet, engine: Engine) -> WarmupFindings:
    """Try everything once. A model that can't make a picture isn't served."""
    seen: list[Tensor] = []
    if family.editor is not None:
        try_edit(family, family.editor, engine, seen)
    generates = try_generation(family, engine, seen)
    if family.editor is None and not generates:
        raise InputError(f"{kind_of(family)} neither edits nor makes pictures; see the log")
    width, height = family.size()
    site = site_of(seen[-1], (width, height)) if seen else family.multiple
    return WarmupFindings(generates, mixes(family), site, sketcher_of(family))


def try_edit(
    family: PipelineSet, member: PipelineMember, engine: Engine, seen: list[Tensor]
) -> None:
    """One edit; its template isn't kept."""
    canvas = square_on(scene(0, family.size()), family.multiple)
    given = arguments_of(member, canvas) | {"image": canvas.image()}
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
    """A picture from nothing; a pipeline that can't make one is let go."""
    if family.generator is None:
        return family.editor is not None and family.editor.signature.has("mask_image")
    member, canvas = family.generator, Canvas.blank(family.size(), family.multiple)
    given = arguments_of(member, canvas)
    if member.signature.calls_back and not seen:
        given |= {CALLBACK: hearing(seen), TENSORS: ["latents"]}
    try:
        engine.submit(member.pipe, **given).result()
    except Exception as error:
        log.info("%s makes no pictures from nothing: %s", type(member.plain).__name__, error)
        family.generator = None
        return try_generation(family, engine, seen)
    return True


def mixes(family: PipelineSet) -> bool:
    """Does the model make one picture out of several? Not if it is told the mask of one."""
    member = family.editor
    if member is None or member.signature.has("mask_image"):
        return False
    picture = Canvas.blank(family.size(), family.multiple)
    given = arguments_of(member, picture) | {"image": [picture.image()] * 2}
    return mixes_pictures(member.pipe, pipeline_state_of(member.pipe), given)


def arguments_of(member: PipelineMember, canvas: Canvas, steps: int = STEPS) -> dict[str, Any]:
    """A call with nothing special."""
    signature = member.signature
    width, height = canvas.padded
    given: dict[str, Any] = {**signature.told, "prompt": ""}
    if signature.has("num_inference_steps"):
        given["num_inference_steps"] = steps
    if "strength" in signature.told:  # of few steps it may leave none
        given["strength"] = 1.0
    if signature.has("height") and signature.has("width"):
        given |= {"height": height, "width": width}
    if signature.has("max_area"):
        given["max_area"] = height * width
    if signature.has("generator"):
        given["generator"] = torch.Generator().manual_seed(0)
    if signature.has("control_image"):
        given["control_image"] = canvas.image()
    return given


def hearing(seen: list[Tensor]) -> Any:
    """A callback that keeps the latents of each step."""

    def stepped(pipe: Any, index: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(tensors["latents"].detach().clone())
        return {}

    return stepped


def kind_of(family: PipelineSet) -> str:
    return type(family.main.plain).__name__


# Sketches.


def sketcher_of(family: PipelineSet) -> PreviewMap | None:
    """Fitted to pictures that the pipeline decodes; None if it tells nobody of its latents."""
    member = family.main
    if not member.signature.calls_back:
        return None
    pairs = [pair for seed in range(FITTED) if (pair := decoded(family, member, seed)) is not None]
    made = fit(pairs)
    if made is not None:
        log.info("sketches explain %.0f%% of the pictures fitted to", 100 * made.explained)
    return made


def decoded(
    family: PipelineSet, member: PipelineMember, seed: int
) -> tuple[Tensor, Image.Image] | None:
    """Last latents of a run of the plain pipeline, and the picture that it made of them.

    Where a picture can be begun from, one step off it: what is decoded then is nearly a picture of
    ours. Elsewhere it is whatever a few steps make.
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
    """A picture with slow and sudden changes of all colours."""
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
    """A mask over the middle ninth."""
    height, width = picture.shape[:2]
    mask = np.zeros((height, width), bool)
    mask[height // 3 : -(-2 * height // 3), width // 3 : -(-2 * width // 3)] = True
    return Canvas(picture, mask, multiple)


def site_of(latents: Tensor, size: tuple[int, int]) -> int:
    """Pixels along one site of these latents of a picture of this width and height."""
    sites = sites_of(latents, size)
    return 1 if sites is None else max(1, size[0] // sites.shape[1])
