"""Turns a form and a model's card into an order: requests, and the format of their results.

Owns sizes, seeds and deadlines. A field that the model doesn't accept is an error that lists the
accepted ones.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.config import Limits
from maskfx.serve.errors import ApiError
from maskfx.serve.http.body import FormData
from maskfx.serve.http.schemas import Field, wrong
from maskfx.serve.http.uploads import PictureReader, same
from maskfx.serve.request import (
    SEEDS,
    Card,
    Frontend,
    Mask,
    Pictures,
    Pixels,
    Request,
    RequestKind,
    parameters_of,
)

FRESH_SEEDS = 2**31
LONGEST = {"webp": 16_383, "jpeg": 65_500}  # maximum side in pixels by format
Size = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Output:
    """How a result is written as a file."""

    format: str
    quality: int | None
    url: bool  # as a data: URL
    size: Size | None  # None: the size of the result
    into: tuple[Pixels, Mask] | None = None  # original and mask to paste into, of that size


@dataclass(frozen=True, eq=False)
class Order:
    """The requests of one call, each for one image, and their output format."""

    noun: str  # image_edit or image_generation
    card: Card
    requests: tuple[Request, ...]
    pictures: Pictures  # of each request
    output: Output


@dataclass(frozen=True)
class Requester:
    """The HTTP call that an order belongs to."""

    id: str
    arrived: float
    trace: dict[str, str] | None = None  # W3C trace headers, if tracing is enabled


class Orders:
    """Creates orders from forms."""

    def __init__(self, frontend: Frontend, codecs: Codecs, limits: Limits) -> None:
        self._frontend, self._codecs, self._limits = frontend, codecs, limits
        self._pictures = PictureReader(codecs, limits)

    async def edit(self, form: FormData, caller: Requester, table: Sequence[Field]) -> Order:
        card = self._card(form, table)
        if "image" not in card.takes:
            raise _cannot(card, "edit pictures")
        kept = self._kept(form)
        if kept is None and "image" not in form:
            raise ApiError("missing_parameter", "image is missing.", param="image")
        size = self._size(form, card)
        pictures = await self._pictures.read(form, kept)
        check_masked(pictures, card)
        work, into = await self._fitted(pictures, size, self._working(pictures, card, size, kept))
        if kept is not None and not same(work.images[0], kept):
            raise wrong("image", "the template's own picture, or left out")
        height, width = into[0].shape[:2]
        output = self._output(form, (width, height), into if pictures.mask is not None else None)
        requests = self._requests(form, caller, RequestKind.EDIT)
        return Order("image_edit", card, requests, work, output)

    async def generation(self, form: FormData, caller: Requester, table: Sequence[Field]) -> Order:
        card = self._card(form, table)
        if not card.generates:
            raise _cannot(card, "make pictures from nothing")
        size = self._size(form, card)
        pictures = await self._pictures.read(form)
        requests = self._requests(form, caller, RequestKind.GENERATE, size)
        output = self._output(form, size, None)
        return Order("image_generation", card, requests, pictures, output)

    async def template(
        self, form: FormData, caller: Requester, table: Sequence[Field]
    ) -> tuple[Request, Pictures]:
        card = self._card(form, table)
        if "image" not in card.takes:
            raise _cannot(card, "edit pictures")
        size = self._size(form, card)
        # a template is recorded without a mask, even if its image has transparent pixels
        pictures = replace(await self._pictures.read(form), mask=None)
        work = await self._at(pictures, self._working(pictures, card, size))
        return self._requests(form, caller, RequestKind.RECORD)[0], work

    def _card(self, form: FormData, table: Sequence[Field]) -> Card:
        """Return the form's model; raise ApiError if it doesn't accept all fields of the form."""
        cards = self._frontend.cards()
        if not cards:
            raise ApiError("no_workers", "No model is loaded yet.")
        name = form.get("model")
        card = cards[0] if name is None else _named(cards, name)
        for field in table:
            if field.name in form and field.takes is not None and field.takes not in card.takes:
                taken = (one.name for one in table if one.takes is None or one.takes in card.takes)
                raise _not_taken(card, field.name, taken)
        lora = form.get("lora")
        if lora is not None and lora not in card.loras:
            raise ApiError("lora_not_found", f"There is no LoRA {lora!r}.", param="lora")
        if len(form.get("image", ())) > 1 and isinstance(form.get("image"), list):
            self._check_several(card)
        return card

    def _check_several(self, card: Card) -> None:
        if "images" not in card.takes:
            raise ApiError(
                "unsupported_parameter",
                f"The model {card.name!r} takes one image at a time.",
                param="image",
            )

    def _kept(self, form: FormData) -> Pixels | None:
        name = form.get("template_id")
        return None if name is None else self._frontend.template_picture(name)

    def _size(self, form: FormData, card: Card) -> Size | None:
        """Return the requested size, validated for the model; None: auto."""
        size: Size | None = form.get("size")
        if size is None:
            return None
        if size[0] % card.multiple or size[1] % card.multiple:
            raise wrong("size", f"multiples of {card.multiple} pixels for {card.name!r}")
        if size[0] * size[1] > self._limits.image_pixels:
            raise wrong("size", f"at most {self._limits.image_pixels} pixels")
        return size

    def _working(
        self, pictures: Pictures, card: Card, size: Size | None, kept: Pixels | None = None
    ) -> Size:
        """Return the size at which the model runs: the requested, the template's or the image's."""
        if kept is None:
            return size or _rounded(pictures.images[0], card)
        there = (kept.shape[1], kept.shape[0])
        if size not in (None, there):
            raise wrong("size", f"that of the template, {there[0]}x{there[1]}, or auto")
        return there

    async def _fitted(
        self, pictures: Pictures, size: Size | None, working: Size
    ) -> tuple[Pictures, tuple[Pixels, Mask]]:
        """Return the images at the working size, and first image and mask at the result's size."""
        first = pictures.images[0]
        mask = np.ones(first.shape[:2], np.bool_) if pictures.mask is None else pictures.mask
        work = await self._at(pictures, working)
        if size is None or pictures.mask is None:
            return work, (first if size is None else work.images[0], mask)
        assert work.mask is not None
        return work, (work.images[0], work.mask)

    async def _at(self, pictures: Pictures, size: Size) -> Pictures:
        planes = pictures.arrays()
        if all((plane.shape[1], plane.shape[0]) == size for plane in planes):
            return pictures
        fitted = iter(await self._codecs.fit(planes, size))
        images = tuple(next(fitted) for _ in pictures.images)
        mask = None if pictures.mask is None else next(fitted).view(np.bool_)
        control = None if pictures.control is None else next(fitted)
        return Pictures(images, mask, control)

    def _output(
        self, form: FormData, size: Size | None, into: tuple[Pixels, Mask] | None
    ) -> Output:
        form_of_file = form.get("output_format", "png")
        longest = LONGEST.get(form_of_file)
        if longest and size and max(size) > longest:
            raise wrong("output_format", f"png for sides of more than {longest} pixels")
        if form_of_file == "png" and "output_compression" in form:
            raise ApiError(
                "unsupported_parameter",
                "output_compression is for jpeg and webp; png has no quality.",
                param="output_compression",
            )
        if form.get("partial_images") and not form.get("stream"):
            raise ApiError(
                "unsupported_parameter",
                "partial_images is for streams; send stream=true too.",
                param="partial_images",
            )
        url = form.get("response_format") == "url"
        if url and form.get("stream"):
            raise wrong("response_format", "b64_json in a stream")
        return Output(form_of_file, form.get("output_compression"), url, size, into)

    def _requests(
        self,
        form: FormData,
        caller: Requester,
        kind: RequestKind,
        size: Size | None = None,
    ) -> tuple[Request, ...]:
        count = form.get("n", 1)
        sent = {field: form.get(one.name) for field, one in parameters_of().items()}
        given = {field: value for field, value in sent.items() if value is not None}
        seed = given.pop("seed", None)
        seed = secrets.randbelow(FRESH_SEEDS) if seed is None else seed
        if seed + count - 1 > SEEDS:
            raise wrong("seed", f"at most {SEEDS - count + 1} with n={count}")
        template = form.get("id" if kind is RequestKind.RECORD else "template_id")
        if kind is RequestKind.RECORD and template is None:
            template = f"t-{caller.id}"
        first = Request(
            id=f"{caller.id}-0",
            kind=kind,
            seed=seed,
            size=size,
            template=template,
            previews=form.get("partial_images", 0),
            seconds=left(form, caller),
            trace=caller.trace,
            **given,
        )
        return (
            first,
            *(
                msgspec.structs.replace(first, id=f"{caller.id}-{k}", seed=seed + k)
                for k in range(1, count)
            ),
        )


def left(form: FormData, caller: Requester) -> float | None:
    """Return the seconds until the deadline of `slo_ms`, counted from arrival; None without one.

    Raises ApiError if the deadline has passed, for example because decoding took too long.
    """
    slo = form.get("slo_ms")
    if slo is None:
        return None
    seconds = float(slo) / 1000 - (time.monotonic() - caller.arrived)
    if seconds <= 0:
        raise ApiError("deadline_exceeded", "Reading the request took longer than slo_ms.")
    return seconds


def check_masked(pictures: Pictures, card: Card) -> None:
    """Raise ApiError if an image's alpha is a mask but the model accepts none."""
    if pictures.mask is not None and "mask" not in card.takes:
        raise ApiError(
            "unsupported_parameter",
            f"The model {card.name!r} takes no mask, which transparent pixels of an image are; "
            "send the image without alpha.",
            param="image",
        )


def _rounded(image: Pixels, card: Card) -> Size:
    """Return the image's size, rounded down to the model's multiple."""
    height, width = (
        max(card.multiple, side // card.multiple * card.multiple) for side in image.shape[:2]
    )
    return width, height


def _named(cards: Iterable[Card], name: str) -> Card:
    for card in cards:
        if card.name == name:
            return card
    raise ApiError("model_not_found", f"There is no model {name!r}.", param="model")


def _cannot(card: Card, what: str) -> ApiError:
    return ApiError(
        "unsupported_parameter", f"The model {card.name!r} can't {what}.", param="model"
    )


def _not_taken(card: Card, name: str, taken: Iterable[str]) -> ApiError:
    return ApiError(
        "unsupported_parameter",
        f"The model {card.name!r} does not take {name}; it takes {', '.join(taken)}.",
        param=name,
    )
