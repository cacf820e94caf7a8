"""What is said of pictures: the JSON of a whole order, and of each event in a stream.

The fields are OpenAI's; ours are together under `maskfx`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from maskfx.serve.api.orders import Order
from maskfx.serve.api.running import Shown, run
from maskfx.serve.codecs import Codecs
from maskfx.serve.request import Card, Finished, Frontend

Said = dict[str, Any]


async def whole(frontend: Frontend, codecs: Codecs, order: Order) -> bytes:
    """All pictures of an order in one JSON."""
    found: dict[int, Shown] = {}
    async with aclosing(run(frontend, codecs, order)) as shown:
        async for one in shown:
            if isinstance(one.event, Finished):
                found[one.index] = one
    pictures = [found[index] for index in sorted(found)]
    said = {
        "created": int(time.time()),
        "data": [{**_file(order, one), "maskfx": facts(order, one)} for one in pictures],
        "model": order.card.name,
        **_common(order, pictures[0]),
        "usage": usage(order, pictures),
    }
    return msgspec.json.encode(said)


def preview(order: Order, shown: Shown, index: int) -> tuple[str, bytes]:
    """The name and the data of an event."""
    return _event(order, shown, "partial_image", {"partial_image_index": index})


def completed(order: Order, shown: Shown) -> tuple[str, bytes]:
    return _event(
        order, shown, "completed", {"usage": usage(order, [shown]), "maskfx": facts(order, shown)}
    )


def facts(order: Order, shown: Shown) -> Said:
    """What a picture took, and the seed that makes it again."""
    event = shown.event
    assert isinstance(event, Finished)
    seeded = {"seed": shown.request.seed} if "seed" in order.card.takes else {}
    return {
        "index": shown.index,
        **seeded,
        "seconds": event.seconds,
        "queued": event.queued,
        "steps": event.steps,
        "mask_ratio": event.mask_ratio,
        "dense_seconds": event.dense_seconds,
        "tries": event.tries,
    }


def usage(order: Order, pictures: Sequence[Shown]) -> Said:
    """Sites of the latent stand for image tokens, words for text tokens: the front has no
    tokenizer. Of results, only the sites that were computed count.
    """
    request, site = order.requests[0], order.card.site
    read = sum(_sites(image.shape, site) for image in request.images) * len(pictures)
    words = len(request.prompt.split()) * len(pictures)
    made = sum(
        round(one.event.mask_ratio * _sites(one.event.pixels.shape, site))
        for one in pictures
        if isinstance(one.event, Finished)
    )
    return {
        "input_tokens": read + words,
        "input_tokens_details": {"image_tokens": read, "text_tokens": words},
        "output_tokens": made,
        "total_tokens": read + words + made,
    }


def model(card: Card, pixels: int) -> Said:
    """An entry of /v1/models."""
    return {
        "id": card.name,
        "object": "model",
        "created": 0,  # nobody knows when a model was made
        "owned_by": "maskfx",
        "maskfx": {
            "family": card.family,
            "size": card.size,
            "multiple": card.multiple,
            "pixels": pixels,
            "steps": card.steps,
            "guidance": card.guidance,
            "takes": sorted(card.takes),
            "generates": card.generates,
            "site": card.site,
            "loras": card.loras,
        },
    }


def _event(order: Order, shown: Shown, what: str, more: Said) -> tuple[str, bytes]:
    name = f"{order.noun}.{what}"
    said = {
        "type": name,
        "b64_json": _text(shown.base64),
        "created_at": int(time.time()),
        **_common(order, shown),
        "quality": "auto",
        "index": shown.index,
        **more,
    }
    return name, msgspec.json.encode(said)


def _common(order: Order, shown: Shown) -> Said:
    return {
        "size": f"{shown.size[0]}x{shown.size[1]}",
        "output_format": order.output.format,
        "background": "opaque",
    }


def _file(order: Order, shown: Shown) -> Said:
    if order.output.url:
        head = f"data:image/{order.output.format};base64,".encode()
        return {"url": _text(head + shown.base64)}
    return {"b64_json": _text(shown.base64)}


def _text(plain: bytes) -> msgspec.Raw:
    """Base64 needs no escapes, so it is copied, not scanned."""
    return msgspec.Raw(b'"' + plain + b'"')


def _sites(shape: tuple[int, ...], site: int) -> int:
    return -(-shape[0] // site) * -(-shape[1] // site)
