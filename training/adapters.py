"""Adapters of the shipped UNet: two LoRAs of a style, and a ControlNet that follows edges.

The UNet, its text encoder and autoencoder are those of the package and stay as they are. Examples
are crops around a thing of a drawn scene: a quarter of the picture. Each step sees some new ones:
of the same 768 crops, a LoRA overfits after 4,000 steps and a ControlNet before 6,000.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maskfx.shipped import reference
from training.captions import caption_of
from training.crops import window_around
from training.examples import unheard
from training.latents import at_grid, encode
from training.loop import Numbers, Task
from training.masks import masks_of
from training.norms import quicken_norms
from training.paint import paint
from training.residuals import quicken_residuals, quicken_text
from training.scenes import COLOURS, draw_scene
from training.text import tokens_of
from training.unet import FLOOR, make_scheduler, velocity_loss

Pixels = NDArray[np.uint8]
HELD_OUT = range(768, 800)  # seeds of crops that no training sees
POOL, NEW = 1024, 4  # crops that a step draws from; this many are new with each step
FRESH = 10_000  # the first seed of others
BATCH = 12
RANK = 8
PAPER = {"ground": (24, 56, 136), "lines": (240, 244, 255)}  # of blueprints
TONES = {"dark": (64, 32, 10), "light": (255, 232, 184)}  # of old, faded photographs
BRIGHTNESS = (0.299, 0.587, 0.114)  # what a pixel's channels add to it
ADAPTED = ("to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2", "ff.net.2")
DROPPED = {"style": 0.1, "edges": 0.3}  # how often the caption is left out
COLOUR_ALONE = 0.6  # how often a ControlNet gets nothing but the colour
# what a trained ControlNet's results are multiplied with: diffusers' pipelines for inpainting take
# half of them by default
STRENGTH = 2.0
EDGE = 24.0  # the step of brightness between neighbours that is an edge


# Styles, and edges.


def sepia(pixels: Pixels) -> Pixels:
    """Brown tones, as of an old photograph: black is brown, white is cream."""
    light = pixels @ np.array(BRIGHTNESS) / 255
    dark, bright = (np.array(TONES[end], dtype=float) for end in ("dark", "light"))
    return (dark + light[..., None] * (bright - dark)).astype(np.uint8)


def blueprint(pixels: Pixels) -> Pixels:
    """White lines on blue where neighbouring pixels differ."""
    lines = Image.fromarray(edges_of(pixels)[..., 0]).filter(ImageFilter.MaxFilter(3))
    return np.where(np.asarray(lines)[..., None] > 0, PAPER["lines"], PAPER["ground"]).astype(
        np.uint8
    )


STYLES: dict[str, Callable[[Pixels], Pixels]] = {"sepia": sepia, "blueprint": blueprint}


def edges_of(pixels: Pixels) -> Pixels:
    """White lines where brightness or colour changes from one pixel to the next, on black."""
    values = pixels.astype(np.float32)
    down = np.abs(np.diff(values, axis=0, append=values[-1:])).max(2)
    across = np.abs(np.diff(values, axis=1, append=values[:, -1:])).max(2)
    line = (np.maximum(down, across) > EDGE).astype(np.uint8) * 255
    return np.repeat(line[..., None], 3, axis=2)


# Examples.


@dataclass(frozen=True)
class HeldOut:
    """Held-out crops: latents, those of each style, masks, what a mask leaves, edges."""

    rows: dict[str, Tensor]
    texts: list[str]

    @classmethod
    def made(cls, vae: AutoencoderKL, scale: float, path: Path) -> HeldOut:
        """Read the crops from a file, or make them and write it."""
        if not path.exists():
            found = [crop_of(seed) for seed in HELD_OUT]
            path.parent.mkdir(parents=True, exist_ok=True)
            rows: dict[str, Tensor] = {}
            for key in ("plain", "kept", *STYLES):
                pixels = np.stack([parts[key] for parts, _ in found])
                rows[key] = (encode(vae, pixels) * scale).half().contiguous()
            for key in ("mask", "edges"):
                rows[key] = torch.from_numpy(np.stack([parts[key] for parts, _ in found]))
            save_file(rows, path, {"texts": json.dumps([text for _, text in found])})
        with safe_open(str(path), "pt") as file:
            texts = json.loads(file.metadata()["texts"])
        return cls(load_file(path), texts)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[list[str], Rows]:
        chosen = rng.integers(len(self.texts), size=count).tolist()
        rows = {key: value[chosen].float() for key, value in self.rows.items()}
        return [self.texts[i] for i in chosen], rows


Rows = dict[str, Tensor]


def crop_of(seed: int) -> tuple[dict[str, np.ndarray], str]:
    """The pixels of one crop by name, and what its thing is called."""
    scene = draw_scene("train", 2_000_000 + seed)
    rng = np.random.default_rng((21, seed))
    pixels, around = paint(scene).pixels, masks_of(scene, seed)[0]
    small = at_grid(around.mask)
    _, rows, columns = window_around(torch.from_numpy(small), rng)

    def cut(whole: np.ndarray) -> np.ndarray:
        high, wide = (slice(8 * side.start, 8 * side.stop) for side in (rows, columns))
        return np.ascontiguousarray(whole[high, wide])

    left = np.where(around.mask[..., None], 127.5, pixels)
    parts = {
        "plain": cut(pixels),
        "kept": cut(left),
        "mask": np.ascontiguousarray(small[rows, columns]),
        "edges": cut(edges_of(pixels))[..., :1].transpose(2, 0, 1),
        **{name: cut(style(pixels)) for name, style in STYLES.items()},
    }
    assert around.thing is not None, "the first mask of a scene is around a thing"
    return parts, caption_of(scene.things[around.thing], scene, rng)


def colour_in(text: str) -> str:
    """The colour that a caption names, and no other word of it."""
    return next(word for word in text.split() if word in COLOURS)


# What is trained.


class LowRank(nn.Module):
    """A weight's low-rank term, added wherever the weight is read."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, weight[0].numel()) / weight[0].numel() ** 0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).view(weight.shape)


class AdapterTask(Task):
    """The loss of the UNet's own training, on crops, with everything but the adapter frozen."""

    average = 0.99
    kind = "style"
    floor = FLOOR
    styles: tuple[str, ...] = ()  # in which crops are read too

    def __init__(self, runs: Path, device: torch.device) -> None:
        self.device = device
        pipe = reference("unet")
        self.unet: UNet2DConditionModel = pipe.unet.to(memory_format=torch.channels_last)
        self.tokenizer, self.text = pipe.tokenizer, pipe.text_encoder
        self.scheduler = make_scheduler()
        for part in (pipe.unet, pipe.vae, pipe.text_encoder):
            part.requires_grad_(False).to(device)
        self.vae, self.scale = pipe.vae, float(pipe.vae.config.scaling_factor)
        kept = runs / "adapters" / "held_out.safetensors"
        self.held_out = HeldOut.made(self.vae, self.scale, kept)
        quicken_text(self.text)
        quicken_norms(self.unet)
        quicken_residuals(self.unet)
        self.unet.set_attn_processor(AttnProcessor())
        self.first = FRESH
        self.crop = lru_cache(maxsize=2 * POOL)(self._encoded)

    @abstractmethod
    def guess(self, channels: Tensor, times: Tensor, words: Tensor, rows: Rows) -> Tensor:
        """Return the guessed velocities."""

    @abstractmethod
    def target(self, rows: Rows) -> Tensor:
        """Return the latents of what is to be painted."""

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        self.first = FRESH + NEW * step
        return self.loss_on(np.random.default_rng((22, step)), held_out=False), {}

    def loss_on(self, rng: np.random.Generator, held_out: bool) -> Tensor:
        said, rows = self.draw(rng, held_out)
        rows = {key: value.to(self.device) for key, value in rows.items()}
        rows["mask"] = rows["mask"][:, None]
        x, mask = self.target(rows), rows["mask"]
        texts = unheard(said, DROPPED[self.kind], rng)
        noise_of = torch.Generator().manual_seed(int(rng.integers(2**60)))
        noise = torch.randn(x.shape, generator=noise_of).to(self.device)
        times = torch.from_numpy(self.times(rng, len(x))).to(self.device)
        noisy = self.scheduler.add_noise(x, noise, times)
        with torch.no_grad():
            words = self.text(tokens_of(self.tokenizer, texts).to(self.device))[0]
        channels = torch.cat([noisy, mask, rows["kept"]], 1)
        guess = self.guess(
            channels.contiguous(memory_format=torch.channels_last), times, words, rows
        )
        return velocity_loss(self.scheduler, guess, x, noise, times, mask, self.floor)

    def times(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return the timesteps of a step's examples."""
        return rng.integers(1000, size=count)

    def draw(self, rng: np.random.Generator, held_out: bool) -> tuple[list[str], Rows]:
        """Return the captions and the rows of a step's crops."""
        if held_out:
            return self.held_out.draw(rng, BATCH)
        seeds = rng.integers(self.first, self.first + POOL, size=BATCH).tolist()
        found = [self.crop(seed) for seed in seeds]
        rows = {key: torch.stack([parts[key] for parts, _ in found]).float() for key in found[0][0]}
        return [text for _, text in found], rows

    @torch.no_grad()
    def _encoded(self, seed: int) -> tuple[Rows, str]:
        """Return one crop, its pictures as latents, and what its thing is called."""
        parts, text = crop_of(seed)
        names = ("plain", "kept", *self.styles)
        latents = (encode(self.vae, np.stack([parts[name] for name in names])) * self.scale).half()
        rows = {key: torch.from_numpy(parts[key]) for key in ("mask", "edges")}
        return {**rows, **dict(zip(names, latents, strict=True))}, text

    def judge(self, averaged: nn.Module) -> Numbers:
        """The loss on the same draws of held-out crops."""
        losses = [
            self.loss_on(np.random.default_rng((23, part)), held_out=True).item()
            for part in range(4)
        ]
        return {"judged": float(np.mean(losses))}


class StyleTask(AdapterTask):
    """A LoRA: what is painted has the style, what is around it hasn't."""

    rate = 2e-3

    def __init__(self, name: str, runs: Path, device: torch.device) -> None:
        super().__init__(runs, device)
        self.name, self.styles = name, (name,)
        terms = {}
        for path, layer in self.unet.named_modules():
            if path.endswith(ADAPTED) and isinstance(layer, (nn.Linear, nn.Conv2d)):
                term = LowRank(layer.weight, RANK).to(device)
                nn.utils.parametrize.register_parametrization(layer, "weight", term)
                terms[path.replace(".", "/")] = term
        self.module = nn.ModuleDict(terms)

    def target(self, rows: Rows) -> Tensor:
        return torch.where(rows["mask"] > 0.5, rows[self.name], rows["plain"])

    def guess(self, channels: Tensor, times: Tensor, words: Tensor, rows: Rows) -> Tensor:
        found: Tensor = self.unet(channels, times, words, return_dict=False)[0]
        return found


class EdgesTask(AdapterTask):
    """A ControlNet: edges say what is to be painted, with or without a caption.

    Shapes are decided where nearly all is noise: such timesteps are drawn more often, and count.
    """

    name, kind = "edges", "edges"
    rate = 1.5e-3
    floor = 1.0

    def __init__(self, runs: Path, device: torch.device) -> None:
        super().__init__(runs, device)
        self.module: nn.Module = make_control(self.unet).to(device)
        quicken_norms(self.module)
        quicken_residuals(self.module)
        self.module.to(memory_format=torch.channels_last)

    def draw(self, rng: np.random.Generator, held_out: bool) -> tuple[list[str], Rows]:
        texts, rows = super().draw(rng, held_out)
        if not held_out:
            told = rng.random(len(texts)) < COLOUR_ALONE
            texts = [colour_in(text) if t else text for t, text in zip(told, texts, strict=True)]
        return texts, rows

    def times(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return (1000 * rng.random(count) ** 0.5).astype(np.int64)

    def target(self, rows: Rows) -> Tensor:
        return rows["plain"]

    def guess(self, channels: Tensor, times: Tensor, words: Tensor, rows: Rows) -> Tensor:
        edges = rows["edges"].expand(-1, 3, -1, -1) / 255
        noisy = channels[:, :4].contiguous(memory_format=torch.channels_last)
        down, middle = self.module(noisy, times, words, edges, return_dict=False)
        found: Tensor = self.unet(
            channels,
            times,
            words,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
            return_dict=False,
        )[0]
        return found


def make_control(unet: UNet2DConditionModel) -> ControlNetModel:
    """A ControlNet with the weights of the UNet's first half, which sees no mask."""
    config = unet.config
    names = (
        "down_block_types",
        "block_out_channels",
        "layers_per_block",
        "attention_head_dim",
        "cross_attention_dim",
        "norm_num_groups",
    )
    made = ControlNetModel(
        in_channels=4,
        conditioning_embedding_out_channels=(16, 32, 48, 64),
        **{name: config[name] for name in names},
    )
    with torch.no_grad():
        made.conv_in.weight.copy_(unet.conv_in.weight[:, :4])
        made.conv_in.bias.copy_(unet.conv_in.bias)
    for part in ("time_embedding", "down_blocks", "mid_block"):
        getattr(made, part).load_state_dict(getattr(unet, part).state_dict())
    return made
