"""Canvas: a picture at the size that was asked for, as a pipeline can take it, and back again.

Owns sizes and pixels. A pipeline's sides are multiples of something; the canvas is made larger by
its last rows and columns rather than scaled, so that no pixel moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from maskfx.pipelines.masks import pooled
from maskfx.serve.request import Mask, Pixels

GREY = 127


@dataclass(frozen=True, eq=False)
class Canvas:
    """What is painted on: `picture` and `mask` have the asked size."""

    picture: Pixels
    mask: Mask
    multiple: int

    @classmethod
    def of(
        cls, picture: Pixels, mask: Mask | None, size: tuple[int, int] | None, multiple: int
    ) -> Canvas:
        """For an edit; without a mask the whole picture is edited."""
        height, width = picture.shape[:2]
        where = np.ones((height, width), bool) if mask is None else mask
        if size is not None and size != (width, height):
            picture, where = resized(picture, size), scaled_mask(where, size)
        return cls(picture, where, multiple)

    @classmethod
    def blank(cls, size: tuple[int, int], multiple: int) -> Canvas:
        """For a picture from nothing."""
        width, height = size
        return cls(
            np.full((height, width, 3), GREY, np.uint8), np.ones((height, width), bool), multiple
        )

    @property
    def whole(self) -> bool:
        return bool(self.mask.all())

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as asked."""
        return self.picture.shape[1], self.picture.shape[0]

    @property
    def padded(self) -> tuple[int, int]:
        """Width and height as the pipeline gets them."""
        width, height = (-(-side // self.multiple) * self.multiple for side in self.size)
        return width, height

    def image(self) -> Image.Image:
        return Image.fromarray(self.extended(self.picture))

    def mask_image(self) -> Image.Image:
        """White is edited. Of a canvas that is edited whole, what was added is edited too."""
        mask = self.mask.astype(np.uint8) * 255
        if self.whole:
            return Image.new("L", self.padded, 255)
        right, bottom = self._added()
        return Image.fromarray(np.pad(mask, ((0, bottom), (0, right))))

    def extended(self, pixels: Pixels) -> Pixels:
        """With its last row and column repeated."""
        right, bottom = self._added()
        return np.pad(pixels, ((0, bottom), (0, right), (0, 0)), mode="edge")

    def _added(self) -> tuple[int, int]:
        return self.padded[0] - self.size[0], self.padded[1] - self.size[1]

    def finished(self, made: Image.Image | Pixels) -> Pixels:
        """What a pipeline made at the asked size, its own bytes outside the mask."""
        width, height = self.size
        new = resized(np.asarray(as_image(made).convert("RGB")), self.padded)[:height, :width]
        return np.where(self.mask[..., None], new, self.picture)


def as_image(made: Image.Image | Pixels) -> Image.Image:
    return made if isinstance(made, Image.Image) else Image.fromarray(made)


def resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """At another width and height."""
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def scaled_mask(mask: Mask, size: tuple[int, int]) -> Mask:
    """At another width and height; what any masked pixel touches is masked."""
    width, height = size
    found: Mask = pooled(torch.from_numpy(mask.copy()), (height, width)).numpy()
    return found
