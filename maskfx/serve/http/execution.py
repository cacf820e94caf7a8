"""Runs the requests of an order concurrently and encodes each image when it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend_protocol import Frontend
from maskfx.serve.http.orders import Order, Size
from maskfx.serve.request import Finished, Preview, Request

AHEAD = 2  # encoded images per request that are buffered for a slow client


@dataclass(frozen=True, eq=False)
class EncodedPicture:
    """An encoded preview or result of an order."""

    request: Request
    index: int  # of the request in its order
    event: Preview | Finished
    base64: bytes
    size: Size


Told = EncodedPicture | Exception | None  # None: a request is finished


async def run(frontend: Frontend, codecs: Codecs, order: Order) -> AsyncGenerator[EncodedPicture]:
    """Yield previews and results as they are encoded.

    The first failure cancels all requests of the order; so does closing the generator.
    """
    line: asyncio.Queue[Told] = asyncio.Queue(AHEAD * len(order.requests))
    tasks = [
        asyncio.create_task(_follow(frontend, codecs, order, index, line))
        for index in range(len(order.requests))
    ]
    try:
        through = 0
        while through < len(tasks):
            told = await line.get()
            if isinstance(told, Exception):
                raise told
            if told is None:
                through += 1
            else:
                yield told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(
    frontend: Frontend, codecs: Codecs, order: Order, index: int, line: asyncio.Queue[Told]
) -> None:
    """Run one request and put its encoded images, then None or an exception, into the queue."""
    request, finished = order.requests[index], False
    try:
        async with aclosing(_generator(frontend.serve(request, order.pictures))) as events:
            async for event in events:
                finished = finished or isinstance(event, Finished)
                base64, size = await _encode(codecs, order, event)
                await line.put(EncodedPicture(request, index, event, base64, size))
        if not finished:
            raise ApiError("generation_failed", "The request ended without a picture.")
        await line.put(None)
    except Exception as error:
        await line.put(error)


async def _generator(
    events: AsyncIterator[Preview | Finished],
) -> AsyncGenerator[Preview | Finished]:
    """Wrap the frontend's iterator, which may lack `aclose`, in a generator that closes it."""
    try:
        async for event in events:
            yield event
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def _encode(codecs: Codecs, order: Order, event: Preview | Finished) -> tuple[bytes, Size]:
    """Encode an image; a preview, which may be smaller, is enlarged to the size of its result."""
    output, height, width = order.output, *event.pixels.shape[:2]
    own = order.card.size if isinstance(event, Preview) else (width, height)
    size = output.size or own
    file = await codecs.encode(event.pixels, output.format, output.quality, size, output.into)
    return file, size
