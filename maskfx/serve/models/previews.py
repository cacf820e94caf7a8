"""Previews: a linear map from latents to a small image, fitted to images that the model decoded.

The map takes each site's channels to a block of pixels. Packed tokens needn't be unpacked, since
the fit works for any order of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from maskfx.pipelines.masks.masks import grid_of
from maskfx.serve.request import Pixels

FINE = 8  # image pixels along one preview pixel, where a site covers more than these
RIDGE = 1e-4

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PreviewMap:
    """A linear map from latents to a small image."""

    weights: Floats  # (channels + 1, block * block * 3)
    block: int
    explained: float  # share of the fitted images' variance

    def draw(self, latents: Tensor, size: tuple[int, int]) -> Pixels | None:
        """Return the preview of an image of this size; None if the latents don't fit the map."""
        sites = sites_of(latents, size)
        if sites is None or sites.shape[2] + 1 != len(self.weights):
            return None
        values = with_one(sites) @ self.weights
        pixels = unblocked(values, self.block)
        return np.rint(np.nan_to_num(pixels) * 255).clip(0, 255).astype(np.uint8)


def fit(pairs: Sequence[tuple[Tensor, Image.Image]]) -> PreviewMap | None:
    """Fit the map to pairs of latents and decoded images; None if the latents are unusable."""
    rows, targets, block = [], [], 1
    for latents, picture in pairs:
        sites = sites_of(latents, picture.size)
        if sites is None:
            return None
        height, width = sites.shape[:2]
        block = max(1, picture.height // height // FINE)
        rows.append(with_one(sites).reshape(height * width, -1))
        targets.append(blocked(picture, (width, height), block))
    if not rows:
        return None
    known, wanted = np.concatenate(rows), np.concatenate(targets)
    if not np.isfinite(known).all():
        return None
    square = known.T @ known
    ridge = RIDGE * np.trace(square) / len(square) * np.eye(len(square))
    weights = np.linalg.solve(square + ridge, known.T @ wanted)
    left = ((known @ weights - wanted) ** 2).sum()
    all_of_it = ((wanted - wanted.mean(0)) ** 2).sum()
    return PreviewMap(weights, block, float(1 - left / max(all_of_it, 1e-12)))


def sites_of(latents: object, size: tuple[int, int]) -> Floats | None:
    """Return the first image's latents as (rows, columns, channels); None for other layouts."""
    if not isinstance(latents, Tensor):
        return None
    one = latents[0].detach().float().cpu()
    if one.dim() == 4 and one.shape[1] == 1:  # one frame
        one = one[:, 0]
    if one.dim() == 3:
        return np.asarray(one.movedim(0, -1).numpy(), np.float64)
    if one.dim() != 2:
        return None
    grid = grid_of(one.shape[0], size[1], size[0])
    return None if grid is None else np.asarray(one.reshape(*grid, -1).numpy(), np.float64)


def with_one(sites: Floats) -> Floats:
    return np.concatenate([sites, np.ones((*sites.shape[:2], 1))], axis=2)


def blocked(picture: Image.Image, grid: tuple[int, int], block: int) -> Floats:
    """Return the image's colours under each site as (sites, block * block * 3)."""
    columns, rows = grid
    small = picture.convert("RGB").resize((columns * block, rows * block), Image.Resampling.BOX)
    pixels = np.asarray(small, np.float64) / 255
    parts = pixels.reshape(rows, block, columns, block, 3).transpose(0, 2, 1, 3, 4)
    return parts.reshape(rows * columns, -1)


def unblocked(values: Floats, block: int) -> Floats:
    """Invert `blocked`: return pixels of shape (rows * block, columns * block, 3)."""
    rows, columns = values.shape[:2]
    parts = values.reshape(rows, columns, block, block, 3).transpose(0, 2, 1, 3, 4)
    return parts.reshape(rows * block, columns * block, 3)
