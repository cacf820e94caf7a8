"""Scenes as latents on disk, in shards that are made when a training first needs them.

Captions aren't kept: a scene is drawn again from its seed in no time, and words vary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.loop import averaged_weights, put_weights
from training.masks import masks_of
from training.paint import paint
from training.precision import quick_numbers
from training.scenes import SIDE, draw_scene
from training.vae import as_pictures, make_vae

SHARD = 256
GRID = SIDE // 8


def frozen_vae(runs: Path, latents: int) -> AutoencoderKL:
    """The trained autoencoder with its latents' scale. Frozen at the first call, for good."""
    folder = runs / f"vae{latents}" / "frozen"
    if not (folder / "config.json").exists():
        vae = make_vae(latents)
        put_weights(vae, averaged_weights(folder.parent / "checkpoint.pt"))
        vae.eval()
        pictures = [paint(draw_scene("train", seed)).pixels for seed in range(96)]
        values = encode(vae, np.stack(pictures))
        vae.register_to_config(scaling_factor=round(1 / values.std().item(), 4), shift_factor=0.0)
        vae.save_pretrained(folder)
    vae = AutoencoderKL.from_pretrained(folder)
    return vae.eval().requires_grad_(False).to(memory_format=torch.channels_last)


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: np.ndarray) -> Tensor:
    """Means of latents, not scaled; in small batches."""
    means = []
    for part in np.array_split(pixels, max(1, len(pixels) // 8)):
        x = as_pictures(part).to(vae.device)
        with quick_numbers(x.device):
            means.append(vae.encode(x).latent_dist.mean.float().cpu())
    return torch.cat(means)


@dataclass
class Latents:
    """Shards of one autoencoder's latents, scaled, with masks and what they leave over."""

    vae: AutoencoderKL
    folder: Path
    at_start: int = field(default=0, init=False)
    from_step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.shards: list[dict[str, Tensor]] = []
        grey = np.full((1, SIDE, SIDE, 3), 127.5, np.float32)
        self.nothing = encode(self.vae, grey)[0] * self.scale

    @property
    def scale(self) -> float:
        return float(self.vae.config.scaling_factor)

    def need(self, count: int) -> None:
        """Hold a number of shards, from disk or made now."""
        while len(self.shards) < count:
            path = self.folder / f"shard-{len(self.shards):05d}.safetensors"
            if not path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                new = path.with_suffix(".new")
                save_file(self.make(len(self.shards)), new)
                os.replace(new, path)
            self.shards.append(load_file(path))

    def grow(self, step: int, first: int, per_shard: int) -> None:
        """Hold what is on disk, and ever more with the steps of this training."""
        if not self.shards:
            self.from_step = step
            there = len(list(self.folder.glob("shard-*.safetensors")))
            self.need(max(first, there))
            self.at_start = len(self.shards)
        self.need(self.at_start + (step - self.from_step) // per_shard)

    def make(self, index: int) -> dict[str, Tensor]:
        """`full`, masks, and what each leaves over."""
        pictures, cut, masks, around = [], [], [], []
        for seed in range(index * SHARD, (index + 1) * SHARD):
            scene = draw_scene("train", seed)
            picture = paint(scene)
            pictures.append(picture.pixels)
            both = masks_of(scene, seed)
            masks.append(np.stack([at_grid(one.mask) for one in both]))
            around.append([-1 if one.thing is None else one.thing for one in both])
            cut += [np.where(one.mask[..., None], 127.5, picture.pixels) for one in both]
        kept = encode(self.vae, np.stack(cut)) * self.scale
        return {
            "full": (encode(self.vae, np.stack(pictures)) * self.scale).half().contiguous(),
            "masks": torch.from_numpy(np.stack(masks)),
            "kept": kept.half().contiguous().view(SHARD, 2, -1, GRID, GRID),
            "around": torch.tensor(around),  # which thing each mask is around, or -1
        }

    def pick(
        self, rng: np.random.Generator, count: int, shards: int | None = None
    ) -> list[tuple[int, dict[str, Tensor]]]:
        """Some scenes, of the first `count` shards or of all: their seeds and their rows."""
        among = len(self.shards) if shards is None else shards
        seeds = rng.integers(among * SHARD, size=count).tolist()
        return [
            (seed, {key: rows[seed % SHARD] for key, rows in self.shards[seed // SHARD].items()})
            for seed in seeds
        ]


def at_grid(mask: np.ndarray) -> np.ndarray:
    """A mask at the latents' size, by the nearest pixel, as the pipelines do it."""
    return np.ascontiguousarray(mask[::8, ::8])
