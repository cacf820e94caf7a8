"""Masks as callers pass them, as sites of a latent, and as blends over finished images."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d, max_pool2d, pad

from maskfx.errors import InputError, MaskError

Pixels = NDArray[np.number[Any]]  # bytes, or floats in [0, 1]
Pictures = Any  # PIL's pictures, arrays or tensors of pixels, alone or in lists, in any mix
Box = tuple[int, int, int, int]  # left, top, right, bottom
SITE = 8  # pixels; how wide a site of the usual latents is


def pixel_masks(given: object, where: str = "mask_image") -> list[Tensor]:
    """Return one mask per image, or one for all: (height, width), True where it is edited."""
    if isinstance(given, (Tensor, np.ndarray)) and given.ndim == 4:
        given = list(given)
    if not isinstance(given, (list, tuple)):
        return [pixel_mask(given, where)]
    masks = [pixel_mask(one, where) for one in given]
    if not masks or any(m.shape != masks[0].shape for m in masks):
        shapes = [tuple(m.shape) for m in masks]
        raise MaskError(f"{where}: expected one or more masks of one size, got shapes {shapes}")
    return masks


def pixel_mask(given: object, where: str = "mask_image") -> Tensor:
    """Return a mask of (height, width), True where the image is edited."""
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
    bytes_ = value.dtype == torch.uint8 and bool((value > 1).any())  # else numbers of 0 and 1
    level = 128 if bytes_ else 0.5
    chosen = value if value.dtype == torch.bool else value >= level
    if chosen.dim() == 4:
        chosen = chosen.any(0)
    if chosen.dim() == 3:
        last = chosen.shape[-1] in (1, 3) and chosen.shape[0] not in (1, 3)
        chosen = chosen.any(-1 if last else 0)
    if 0 in chosen.shape:
        raise MaskError(
            f"{where}: expected a mask with pixels, got one of shape {tuple(value.shape)}"
        )
    return chosen


def in_floats(given: object) -> object:
    """Return a mask without booleans and long integers, which pipelines can't resize."""
    if isinstance(given, (list, tuple)):
        return [in_floats(one) for one in given]
    if isinstance(given, np.ndarray) and given.dtype.kind in "bui" and given.dtype != np.uint8:
        return given.astype(np.float32)
    if isinstance(given, Tensor) and not given.is_floating_point() and given.dtype != torch.uint8:
        return given.float()
    return given


def like_mask(given: Pictures, value: int) -> Pictures:
    """Return a mask of the same type and size that is all black (0) or all white (1)."""
    if isinstance(given, (list, tuple)):
        return [like_mask(one, value) for one in given]
    if isinstance(given, Image.Image):
        return Image.new("L", given.size, 255 * value)
    full = 255 if value and given.dtype in (torch.uint8, np.uint8) else value
    if isinstance(given, Tensor):
        return torch.full_like(given, full)
    return np.full_like(given, full)


def empty_mask(picture: object) -> object:
    """Return a mask for this image that masks nothing."""
    one = picture[0] if isinstance(picture, (list, tuple)) else picture
    if isinstance(one, Image.Image):
        return Image.new("L", one.size, 0)
    if isinstance(one, np.ndarray):
        return np.zeros(one.shape[-3:-1], np.float32)
    if isinstance(one, Tensor):
        return torch.zeros(1, 1, *one.shape[-2:])
    raise InputError(f"image: expected a picture, an array or a tensor, got {type(one).__name__}")


def frame_mask(mask: Tensor, box: Box | None, size: tuple[int, int]) -> Tensor:
    """Resize the mask to what the pipeline works on: the whole image, or a crop of it.

    Pipelines keep a crop's aspect ratio, center it and extend its edges into the bars beside it
    (resize_mode="fill" of diffusers' VaeImageProcessor).
    """
    if box is None:
        return pooled(mask, size)
    crop = mask[box[1] : box[3], box[0] : box[2]]
    (height, width), (own_height, own_width) = size, crop.shape
    if width * own_height < own_width * height:
        height = own_height * width // own_width
    else:
        width = own_width * height // own_height
    inner = pooled(crop, (max(height, 1), max(width, 1)))
    top, left = size[0] // 2 - inner.shape[0] // 2, size[1] // 2 - inner.shape[1] // 2
    beside = (left, size[1] - left - inner.shape[1], top, size[0] - top - inner.shape[0])
    return pad(inner[None, None].float(), beside, mode="replicate")[0, 0] > 0


def pooled(mask: Tensor, size: Sequence[int]) -> Tensor:
    """Resize the mask: a site is masked if any of its pixels is."""
    if tuple(mask.shape) == tuple(size):
        return mask
    return adaptive_max_pool2d(mask[None, None].float(), tuple(size))[0, 0] > 0


def grown(mask: Tensor, sites: int) -> Tensor:
    """Grow the mask by a margin of `sites` sites."""
    if not sites or not bool(mask.any()):
        return mask
    side = 2 * sites + 1
    higher = max_pool2d(mask[None, None].float(), (side, 1), 1, (sites, 0))
    return max_pool2d(higher, (1, side), 1, (0, sites))[0, 0] > 0


def margin_sites(margin: int, pixels: float) -> int:
    """Return the number of sites of a margin where each site is `pixels` pixels wide.

    Sites wider than those of the usual latents, such as packed ones, count as several, so that a
    margin is as wide in every pipeline.
    """
    return min(margin, ceil(margin * SITE / pixels))


def grid_of(tokens: int, height: int, width: int) -> tuple[int, int] | None:
    """Return rows and columns of `tokens` square patches of an image; None if no grid fits."""
    for patch in range(1, min(height, width) + 1):
        rows, columns = height // patch, width // patch
        if rows * columns <= tokens:
            return (rows, columns) if rows * columns == tokens else None
    return None


# Finished images.


def alpha_of(mask: Tensor, size: Sequence[int], feather: int) -> Pixels:
    """Return the new image's weights, (height, width, 1); the ramp lies inside the mask."""
    whole = pooled(mask, size)
    inside, alpha = whole, torch.zeros(whole.shape)
    for _ in range(feather):
        alpha += inside
        inside = ~grown(~inside, 1)
    alpha = (alpha + inside) / (feather + 1) if feather else whole.float()
    return alpha.numpy()[..., None]


def overlay(
    images: Pictures,
    original: object,
    masks: Sequence[Tensor],
    feather: int = 0,
    in_rows: bool = False,
) -> Pictures:
    """Replace the pixels of images outside the mask by the original's, unchanged.

    Of several originals or masks, each serves an equal number of adjacent images (a a b b); with
    `in_rows` they alternate (a b a b).
    """
    batch = isinstance(images, (Tensor, np.ndarray)) and images.ndim == 4
    if not batch and not isinstance(images, (list, tuple)):
        return images
    count = len(images)
    done = [
        overlay_one(
            image, pick(original, i, count, in_rows), pick(masks, i, count, in_rows), feather
        )
        for i, image in enumerate(images)
    ]
    if not batch:
        return type(images)(done)
    return torch.stack(done) if isinstance(images, Tensor) else np.stack(done)


def overlay_one(image: object, original: object, mask: Tensor, feather: int) -> Pictures:
    """Blend one image over its original, or a list of images that belong to one sample."""
    if isinstance(image, (list, tuple)):
        return overlay(image, original, [mask], feather)
    if isinstance(image, Image.Image):
        new = np.asarray(image)
        shaped = new.reshape(*new.shape[:2], -1)
        old = as_numbers(original, shaped.shape, shaped.dtype)
        mixed = mix(shaped, old, alpha_of(mask, shaped.shape[:2], feather))
        return Image.fromarray(mixed.reshape(new.shape), image.mode)
    if isinstance(image, Tensor) and image.dim() == 3:
        shaped = image.detach().cpu().float().movedim(0, -1).numpy()
        old = as_numbers(original, shaped.shape, shaped.dtype)
        mixed = mix(shaped, old, alpha_of(mask, shaped.shape[:2], feather))
        return torch.from_numpy(mixed).movedim(-1, 0).to(image)
    if isinstance(image, np.ndarray) and image.ndim == 3:
        old = as_numbers(original, image.shape, image.dtype)
        return mix(image, old, alpha_of(mask, image.shape[:2], feather))
    return image


def mix(new: Pixels, old: Pixels, alpha: Pixels) -> Pixels:
    """Blend two images: `old` exactly where alpha is 0, `new` exactly where it is 1."""
    blend = old + alpha * (new.astype(np.float32) - old)
    if new.dtype == np.uint8:
        blend = np.rint(blend)
    return np.where(alpha <= 0, old, np.where(alpha >= 1, new, blend)).astype(new.dtype)


def pick(values: Any, index: int, of: int, in_rows: bool = False) -> Any:
    """Return the value for image number `index` of `of` images."""
    several = isinstance(values, (list, tuple)) or (
        isinstance(values, (Tensor, np.ndarray)) and values.ndim == 4
    )
    if not several:
        return values
    return values[index % len(values) if in_rows else index * len(values) // of]


def is_picture(value: object) -> bool:
    """Return True for pixels, False for a latent."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(is_picture, value))
    if isinstance(value, Image.Image):
        return True
    if isinstance(value, np.ndarray):
        return value.ndim in (2, 3, 4) and (value.ndim == 2 or value.shape[-1] in (1, 3, 4))
    return isinstance(value, Tensor) and value.dim() in (3, 4) and value.shape[-3] in (1, 3)


def as_numbers(original: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Pixels:
    """Convert an original to (height, width, channels) of bytes, or of floats in [0, 1]."""
    height, width, channels = shape
    if not isinstance(original, Image.Image):
        array = as_array(pick(original, 0, 1))
        if array.shape[:2] == (height, width):
            if dtype == np.uint8:
                array = np.rint(array * 255).clip(0, 255)
            return np.broadcast_to(array, shape).astype(dtype)
        original = as_picture(array)
    picture = original.convert("L" if channels == 1 else "RGBA" if channels == 4 else "RGB")
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(picture).reshape(shape)
    return pixels if dtype == np.uint8 else pixels.astype(dtype) / 255


def as_array(value: object) -> Pixels:
    """Convert an image to (height, width, channels) of floats in [0, 1].

    Inputs of VAEs are in [-1, 1], and interpolation may go a little beyond. Linear light of a high
    dynamic range, which has numbers far above 1 and hardly any below 0, stays as it is.
    """
    if isinstance(value, Tensor):
        array = value.detach().cpu().float().numpy()
        array = array.reshape(array.shape[-3:]).transpose(1, 2, 0)
    else:
        array = np.asarray(value)
        array = array[..., None] if array.ndim == 2 else array
    if array.dtype == np.uint8:
        return array.astype(np.float32) / 255
    signed = array.min() < 0 and array.max() <= max(1.0, -2 * array.min())
    return array / 2 + 0.5 if signed else array


def as_picture(array: Pixels) -> Image.Image:
    pixels = np.rint(array * 255).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
