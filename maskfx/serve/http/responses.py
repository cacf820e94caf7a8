"""Responses to an order: one JSON body, or a stream of server-sent events.

The fields are those of OpenAI's API; additional ones are under `maskfx`. A failure before the first
event, within `GRACE` seconds, is an HTTP status; later it is an `error` event. Large bodies are
sent in pieces with backpressure: a slow client holds its admission slot, not a copy of the body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend_protocol import Frontend
from maskfx.serve.http.cancellation import unless_gone
from maskfx.serve.http.execution import EncodedPicture, run
from maskfx.serve.http.failures import internal
from maskfx.serve.http.orders import Order
from maskfx.serve.request import Card, Finished, Preview, ServedModel

PIECE = 256 << 10  # bytes


class InPieces(Response):
    """Sends the body in pieces of `PIECE` bytes, each after the previous one was accepted."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        whole = memoryview(self.body)
        for at in range(0, len(whole), PIECE):
            body, more = bytes(whole[at : at + PIECE]), at + PIECE < len(whole)
            await send({"type": "http.response.body", "body": body, "more_body": more})


Said = dict[str, object]


async def whole(frontend: Frontend, codecs: Codecs, order: Order) -> bytes:
    """Run an order and return all results as one JSON body."""
    found: dict[int, EncodedPicture] = {}
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


def preview(order: Order, shown: EncodedPicture, index: int) -> tuple[str, bytes]:
    """Return the name and the data of a preview's event."""
    return _event(order, shown, "partial_image", {"partial_image_index": index})


def completed(order: Order, shown: EncodedPicture) -> tuple[str, bytes]:
    return _event(
        order, shown, "completed", {"usage": usage(order, [shown]), "maskfx": facts(order, shown)}
    )


def facts(order: Order, shown: EncodedPicture) -> Said:
    """Return the statistics of a result, and its seed if the model accepts seeds."""
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
        **({} if event.patch_share is None else {"patch_share": event.patch_share}),
        "dense_seconds": event.dense_seconds,
        "tries": event.tries,
    }


def usage(order: Order, pictures: Sequence[EncodedPicture]) -> Said:
    """Return the token counts of an order in OpenAI's format.

    Latent sites count as image tokens, words as text tokens, as the front end has no tokenizer. Of
    results, only computed sites count.
    """
    request, site = order.requests[0], order.card.site
    read = sum(_sites(image.shape, site) for image in order.pictures.images) * len(pictures)
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


def model(served: ServedModel, pixels: int, lora: str = "") -> Said:
    """Return an entry of /v1/models; without a card, only the name and the state are known.

    A model with a LoRA is an entry too, as in servers of language models.
    """
    card = served.card
    return {
        "id": f"{served.name}:{lora}" if lora else served.name,
        "object": "model",
        "created": 0,  # the creation date of a model is unknown
        "owned_by": "maskfx",
        **({"parent": served.name} if lora else {}),
        "maskfx": {
            "state": served.state.value,
            **({} if card is None or lora else properties(card, pixels)),
        },
    }


def properties(card: Card, pixels: int) -> Said:
    return {
        "family": card.family,
        "size": card.size,
        "multiple": card.multiple,
        "pixels": pixels,
        "steps": card.steps,
        "guidance": card.guidance,
        "takes": sorted(card.takes),
        "generates": card.generates,
        "site": card.site,
        "controls": card.controls if "control" in card.takes else 0,
        "controlnets": card.nets,
        "ip_adapters": card.ip_adapters,
        "loras": card.loras,
    }


def _event(order: Order, shown: EncodedPicture, what: str, more: Said) -> tuple[str, bytes]:
    name = f"{order.noun}.{what}"
    said = {
        "type": name,
        "b64_json": _text(shown.base64),
        "created_at": int(time.time()),
        **_common(order, shown),
        "quality": order.requests[0].quality or "auto",
        "index": shown.index,
        **more,
    }
    return name, msgspec.json.encode(said)


def _common(order: Order, shown: EncodedPicture) -> Said:
    return {
        "size": f"{shown.size[0]}x{shown.size[1]}",
        "output_format": order.output.format,
        "background": "opaque",
    }


def _file(order: Order, shown: EncodedPicture) -> Said:
    if order.output.url:
        head = f"data:image/{order.output.format};base64,".encode()
        return {"url": _text(head + shown.base64)}
    return {"b64_json": _text(shown.base64)}


def _text(plain: bytes) -> msgspec.Raw:
    """Quote base64 as a JSON string; it needs no escaping, so it is copied without a scan."""
    return msgspec.Raw(b'"' + plain + b'"')


def _sites(shape: tuple[int, ...], site: int) -> int:
    return -(-shape[0] // site) * -(-shape[1] // site)


GRACE = 1.0  # seconds to wait for a first event, so that a failure can be an HTTP status
AWAKE = 15.0  # seconds without events before a comment is sent, which keeps proxies connected

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


async def events(frontend: Frontend, codecs: Codecs, order: Order) -> AsyncGenerator[bytes]:
    """Run an order and yield previews, numbered per request, and results as events."""
    async with aclosing(run(frontend, codecs, order)) as pictures:
        async for shown in pictures:
            if isinstance(shown.event, Preview):
                yield written(*preview(order, shown, shown.event.index))
            else:
                yield written(*completed(order, shown))


def written(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream(Response):
    """Sends events as they are produced; cancels the order if the client disconnects."""

    def __init__(self, chunks: AsyncGenerator[bytes], call_id: str) -> None:
        self._chunks, self._call_id = chunks, call_id
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        started = False
        chunk: asyncio.Future[bytes | None] = asyncio.ensure_future(self._next())
        try:
            while True:
                await asyncio.wait({chunk}, timeout=AWAKE if started else GRACE)
                if not started:
                    if chunk.done():
                        chunk.result()  # raises a failure while it can still be an HTTP status
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                    started = True
                    continue
                data = self._read(chunk) if chunk.done() else b": waiting\n\n"
                if data is None:
                    break
                await send({"type": "http.response.body", "body": data, "more_body": True})
                if chunk.done():
                    if chunk.exception() is not None:
                        break
                    chunk = asyncio.ensure_future(self._next())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            chunk.cancel()
            await asyncio.gather(chunk, return_exceptions=True)
            await self._chunks.aclose()

    async def _next(self) -> bytes | None:
        return await anext(self._chunks, None)

    def _read(self, chunk: asyncio.Future[bytes | None]) -> bytes | None:
        try:
            return chunk.result()
        except ApiError as error:
            return written("error", msgspec.json.encode(error.body()))
        except Exception as error:
            return written("error", msgspec.json.encode(internal(error, self._call_id).body()))
