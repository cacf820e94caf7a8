"""Masks as people give them, as sites of a latent, and over finished pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, max_pool2d

from maskfx.errors import MaskError

Box = tuple[int, int, int, int]  # left, top, right, bottom


def pixel_mask(given: Any, where: str = "mask_image") -> Tensor:
    """(height, width), True where the picture is to be edited; of several masks all they cover."""
    if isinstance(given, (list, tuple)):
        masks = [pixel_mask(one, where) for one in given]
        if not masks or any(m.shape != masks[0].shape for m in masks):
            shapes = [tuple(m.shape) for m in masks]
            raise MaskError(f"{where}: a list of masks of shapes {shapes}; give them one size")
        return torch.stack(masks).any(0)
    if isinstance(given, Image.Image):
        return torch.from_numpy(np.asarray(given.convert("L")).copy()) >= 128
    value = torch.from_numpy(given.copy()) if isinstance(given, np.ndarray) else given
    if not isinstance(value, Tensor) or value.dim() not in (2, 3, 4):
        seen = tuple(value.shape) if isinstance(value, Tensor) else type(given).__name__
        raise MaskError(
            f"{where}: expected a picture, an array or a tensor of (height, width), got {seen}; "
            "white, 1 or True is what is edited"
        )
    value = value.detach().cpu()
    level = 128 if value.dtype == torch.uint8 else 0.5
    chosen = value if value.dtype == torch.bool else value >= level
    if chosen.dim() == 3 and chosen.shape[-1] in (1, 3) and chosen.shape[0] not in (1, 3):
        chosen = chosen.movedim(-1, 0)
    if chosen.dim() == 4 and chosen.shape[-1] in (1, 3) and chosen.shape[1] not in (1, 3):
        chosen = chosen.movedim(-1, 1)
    return chosen.flatten(0, -3).any(0) if chosen.dim() > 2 else chosen


def nothing_masked(picture: Any) -> Any:
    """A mask for this picture that masks nothing."""
    one = picture[0] if isinstance(picture, (list, tuple)) else picture
    if isinstance(one, Image.Image):
        return Image.new("L", one.size, 0)
    if isinstance(one, np.ndarray):
        return np.zeros(one.shape[-3:-1], np.float32)
    if isinstance(one, Tensor):
        return torch.zeros(1, 1, *one.shape[-2:])
    raise MaskError(f"image: expected a picture, an array or a tensor, got {type(one).__name__}")


def cropped(mask: Tensor, box: Box | None) -> Tensor:
    return mask if box is None else mask[box[1] : box[3], box[0] : box[2]]


def pooled(mask: Tensor, size: Sequence[int]) -> Tensor:
    """The mask at another size: a site is masked if any pixel of it is."""
    if tuple(mask.shape) == tuple(size):
        return mask
    return adaptive_max_pool2d(mask[None, None].float(), tuple(size))[0, 0] > 0


def grown(mask: Tensor, sites: int) -> Tensor:
    """The mask with a margin of so many sites."""
    if not sites or not bool(mask.any()):
        return mask
    return max_pool2d(mask[None, None].float(), 2 * sites + 1, 1, sites)[0, 0] > 0


def grid_of(tokens: int, height: int, width: int) -> tuple[int, int] | None:
    """Rows and columns of so many tokens of a picture of this shape."""
    rows = round((tokens * height / width) ** 0.5)
    for candidate in (rows, rows - 1, rows + 1):
        if candidate > 0 and tokens % candidate == 0:
            return candidate, tokens // candidate
    return None


# Finished pictures.


def alpha_of(mask: Tensor, size: Sequence[int], feather: int) -> np.ndarray[Any, Any]:
    """(height, width, 1): how much of a picture is new; the ramp lies inside the mask."""
    whole = pooled(mask, size)
    inside, alpha = whole, torch.zeros(whole.shape)
    for _ in range(feather):
        alpha += inside
        inside = ~grown(~inside, 1)
    alpha = (alpha + inside) / (feather + 1) if feather else whole.float()
    return alpha.numpy()[..., None]


def laid_over(images: Any, original: Any, mask: Tensor, feather: int = 0) -> Any:
    """Pictures whose pixels outside the mask are the original's own, as they were given."""
    if isinstance(images, list):
        return [
            laid_over(i, picked(original, n, len(images)), mask, feather)
            for n, i in enumerate(images)
        ]
    if isinstance(images, Image.Image):
        new = np.asarray(images)
        old = as_pixels(original, new.shape[:2], new.shape[2] if new.ndim == 3 else 1)
        mixed = mix(new.reshape(old.shape), old, alpha_of(mask, new.shape[:2], feather))
        return Image.fromarray(mixed.reshape(new.shape), images.mode)
    if isinstance(images, Tensor) and images.dim() == 4:
        flat = images.detach().cpu().float().movedim(1, -1).numpy()
        out = over_arrays(flat, original, mask, feather)
        return torch.from_numpy(out).movedim(-1, 1).to(images)
    if isinstance(images, np.ndarray) and images.ndim == 4:
        return over_arrays(images, original, mask, feather)
    return images  # latents


def over_arrays(
    images: np.ndarray[Any, Any], original: Any, mask: Tensor, feather: int
) -> np.ndarray[Any, Any]:
    alpha = alpha_of(mask, images.shape[1:3], feather)
    out = np.empty_like(images)
    for n, image in enumerate(images):
        old = as_pixels(picked(original, n, len(images)), image.shape[:2], image.shape[2])
        out[n] = mix(image, (old / 255).astype(image.dtype), alpha)
    return out


def mix(
    new: np.ndarray[Any, Any], old: np.ndarray[Any, Any], alpha: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """`old` exactly where alpha is 0, `new` exactly where it is 1."""
    blend = old + alpha * (new.astype(np.float32) - old)
    if new.dtype == np.uint8:
        blend = np.rint(blend)
    return np.where(alpha <= 0, old, np.where(alpha >= 1, new, blend)).astype(new.dtype)


def picked(original: Any, index: int, of: int) -> Any:
    """The original of one of so many pictures: each original has as many, side by side."""
    several = isinstance(original, (list, tuple)) or (
        isinstance(original, (Tensor, np.ndarray)) and original.ndim == 4
    )
    return original[index * len(original) // of] if several else original


def as_pixels(original: Any, size: tuple[int, ...], channels: int) -> np.ndarray[Any, Any]:
    """(height, width, channels) of bytes; floats in [0, 1] are rounded only if they must be."""
    if isinstance(original, Image.Image):
        picture = original.convert("L" if channels == 1 else "RGBA" if channels == 4 else "RGB")
        if picture.size != (size[1], size[0]):
            picture = picture.resize((size[1], size[0]), Image.Resampling.LANCZOS)
        return np.asarray(picture).reshape(*size, channels)
    value = picked(original, 0, 1)
    if isinstance(value, Tensor):
        array = value.detach().cpu().float().numpy()
    else:
        array = np.asarray(value, dtype=np.float32)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[-1] not in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.min() < 0:  # as VAEs want them
        array = array / 2 + 0.5
    array = array * 255 if array.max() <= 1 else array
    if array.shape[:2] != tuple(size):
        bytes_ = np.rint(array).clip(0, 255).astype(np.uint8)
        return as_pixels(Image.fromarray(bytes_.squeeze()), size, channels)
    return np.broadcast_to(array, (*size, channels))
