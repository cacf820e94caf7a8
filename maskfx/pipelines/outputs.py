"""Results of a pipeline's call: read and change their images in any output format."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image
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


NAMES = ("frames", "images", "image")  # of a result's images; most pipelines call them `images`


def is_bare(result: object) -> bool:
    """Return True for images in no tuple or object, as some pipelines return them."""
    return isinstance(result, (Tensor, np.ndarray, list, Image.Image))


def images_of(result: object) -> Any:
    """Return the images of a result: what has one of their names, else the first images in it."""
    if is_bare(result):
        return result
    fields = fields_of(result)
    return fields.get(name_of_images(fields))


def fields_of(result: object) -> dict[Any, Any]:
    """Return the parts of a result by their name, or by their place in a tuple."""
    if isinstance(result, tuple):
        return dict(enumerate(result))
    if isinstance(result, Mapping):
        return dict(result)
    named = {name: getattr(result, name) for name in NAMES if hasattr(result, name)}
    return named or dict(getattr(result, "__dict__", {}))


def name_of_images(fields: Mapping[object, object]) -> object:
    """Return the name, or the place in a tuple, of a result's images; None if it has none."""
    if 0 in fields:
        return 0
    known: list[object] = [name for name in NAMES if name in fields]
    return next(iter(known or [name for name, value in fields.items() if is_pictured(value)]), None)


def is_pictured(value: object) -> bool:
    """Return True for images in any output format."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(is_pictured, value))
    return isinstance(value, Image.Image) or getattr(value, "ndim", 0) >= 3


def with_images(result: object, change: Callable[[Pictures], object]) -> Any:
    """Return the pipeline's result with its images changed."""
    images = images_of(result)
    if images is None:
        return result
    if is_bare(result):
        return change(images)
    name = name_of_images(fields_of(result))
    if isinstance(result, tuple):
        changed = change(images), *result[1:]
        return result._make(changed) if hasattr(result, "_make") else changed
    if isinstance(result, Mapping) and not hasattr(result, str(name)):
        return type(result)({**result, name: change(images)})  # type: ignore[call-arg]
    try:
        setattr(result, str(name), change(images))
    except dataclasses.FrozenInstanceError:
        return dataclasses.replace(result, **{str(name): change(images)})  # type: ignore[type-var]
    return result


def set_template(result: Any, template: object) -> None:
    """Set a result's template, if it is an object: tuples, dictionaries and images have none."""
    if not isinstance(result, tuple) and not is_bare(result):
        with contextlib.suppress(AttributeError):  # of a dictionary, or of what is frozen
            result.template = template


def force_images(result: object) -> object:
    """Replace deferred images of a result by real tensors; no deferred tensor leaves a run."""
    images = images_of(result)
    if isinstance(images, Tensor):
        return with_images(result, force_all)
    return result
