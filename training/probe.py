"""A judge of edits: which shape and which colour has the thing in the middle of a crop.

It learns from painted scenes of its own split; no generator is trained with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from training.loop import Numbers, Task
from training.paint import paint
from training.scenes import COLOURS, SHAPES, SIDE, Thing, draw_scene
from training.vae import as_pictures

CROP = 48
POOL, NEW = 1024, 4  # pictures that a step's crops are taken from; this many are new with each step
KEPT = Path(__file__).resolve().parent / "probe.safetensors"


def crop_around(pixels: np.ndarray, x: float, y: float, radius: float) -> np.ndarray:
    """A square around a thing, half as wide again, at one size."""
    reach = 1.5 * radius
    box = (x - reach, y - reach, x + reach, y + reach)
    # what lies outside the picture repeats its border
    pad = int(reach) + 1
    padded = np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)), mode="edge")
    image = Image.fromarray(padded).resize(
        (CROP, CROP), Image.Resampling.BILINEAR, tuple(edge + pad for edge in box), reducing_gap=2
    )
    return np.asarray(image)


def make_probe(width: int = 32) -> nn.Module:
    """Small convolutions; answers are shape scores, then colour scores."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    return nn.Sequential(
        *block(3, width),
        *block(width, 2 * width),
        *block(2 * width, 3 * width),
        *block(3 * width, 4 * width),
        nn.Flatten(),
        nn.Linear(4 * width * (CROP // 16) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, len(SHAPES) + len(COLOURS)),
    )


def scores(probe: nn.Module, crops: np.ndarray) -> tuple[Tensor, Tensor]:
    both = probe(as_pictures(crops))
    return both[:, : len(SHAPES)], both[:, len(SHAPES) :]


class ProbeTask(Task):
    name = "probe"
    rate = 1e-3
    average = 0.995

    def __init__(self, batch: int = 64) -> None:
        self.batch = batch
        self.module: nn.Module = make_probe()

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        rng = np.random.default_rng((10, step))
        seeds = partial(rng.integers, NEW * step, NEW * step + POOL)
        crops, shapes, colours = examples("probe", seeds, rng, self.batch)
        for_shape, for_colour = scores(self.module, crops)
        right = (for_shape.argmax(1) == shapes) & (for_colour.argmax(1) == colours)
        loss = F.cross_entropy(for_shape, shapes) + F.cross_entropy(for_colour, colours)
        return loss, {"right": right.float().mean().item()}

    def judge(self, averaged: nn.Module) -> Numbers:
        rng = np.random.default_rng(11)
        crops, shapes, colours = examples("held-out", partial(rng.integers, 2**40), rng, 512)
        for_shape, for_colour = scores(averaged, crops)
        return {
            "shapes": (for_shape.argmax(1) == shapes).float().mean().item(),
            "colours": (for_colour.argmax(1) == colours).float().mean().item(),
        }


@lru_cache(maxsize=2 * POOL)
def painted(split: str, seed: int) -> np.ndarray:
    return paint(draw_scene(split, seed)).pixels


def examples(
    split: str, seeds: Callable[[], int], rng: np.random.Generator, count: int
) -> tuple[np.ndarray, Tensor, Tensor]:
    """Crops off the mark, softened and noisy, as generated pictures are."""
    crops: list[np.ndarray] = []
    things: list[Thing] = []
    while len(crops) < count:
        seed = int(seeds())
        scene, pixels = draw_scene(split, seed), painted(split, seed)
        if rng.random() < 0.5:
            small = int(rng.integers(SIDE // 3, SIDE))
            image = Image.fromarray(pixels).resize((small, small), Image.Resampling.BILINEAR)
            pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        noise = rng.normal(0, rng.uniform(0, 8), pixels.shape)
        pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
        for thing in scene.things:
            shift = rng.normal(0, 0.12, 2) * thing.radius
            radius = thing.radius * rng.uniform(0.85, 1.3)
            crops.append(crop_around(pixels, thing.x + shift[0], thing.y + shift[1], radius))
            things.append(thing)
    things, crops = things[:count], crops[:count]
    shapes = torch.tensor([SHAPES.index(thing.shape) for thing in things])
    colours = torch.tensor([COLOURS.index(thing.colour) for thing in things])
    return np.stack(crops), shapes, colours
