"""Results of a pipeline's call: read and change their images in any output format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from maskfx.pipelines.deferred import force_all
from maskfx.pipelines.masks.masks import Pictures


def single_pictures(images: Pictures) -> list[Pictures]:
    """Return each image of a result."""
    if images is None:
        return []
    if isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4:
        return list(images)
    return [images]


def as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def is_bare(result: object) -> bool:
    """Return True for images in no tuple or object, as some pipelines return them."""
    return isinstance(result, (Tensor, np.ndarray, list))


def images_of(result: object) -> Pictures:
    if is_bare(result):
        return result
    if isinstance(result, tuple):
        return result[0] if result else None
    return getattr(result, name_of_images(result), None)


def name_of_images(result: object) -> str:
    """Return the attribute of a result that has its images; most pipelines call it `images`."""
    if hasattr(result, "frames"):
        return "frames"
    return "image" if hasattr(result, "image") and not hasattr(result, "images") else "images"


def with_images(result: object, change: Callable[[Pictures], object]) -> Any:
    """Return the pipeline's result with its images changed."""
    images = images_of(result)
    if images is None:
        return result
    if is_bare(result):
        return change(images)
    if isinstance(result, tuple):
        return (change(images), *result[1:])
    setattr(result, name_of_images(result), change(images))
    return result


def set_template(result: Any, template: object) -> None:
    """Set a result's template, if it is an object: tuples and bare images have none."""
    if not isinstance(result, tuple) and not is_bare(result):
        result.template = template


def force_images(result: object) -> object:
    """Replace deferred images of a result by real tensors; no deferred tensor leaves a run."""
    images = images_of(result)
    if isinstance(images, Tensor):
        return with_images(result, force_all)
    return result
