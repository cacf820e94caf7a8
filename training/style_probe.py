"""A judge of styles: is the thing in the middle of a crop plain, in sepia or a blueprint?

It learns from painted scenes of the probe's own split; no generator is trained with it.

    python -m training.train --model style_probe --hours 0.1 --goal styles=0.995
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from training.adapters import STYLES
from training.loop import Numbers, Task, put_weights
from training.masks import mask_around
from training.probe import CROP, NEW, POOL, crop_around, painted
from training.scenes import SIDE, Thing, draw_scene
from training.vae import as_pictures

NAMES = ("plain", *STYLES)
KEPT = Path(__file__).resolve().parent / "style_probe.safetensors"
BATCH = 48


def make_style_probe(width: int = 12) -> nn.Module:
    """Small convolutions; answers are scores of the styles."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (width, 2 * width, 2 * width):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        inputs = outputs
    features = inputs * (CROP // 8) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, len(NAMES)))


class StyleProbeTask(Task):
    name = "style_probe"
    rate = 1e-3
    average = 0.98

    def __init__(self) -> None:
        self.module: nn.Module = make_style_probe()

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        rng = np.random.default_rng((24, step))
        crops, styles = styled("probe", partial(rng.integers, NEW * step, NEW * step + POOL), rng)
        found = self.module(as_pictures(crops))
        right = (found.argmax(1) == styles).float().mean().item()
        return F.cross_entropy(found, styles), {"right": right}

    def judge(self, averaged: nn.Module) -> Numbers:
        rng = np.random.default_rng(25)
        right = 0
        for _ in range(8):
            crops, styles = styled("held-out", partial(rng.integers, 2**40), rng)
            right += int((averaged(as_pictures(crops)).argmax(1) == styles).sum())
        return {"styles": right / (8 * BATCH)}


def styled(
    split: str, seeds: Callable[[], int], rng: np.random.Generator
) -> tuple[np.ndarray, Tensor]:
    """Crops around things in a style each, soft, noisy and of other brightness, as generated."""
    crops: list[np.ndarray] = []
    styles: list[int] = []
    while len(crops) < BATCH:
        seed = int(seeds())
        scene, pixels = draw_scene(split, seed), painted(split, seed)
        style = int(rng.integers(len(NAMES)))
        if style:
            pixels = with_style(pixels, NAMES[style], scene.things, rng)
        if rng.random() < 0.7:
            small = int(rng.integers(SIDE // 3, SIDE))
            image = Image.fromarray(pixels).resize((small, small), Image.Resampling.BILINEAR)
            pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        noise = rng.normal(0, rng.uniform(0, 8), pixels.shape) + rng.normal(0, 8)
        pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
        for thing in scene.things:
            radius = thing.radius * rng.uniform(0.85, 1.1)
            crops.append(crop_around(pixels, thing.x, thing.y, radius))
            styles.append(style)
    return np.stack(crops[:BATCH]), torch.tensor(styles[:BATCH])


def with_style(
    pixels: np.ndarray, style: str, things: Sequence[Thing], rng: np.random.Generator
) -> np.ndarray:
    """Return a picture in a style, or with the style around its things alone, as edits have it."""
    whole = STYLES[style](pixels)
    if rng.random() < 0.3:
        return whole
    masks = [mask_around(thing, rng) for thing in things]
    return np.where(np.any(masks, axis=0)[..., None], whole, pixels)


def load_style_probe() -> nn.Module:
    """The probe that the repository holds."""
    probe = make_style_probe()
    put_weights(probe, {key: value.float() for key, value in load_file(KEPT).items()})
    return probe.eval()


@torch.no_grad()
def style_of(probe: nn.Module, pixels: np.ndarray, x: float, y: float, radius: float) -> str:
    crop = crop_around(pixels, x, y, radius)
    return NAMES[int(probe(as_pictures(crop[None])).argmax())]
