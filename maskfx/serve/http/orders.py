"""Turns a form and a model's card into an order: requests, and the format of their results.

Owns sizes, seeds and deadlines. A field that the model doesn't accept is an error that lists the
accepted ones.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.config import Limits
from maskfx.serve.controls import check_controls, check_range, check_scales, nets_in
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend_protocol import Frontend
from maskfx.serve.http.cancellation import together
from maskfx.serve.http.forms import (
    AnsweredForm,
    EditForm,
    Form,
    GenerationForm,
    TemplateForm,
    takes_of,
    wrong,
)
from maskfx.serve.http.uploads import PictureReader, same
from maskfx.serve.ip_adapters import chosen
from maskfx.serve.request import (
    SEEDS,
    Card,
    Mask,
    Pictures,
    Pixels,
    Request,
    RequestKind,
    loras_in,
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
    address: str = ""  # of the client


class Orders:
    """Creates orders from forms."""

    def __init__(self, frontend: Frontend, codecs: Codecs, limits: Limits) -> None:
        self._frontend, self._codecs, self._limits = frontend, codecs, limits
        self._pictures = PictureReader(codecs, limits)

    async def edit(self, form: EditForm, caller: Requester) -> Order:
        card = await self._card(form, caller)
        if "image" not in card.takes:
            raise _cannot(card, "edit pictures")
        name = form.template_id
        kept = None if name is None else self._frontend.template_picture(name)
        if kept is None and not form.image:
            raise ApiError("missing_parameter", "image is missing.", param="image")
        size = self._size(form, card)
        pictures = await self._pictures.read(form, kept)
        check_masked(pictures, card)
        check_quality(form, pictures)
        working = self._working(pictures, card, size, kept)
        work, into = await self._fitted(pictures, size, working, card)
        if kept is not None and not same(work.images[0], kept):
            raise wrong("image", "the template's own picture, or left out")
        height, width = into[0].shape[:2]
        output = self._output(form, (width, height), into if pictures.mask is not None else None)
        requests = self._answered(form, caller, RequestKind.EDIT, template=name)
        return Order("image_edit", card, requests, work, output)

    async def generation(self, form: GenerationForm, caller: Requester) -> Order:
        card = await self._card(form, caller)
        if not card.generates:
            raise _cannot(card, "make pictures from nothing")
        size = self._size(form, card)
        work = await self._at(await self._pictures.read(form), size or card.size, card)
        requests = self._answered(form, caller, RequestKind.GENERATE, size=size)
        output = self._output(form, size, None)
        return Order("image_generation", card, requests, work, output)

    async def template(self, form: TemplateForm, caller: Requester) -> tuple[Request, Pictures]:
        card = await self._card(form, caller)
        if "template" not in card.takes:
            raise _cannot(card, "record templates of pictures")
        size = self._size(form, card)
        # a template is recorded without a mask, even if its image has transparent pixels
        pictures = replace(await self._pictures.read(form), mask=None)
        work = await self._at(pictures, self._working(pictures, card, size), card)
        if form.record_at == "idle":
            return self._ahead(form, caller), work
        name = form.id or f"t-{caller.id}"
        return self._request(form, caller, RequestKind.RECORD, template=name), work

    def _ahead(self, form: TemplateForm, caller: Requester) -> Request:
        """Return the request of a recording in idle time; without a user, it is the address's."""
        if form.id is not None:
            raise wrong("id", "left out with record_at=idle, whose recording has no name")
        request = self._request(form, caller, RequestKind.AHEAD)
        return msgspec.structs.replace(request, user=request.user or caller.address)

    async def _card(self, form: Form, caller: Requester) -> Card:
        """Return the form's model; raise ApiError if it doesn't accept all fields of the form.

        A call waits for a model that loads, until its deadline at most.
        """
        slo_ms = form.slo_ms if isinstance(form, AnsweredForm) else None
        seconds = None if slo_ms is None else left(slo_ms, caller)
        name, adapter = model_and_adapter(form.model)
        if adapter is not None and form.parameters().get("lora") is not None:
            raise wrong("lora", f"left out, as the model {form.model!r} names a LoRA")
        card = await self._frontend.card(name, seconds)
        takes = takes_of(type(form))
        for name in form.given():
            if takes[name] is not None and takes[name] not in card.takes:
                taken = (one for one, what in takes.items() if what is None or what in card.takes)
                raise _not_taken(card, name, taken)
        for lora, _ in loras_in(lora_of(form)):
            if lora not in card.loras:
                param = "lora" if adapter is None else "model"
                raise ApiError("lora_not_found", f"There is no LoRA {lora!r}.", param=param)
        nets = form.parameters().get("nets")
        modes = form.parameters().get("control_mode") or [0] * card.controls
        used = len(modes) if nets is None else len(nets_in(nets, card.nets))
        # without a choice, whether any are needed depends on the call: workers check it
        if form.control_image or nets is not None:
            check_controls(len(form.control_image), used)
        check_scales(form.parameters().get("control_scale"), used)
        check_range(*map(form.parameters().get, ("control_start", "control_end")))
        if isinstance(form, AnsweredForm):
            choice, ip_scales = map(form.parameters().get, ("ip_adapters", "ip_scale"))
            chosen(choice, ip_scales, len(form.ip_adapter_image), card.ip_adapters)
        if isinstance(form, EditForm) and len(form.image) > 1 and "images" not in card.takes:
            raise ApiError(
                "unsupported_parameter",
                f"The model {card.name!r} accepts only one image at a time.",
                param="image",
            )
        return card

    def _size(self, form: Form, card: Card) -> Size | None:
        """Return the requested size, validated for the model; None: auto."""
        size = form.size
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
            image = size_of(pictures.images[0])
            if size is None:
                return _rounded(image, card)
            if not alike(image, size, card.multiple):
                shown = "x".join(map(str, near(image, size[0], card.multiple)))
                wanted = (
                    f"of the proportions of the image, {image[0]}x{image[1]}; send {shown} or auto"
                )
                raise wrong("size", wanted)
            return size
        there = size_of(kept)
        if size not in (None, there):
            raise wrong("size", f"that of the template, {there[0]}x{there[1]}, or auto")
        return there

    async def _fitted(
        self, pictures: Pictures, size: Size | None, working: Size, card: Card
    ) -> tuple[Pictures, tuple[Pixels, Mask]]:
        """Return the images at the working size, and first image and mask at the result's size."""
        first = pictures.images[0]
        mask = np.ones(first.shape[:2], np.bool_) if pictures.mask is None else pictures.mask
        work = await self._at(pictures, working, card)
        if size is None or pictures.mask is None:
            return work, (first if size is None else work.images[0], mask)
        assert work.mask is not None
        return work, (work.images[0], work.mask)

    async def _at(self, pictures: Pictures, size: Size, card: Card) -> Pictures:
        """Return the images at a size, none of them distorted.

        Control images must have the picture's proportions. References, which are the images
        after the first, are scaled to fit inside, and their edges are repeated around them.
        """
        first, others = pictures.images[:1], pictures.images[1:]
        controls = pictures.controls
        for sent in map(size_of, controls):
            if not alike(sent, size, card.multiple):
                wanted = f"of the proportions of the picture, {size[0]}x{size[1]}"
                raise wrong("control_image", wanted, f"{sent[0]}x{sent[1]}")
        same, *inside = await together(
            self._resized(Pictures(first, pictures.mask, controls).arrays(), size),
            *(self._inside(one, size) for one in others),
        )
        planes = iter(same)
        return Pictures(
            (*(next(planes) for _ in first), *inside),
            None if pictures.mask is None else next(planes).view(np.bool_),
            tuple(planes),
            pictures.shown,
        )

    async def _resized(
        self, planes: Sequence[Pixels | Mask], size: Size
    ) -> Sequence[NDArray[np.uint8]]:
        if all(size_of(plane) == size for plane in planes):
            return [plane.view(np.uint8) for plane in planes]
        return await self._codecs.fit(planes, size)

    async def _inside(self, image: Pixels, size: Size) -> Pixels:
        """Scale an image to fit inside a size, and repeat its edges around it."""
        scale = min(size[k] / size_of(image)[k] for k in (0, 1))
        inner = tuple(min(size[k], max(1, round(size_of(image)[k] * scale))) for k in (0, 1))
        (fitted,) = await self._resized([image], (inner[0], inner[1]))
        right, bottom = size[0] - inner[0], size[1] - inner[1]
        if not (right or bottom):
            return fitted
        around = ((bottom // 2, bottom - bottom // 2), (right // 2, right - right // 2), (0, 0))
        return await asyncio.to_thread(np.pad, fitted, around, "edge")

    def _output(
        self, form: AnsweredForm, size: Size | None, into: tuple[Pixels, Mask] | None
    ) -> Output:
        longest = LONGEST.get(form.output_format)
        if longest and size and max(size) > longest:
            raise wrong("output_format", f"png for sides of more than {longest} pixels")
        if form.output_format == "png" and form.output_compression is not None:
            raise ApiError(
                "unsupported_parameter",
                "output_compression is for jpeg and webp; png has no quality.",
                param="output_compression",
            )
        if form.partial_images and not form.stream:
            raise ApiError(
                "unsupported_parameter",
                "partial_images is for streams; send stream=true too.",
                param="partial_images",
            )
        url = form.response_format == "url"
        if url and form.stream:
            raise wrong("response_format", "b64_json in a stream")
        return Output(form.output_format, form.output_compression, url, size, into)

    def _answered(
        self, form: AnsweredForm, caller: Requester, kind: RequestKind, **fields: object
    ) -> tuple[Request, ...]:
        """Return the requests of all images of a call."""
        seconds = None if form.slo_ms is None else left(form.slo_ms, caller)
        fields |= {"previews": form.partial_images, "seconds": seconds}
        first = self._request(form, caller, kind, **fields)
        if first.seed + form.n - 1 > SEEDS:
            raise wrong("seed", f"at most {SEEDS - form.n + 1} with n={form.n}")
        replace = msgspec.structs.replace
        more = (
            replace(first, id=f"{caller.id}-{k}", seed=first.seed + k) for k in range(1, form.n)
        )
        return (first, *more)

    def _request(self, form: Form, caller: Requester, kind: RequestKind, **fields: Any) -> Request:
        """Return a request with the form's parameters; `fields` are its other fields."""
        fields = {"seed": secrets.randbelow(FRESH_SEEDS)} | form.parameters() | fields
        fields["lora"] = lora_of(form)
        return Request(id=f"{caller.id}-0", kind=kind, trace=caller.trace, **fields)


def check_quality(form: EditForm, pictures: Pictures) -> None:
    """Raise ApiError if steps are chosen for an edit of a part, which the server's quality does."""
    chosen: str | None = form.parameters().get("quality")
    if chosen not in (None, "auto") and pictures.mask is not None and not pictures.mask.all():
        raise wrong("quality", "auto, or left out, in an edit with a mask", chosen or "")


def model_and_adapter(model: str | None) -> tuple[str | None, str | None]:
    """Return the two names in `MODEL:LORA`, the second one None without a LoRA."""
    name, _, adapter = (model or "").partition(":")
    return name or None, adapter or None


def lora_of(form: Form) -> str | None:
    """Return the LoRAs of a form, by its field or by the name of the model."""
    found: str | None = form.parameters().get("lora")
    return found or model_and_adapter(form.model)[1]


def left(slo_ms: float, caller: Requester) -> float:
    """Return the seconds until a deadline that is counted from arrival.

    Raises ApiError if the deadline has passed, for example because decoding took too long.
    """
    seconds = slo_ms / 1000 - (time.monotonic() - caller.arrived)
    if seconds <= 0:
        raise ApiError("deadline_exceeded", "Reading the request took longer than slo_ms.")
    return seconds


def check_masked(pictures: Pictures, card: Card) -> None:
    """Raise ApiError if an image's alpha is a mask but the model accepts none."""
    if pictures.mask is not None and "mask" not in card.takes:
        raise ApiError(
            "unsupported_parameter",
            f"The model {card.name!r} accepts no mask, and transparent pixels of an image are one; "
            "send the image without alpha.",
            param="image",
        )


def size_of(plane: Pixels | Mask) -> Size:
    """Return the width and height of an image or a mask."""
    return plane.shape[1], plane.shape[0]


def _rounded(image: Size, card: Card) -> Size:
    """Return the image's size, rounded down to the model's multiple."""
    width, height = (max(card.multiple, side // card.multiple * card.multiple) for side in image)
    return width, height


def alike(image: Size, size: Size, multiple: int) -> bool:
    """Return True if an image has the proportions of a size whose sides are rounded to a multiple.

    One side may differ by less than the multiple from what the other one determines.
    """
    return abs(size[0] * image[1] - image[0] * size[1]) < multiple * max(image)


def near(image: Size, width: int, multiple: int) -> Size:
    """Return a size of an image's proportions and about this width."""
    return width, max(multiple, round(width * image[1] / image[0] / multiple) * multiple)


def _cannot(card: Card, what: str) -> ApiError:
    return ApiError(
        "unsupported_parameter", f"The model {card.name!r} can't {what}.", param="model"
    )


def _not_taken(card: Card, name: str, taken: Iterable[str]) -> ApiError:
    return ApiError(
        "unsupported_parameter",
        f"The model {card.name!r} accepts no {name}; it accepts {', '.join(taken)}.",
        param=name,
    )
