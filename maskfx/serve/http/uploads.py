"""Decodes the files of a form: images, mask, control images and those for IP-Adapters.

Owns the meaning of a mask: transparent = edit unless `mask_mode` is luminance; no mask is guessed.
"""

from __future__ import annotations

import asyncio
import binascii
import re
from collections.abc import Sequence

import numpy as np

from maskfx.serve.codecs.pool import Codecs, Decoded
from maskfx.serve.config import Limits
from maskfx.serve.errors import ApiError
from maskfx.serve.http.cancellation import together
from maskfx.serve.http.forms import AnsweredForm, EditForm, Form, TemplateForm, wrong
from maskfx.serve.request import Mask, Pictures, Pixels

URL = re.compile(rb"\s*([a-zA-Z][a-zA-Z0-9+.-]{0,31}):")
DATA = re.compile(rb"data:[a-zA-Z0-9.+/-]{0,64}(;[a-zA-Z0-9=._-]{0,64}){0,4};base64,")
# characters decoded per call, so that other threads can run in between; a multiple of four
SLICE = 4 << 18
NARROW = 32  # sides of a picture for IP-Adapters, one by the other, at most


class PictureReader:
    """Decodes the files of a form concurrently."""

    def __init__(self, codecs: Codecs, limits: Limits) -> None:
        self._codecs, self._limits = codecs, limits

    async def read(self, form: Form, kept: Pixels | None = None) -> Pictures:
        """Decode all pictures of a form.

        Args:
            form: The form.
            kept: A template's image, used if the form has none.
        """
        files, masks = files_of(form), None
        if isinstance(form, EditForm):
            check_mask_fields(form)
            masks = form
        shown = form.ip_adapter_image if isinstance(form, AnsweredForm) else []
        given, mask, controls, references = await together(
            self._images(files, "image"),
            self._mask(masks),
            self._images(form.control_image, "control_image"),
            self._images(shown, "ip_adapter_image"),
        )
        for one in references:
            check_shown(one.pixels)
        images = tuple(one.pixels for one in given)
        if not given and kept is not None:
            images = (kept,)
        if images and mask is None and given:
            mask = given[0].clear
        if images and mask is not None:
            check_mask(mask, images[0], masks)
        pixels = (tuple(one.pixels for one in several) for several in (controls, references))
        return Pictures(images, mask, *pixels)

    async def _images(self, files: Sequence[bytes], param: str) -> list[Decoded]:
        return list(await together(*(self._image(file, param) for file in files)))

    async def _image(self, file: bytes, param: str) -> Decoded:
        data = await file_of(file, param, self._limits.body_bytes)
        return await self._codecs.decode(data, param, self._limits.image_pixels)

    async def _mask(self, form: EditForm | None) -> Mask | None:
        if form is None:
            return None
        param, file = "mask", form.mask
        if form.mask_image is not None:
            param, file = "mask_image", form.mask_image
        if file is None:
            return None
        luminance = is_luminance(form)
        data = await file_of(file, param, self._limits.mask_bytes)
        found = await self._codecs.decode_mask(
            data, param, self._limits.image_pixels, luminance=luminance
        )
        if not (found.alpha or luminance):
            raise ApiError(
                "mask_missing_alpha",
                "The mask has no alpha channel, whose transparent pixels are edited; send one, or "
                "mask_mode=luminance with white where to edit.",
                param=param,
            )
        return found.edit


def is_luminance(form: EditForm) -> bool:
    """Return True if white is what the form's mask edits."""
    return form.mask_image is not None or form.mask_mode == "luminance"


def files_of(form: Form) -> Sequence[bytes]:
    """Return the image files of a form."""
    if isinstance(form, TemplateForm):
        return [form.image]
    return form.image if isinstance(form, EditForm) else []


def check_mask_fields(form: EditForm) -> None:
    if form.mask is not None and form.mask_image is not None:
        raise wrong("mask_image", "left out where mask is given")
    if form.mask_image is not None and form.mask_mode == "alpha":
        raise wrong("mask_mode", "luminance with mask_image, where white = edit")
    if form.mask_mode == "luminance" and form.mask is None and form.mask_image is None:
        raise wrong("mask_mode", "left out where no mask is given")


def check_mask(mask: Mask, image: Pixels, form: EditForm | None) -> None:
    param = "mask" if form is None or form.mask_image is None else "mask_image"
    white = form is not None and is_luminance(form)
    if mask.shape != image.shape[:2]:
        raise ApiError(
            "mask_size_mismatch",
            f"The mask has {mask.shape[1]}x{mask.shape[0]} pixels, the image "
            f"{image.shape[1]}x{image.shape[0]}, both after rotation by EXIF; send a mask of the "
            "image's size.",
            param=param,
        )
    if not mask.any():
        todo = f"make some of it {'white' if white else 'transparent'}"
        raise ApiError("mask_empty", f"The mask leaves nothing to edit; {todo}.", param=param)


def check_shown(picture: Pixels) -> None:
    """Raise ApiError for a picture that is too narrow to be shown to an IP-Adapter.

    Image encoders scale the shorter side to theirs, before they cut the longer one.
    """
    height, width = picture.shape[:2]
    if max(height, width) > NARROW * min(height, width):
        wanted = f"at most {NARROW} times as long as wide"
        raise wrong("ip_adapter_image", wanted, f"{width}x{height}")


async def file_of(value: bytes, param: str, most: int) -> bytes:
    """Return the file of a field, decoded if it is a `data:` URL; other URLs raise ApiError.

    Args:
        value: The file or URL.
        param: The field's name, which errors contain.
        most: Maximum bytes of the file.
    """
    head = value[:512]
    url = URL.match(head)
    if url is None:
        return within(value, param, most)
    if url[1].lower() != b"data":
        raise ApiError(
            "url_input_disabled", f"{param}: URLs are not fetched; send the file.", param=param
        )
    start = DATA.match(head)
    if start is None:
        raise ApiError(
            "invalid_image_file", f"{param}: a data: URL must be in base64.", param=param
        )
    try:
        return within(await asyncio.to_thread(from_base64, value, start.end()), param, most)
    except binascii.Error:
        raise ApiError(
            "invalid_image_file", f"{param}: the base64 of its data: URL is damaged.", param=param
        ) from None


def from_base64(value: bytes, start: int) -> bytes:
    view, found = memoryview(value), bytearray()
    for at in range(start, len(value), SLICE):
        found += binascii.a2b_base64(view[at : at + SLICE], strict_mode=True)
    return bytes(found)


def within(file: bytes, param: str, most: int) -> bytes:
    if len(file) > most:
        raise ApiError(
            "payload_too_large", f"{param} is larger than the {most} bytes taken.", param=param
        )
    return file


def same(one: Pixels, other: Pixels) -> bool:
    return one.shape == other.shape and bool(np.array_equal(one, other))
