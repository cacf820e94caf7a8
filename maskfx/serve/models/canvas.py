"""Canvas: converts images between the requested size and a size that a pipeline accepts.

Owns sizes and pixels. Pipelines need sides that are multiples of a number; the canvas is padded by
repeating its last row and column instead of being scaled, so that no pixel moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from maskfx.pipelines.masks.masks import pooled
from maskfx.serve.request import Mask, Pixels

GREY = 127


@dataclass(frozen=True, eq=False)
class Canvas:
    """An input image and its mask, both at the requested size."""

    picture: Pixels
    mask: Mask
    multiple: int

    @classmethod
    def of(
        cls, picture: Pixels, mask: Mask | None, size: tuple[int, int] | None, multiple: int
    ) -> Canvas:
        """Create the canvas of an edit.

        Args:
            picture: The image to edit.
            mask: The region to edit; None edits the whole image.
            size: Requested width and height; None keeps the image's size.
            multiple: Number that the padded sides are multiples of.
        """
        height, width = picture.shape[:2]
        where = np.ones((height, width), bool) if mask is None else mask
        if size is not None and size != (width, height):
            picture, where = resized(picture, size), scaled_mask(where, size)
        return cls(picture, where, multiple)

    @classmethod
    def blank(cls, size: tuple[int, int], multiple: int) -> Canvas:
        """Create a grey, fully masked canvas for a generation without an image."""
        width, height = size
        return cls(
            np.full((height, width, 3), GREY, np.uint8), np.ones((height, width), bool), multiple
        )

    @property
    def whole(self) -> bool:
        return bool(self.mask.all())

    @property
    def size(self) -> tuple[int, int]:
        """The requested width and height."""
        return self.picture.shape[1], self.picture.shape[0]

    @property
    def padded(self) -> tuple[int, int]:
        """The width and height that the pipeline runs at."""
        width, height = (-(-side // self.multiple) * self.multiple for side in self.size)
        return width, height

    def image(self) -> Image.Image:
        return Image.fromarray(self.extended(self.picture))

    def mask_image(self) -> Image.Image:
        """Return the padded mask; white is edited.

        The padding is edited only if the whole canvas is.
        """
        mask = self.mask.astype(np.uint8) * 255
        if self.whole:
            return Image.new("L", self.padded, 255)
        right, bottom = self._added()
        return Image.fromarray(np.pad(mask, ((0, bottom), (0, right))))

    def extended(self, pixels: Pixels) -> Pixels:
        """Pad the pixels to the pipeline's size by repeating the last row and column."""
        right, bottom = self._added()
        return np.pad(pixels, ((0, bottom), (0, right), (0, 0)), mode="edge")

    def _added(self) -> tuple[int, int]:
        return self.padded[0] - self.size[0], self.padded[1] - self.size[1]

    def finished(self, made: Image.Image | Pixels) -> Pixels:
        """Crop a pipeline's output to the requested size and restore the input outside the mask."""
        width, height = self.size
        new = resized(np.asarray(as_image(made).convert("RGB")), self.padded)[:height, :width]
        return np.where(self.mask[..., None], new, self.picture)


def as_image(made: Image.Image | Pixels) -> Image.Image:
    return made if isinstance(made, Image.Image) else Image.fromarray(made)


def resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize pixels to a width and height."""
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


def scaled_mask(mask: Mask, size: tuple[int, int]) -> Mask:
    """Resize a mask; a result pixel is masked if any masked pixel overlaps it."""
    width, height = size
    found: Mask = pooled(torch.from_numpy(mask.copy()), (height, width)).numpy()
    return found
