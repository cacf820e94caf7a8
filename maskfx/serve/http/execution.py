"""An order carried out: its requests side by side, each picture a file as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.errors import ApiError
from maskfx.serve.http.orders import Order, Size
from maskfx.serve.request import Finished, Frontend, Preview, Request

AHEAD = 2  # pictures per request that may wait for a slow reader


@dataclass(frozen=True, eq=False)
class EncodedPicture:
    """A picture of an order, encoded."""

    request: Request
    index: int  # of the request in its order
    event: Preview | Finished
    base64: bytes
    size: Size


Told = EncodedPicture | Exception | None  # None: a request is through


async def run(frontend: Frontend, codecs: Codecs, order: Order) -> AsyncGenerator[EncodedPicture]:
    """Previews and results as they come. The first failure ends all; so does closing this."""
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
    """One request, from its start to its picture."""
    request, finished = order.requests[index], False
    try:
        async with aclosing(_generator(frontend, request)) as events:
            async for event in events:
                finished = finished or isinstance(event, Finished)
                base64, size = await _encode(codecs, order, event)
                await line.put(EncodedPicture(request, index, event, base64, size))
        if not finished:
            raise ApiError("generation_failed", "The request ended without a picture.")
        await line.put(None)
    except Exception as error:
        await line.put(error)


async def _generator(frontend: Frontend, request: Request) -> AsyncGenerator[Preview | Finished]:
    """The frontend's iterator, whatever kind it is, closed when this is."""
    events = frontend.serve(request)
    try:
        async for event in events:
            yield event
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def _encode(codecs: Codecs, order: Order, event: Preview | Finished) -> tuple[bytes, Size]:
    """A preview is as large as its picture will be, though it comes smaller."""
    output, height, width = order.output, *event.pixels.shape[:2]
    own = order.card.size if isinstance(event, Preview) else (width, height)
    size = output.size or own
    file = await codecs.encode(event.pixels, output.format, output.quality, size, output.into)
    return file, size
