"""An order as server-sent events.

Until the first event, or a moment, a failure still is a status; later it is an `error` event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from maskfx.serve.api.answers import completed, preview
from maskfx.serve.api.failures import internal
from maskfx.serve.api.leaving import unless_gone
from maskfx.serve.api.orders import Order
from maskfx.serve.api.running import run
from maskfx.serve.codecs import Codecs
from maskfx.serve.errors import ApiError
from maskfx.serve.request import Frontend, Preview

GRACE = 1.0  # seconds in which a failure can be a status
AWAKE = 15.0  # seconds of silence after which proxies might close

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


async def events(frontend: Frontend, codecs: Codecs, order: Order) -> AsyncGenerator[bytes]:
    """Previews, numbered per picture, and results, each an event."""
    async with aclosing(run(frontend, codecs, order)) as pictures:
        async for shown in pictures:
            if isinstance(shown.event, Preview):
                yield written(*preview(order, shown, shown.event.index))
            else:
                yield written(*completed(order, shown))


def written(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream(Response):
    """Sends events as they come; stops them when the client leaves."""

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
                        chunk.result()  # a failure, while it still can be a status
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
