"""What bench.engine edits with: one pipeline twice, plain and compiled, and requests for it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

import maskfx
from bench.masks import strokes
from maskfx.runtime.cache.quantize import LOSSLESS, Encoding, Format
from maskfx.runtime.cache.tiers import Tiers
from maskfx.shipped import reference
from training.paint import paint
from training.scenes import COLOURS, SHAPES, draw_scene

LOG_MEAN, LOG_SD = -2.345, 0.572  # of production mask ratios, fitted
TEMPLATES = 4
HOST_BYTES = 10 << 30
# how the rows of templates are stored
ENCODINGS = {"32bit": LOSSLESS, "16bit": Encoding(Format.FP16), "8bit": Encoding(Format.INT8)}


def build(width: int) -> Any:
    """Stable Diffusion 1.5's shape at `width` channels, with a small VAE."""
    torch.manual_seed(0)
    make: Any = diffusers  # its classes have no types
    unet = make.UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
        attention_head_dim=8,
        cross_attention_dim=384,
        layers_per_block=2,
    )
    vae = make.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 64, 64),
        latent_channels=4,
    )
    pipe = make.StableDiffusionInpaintPipeline(
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        unet=unet.eval(),
        scheduler=make.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclass(frozen=True)
class Request:
    """One edit: a template, a mask, a prompt, a seed."""

    image: Image.Image
    mask: Image.Image
    prompt: torch.Tensor | str  # states of a text, where the pipeline has no encoder
    seed: int


def requests(
    count: int,
    pixels: int,
    seed: int = 0,
    templates: int = TEMPLATES,
    spoken: bool = False,
    even: bool = False,
) -> list[Request]:
    """Edits of a few pictures; `even`: few masks stand for all, from small to large."""
    spread = NormalDist(LOG_MEAN, LOG_SD)
    draw = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    pictures = [scene(n) if spoken else smooth_picture(pixels, n) for n in range(templates)]
    made = []
    for n in range(count):
        one = spread.inv_cdf((n + 0.5) / count) if even else draw.gauss(LOG_MEAN, LOG_SD)
        ratio = min(0.5, max(0.01, math.exp(one)))
        drawn = strokes(pixels // 8, pixels // 8, ratio, seed=seed + n)
        whole = drawn.repeat_interleave(8, 0).repeat_interleave(8, 1).numpy()
        mask = Image.fromarray(whole.astype(np.uint8) * 255)
        states = torch.randn(1, 77, 384, generator=noise)
        prompt = f"a {draw.choice(COLOURS)} {draw.choice(SHAPES)}" if spoken else states
        made.append(Request(pictures[draw.randrange(templates)], mask, prompt, n))
    return made


def scene(number: int) -> Image.Image:
    return Image.fromarray(paint(draw_scene("held-out", number)).pixels)


def smooth_picture(pixels: int, seed: int) -> Image.Image:
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8))
    return small.resize((pixels, pixels), Image.Resampling.BICUBIC)


def arguments(group: Sequence[Request], pixels: int, steps: int) -> dict[str, Any]:
    """One pipeline call for these requests."""
    prompts = [r.prompt for r in group]
    told: dict[str, Any] = {"prompt": prompts}
    if isinstance(prompts[0], torch.Tensor):
        states = torch.cat([p for p in prompts if isinstance(p, torch.Tensor)])
        told = {"prompt_embeds": states, "negative_prompt_embeds": torch.zeros_like(states)}
    return {
        **told,
        "image": [r.image for r in group] if len(group) > 1 else group[0].image,
        "mask_image": [r.mask for r in group] if len(group) > 1 else group[0].mask,
        "height": pixels,
        "width": pixels,
        "num_inference_steps": steps,
        "strength": 1.0,
        "generator": [torch.Generator().manual_seed(r.seed) for r in group],
    }


@dataclass(frozen=True)
class Bench:
    """The pipeline twice, over the same weights: plain and compiled."""

    plain: Any
    edits: Any
    pixels: int
    steps: int
    templates: int
    spoken: bool = False

    def requests(self, count: int, seed: int = 0, even: bool = False) -> list[Request]:
        return requests(count, self.pixels, seed, self.templates, self.spoken, even)

    def dense(self, group: Sequence[Request]) -> Any:
        return self.plain(**arguments(group, self.pixels, self.steps))

    def call(self, request: Request, **more: Any) -> dict[str, Any]:
        given = arguments([request], self.pixels, self.steps)
        return {**given, "generator": given["generator"][0], **more}


def open_bench(
    width: int | None,
    pixels: int,
    steps: int,
    templates: int = TEMPLATES,
    encoding: Encoding = LOSSLESS,
    quality: str = "all-steps",  # templates then serve every side
    **compiled_as: Any,
) -> Bench:
    """A pipeline of random weights at this width; without one, the one that is shipped."""
    plain, edits = (build(width) if width else reference("unet") for _ in range(2))
    for pipe in (plain, edits):
        pipe.set_progress_bar_config(disable=True)
    tiers = Tiers(host_bytes=HOST_BYTES, encoding=encoding)
    maskfx.compile(edits, tiers=tiers, quality=quality, **compiled_as)
    bench = Bench(plain, edits, pixels, steps, templates, spoken=width is None)
    for request in {id(r.image): r for r in bench.requests(64)}.values():
        edits(**bench.call(request))  # records the template
    return bench
