"""Sketches: linear maps from latents to pictures, packed or not, and previews of a real run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from maskfx.serve.models.job_runner import sketch_steps
from maskfx.serve.models.previews import fit, sites_of
from maskfx.serve.models.warmup import scene
from maskfx.serve.request import Pictures
from tests.factories.served import SIDE, Served, build, job, picture, square

SIZE = (32, 48)


def latents_of(pixels: Any, factor: int, mixed: torch.Tensor) -> torch.Tensor:
    """A linear encoder: each block of pixels through a matrix, (1, channels, height, width)."""
    width, height = pixels.shape[1] // factor, pixels.shape[0] // factor
    small = Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX)
    colours = torch.from_numpy(np.asarray(small).copy()).float() / 255
    return (colours @ mixed.T).movedim(-1, 0)[None]


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Blocks of 2 x 2 sites as one token."""
    _, channels, height, width = latents.shape
    parts = latents.view(1, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return parts.reshape(1, height * width // 4, channels * 4)


def correlation(one: Any, other: Any) -> float:
    return float(np.corrcoef(one.astype(float).ravel(), other.astype(float).ravel())[0, 1])


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_linear_encoder_is_found(is_packed: bool) -> None:
    mixed = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    pairs = []
    for seed in range(6):
        pixels = scene(seed, SIZE)
        latents = latents_of(pixels, 8, mixed)
        pairs.append((packed(latents) if is_packed else latents, Image.fromarray(pixels)))
    sketcher = fit(pairs[:5])
    assert sketcher is not None
    assert sketcher.block == (2 if is_packed else 1)
    drawn = sketcher.draw(pairs[5][0], SIZE)
    assert drawn is not None
    assert drawn.shape == (6, 4, 3)
    wanted = np.asarray(pairs[5][1].resize((4, 6), Image.Resampling.BOX))
    assert np.abs(drawn.astype(int) - wanted).max() <= (12 if is_packed else 3)


def test_latents_that_dont_tell_give_no_preview() -> None:
    assert sites_of(torch.zeros(1, 7, 4), SIZE) is None  # no rows and columns
    assert sites_of(None, SIZE) is None
    assert sites_of(torch.zeros(1, 4, 1, 6, 4), SIZE) is not None  # one frame
    assert fit([]) is None
    broken = torch.full((1, 4, 6, 4), float("nan"))
    assert fit([(broken, Image.new("RGB", SIZE))]) is None
    sketcher = fit([(torch.randn(1, 4, 6, 4), Image.fromarray(scene(0, SIZE)))])
    assert sketcher is not None
    assert sketcher.draw(torch.zeros(1, 5, 6, 4), SIZE) is None  # another model's


@pytest.mark.parametrize(
    ("count", "total", "places"),
    [(0, 9, set()), (1, 10, {5}), (3, 8, {2, 4, 6}), (3, 2, {1}), (2, 1, set()), (3, 4, {1, 2, 3})],
)
def test_previews_are_spread_over_the_steps(count: int, total: int, places: set[int]) -> None:
    assert sketch_steps(count, total) == places


def trained(vae: Any, steps: int = 250) -> Any:
    """An autoencoder that has learnt a little, for random ones have no colours."""
    draw = torch.Generator().manual_seed(0)
    vae.requires_grad_(True)
    with torch.enable_grad():
        learn = torch.optim.Adam(vae.parameters(), 4e-3)
        scenes = torch.stack([torch.from_numpy(scene(s, (SIDE, SIDE))) for s in range(100, 148)])
        scenes = scenes.movedim(-1, 1).float() / 127.5 - 1
        for _ in range(steps):
            batch = scenes[torch.randint(len(scenes), (8,), generator=draw)]
            latents = vae.encode(batch).latent_dist.mode()
            loss = (vae.decode(latents).sample - batch).pow(2).mean() + 1e-3 * latents.pow(2).mean()
            learn.zero_grad()
            loss.backward()
            learn.step()
    vae.requires_grad_(False)
    return vae


@pytest.mark.slow
def test_previews_look_like_the_picture() -> None:
    pipe = build("StableDiffusion3InpaintPipeline")
    trained(pipe.vae)
    served = Served(pipe)
    sketcher = served.model.runner.warmth.sketcher
    assert sketcher is not None
    assert sketcher.explained > 0.5
    whole = np.ones((SIDE, SIDE), bool)
    made = served.made(job(steps=20, strength=0.2, previews=3), Pictures((picture(3),), whole))
    last = served.told.previews[-1].pixels
    assert last.shape == (SIDE, SIDE, 3)
    assert correlation(last, made.pixels) > 0.7
    # of an edit too, whose mask is a part of the picture
    served.told.previews.clear()
    made = served.made(job(steps=20, strength=0.2, previews=3), Pictures((picture(3),), square()))
    last = served.told.previews[-1].pixels
    assert correlation(last[square()], made.pixels[square()]) > 0.5  # type: ignore[index]
    served.model.close()
