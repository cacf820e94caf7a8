"""Cancellation of work when its client disconnects or related work fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from maskfx.serve.http.failures import ClientGone

Result = TypeVar("Result")


async def unless_gone(receive: Receive, work: Coroutine[object, None, Result]) -> Result:
    """Return the result of `work`; if the client disconnects, cancel it and raise ClientGone.

    The request's body must have been read, as `receive` is used to wait for the disconnect.
    """
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def together(*shared: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines concurrently and return their results; the first failure cancels the rest."""
    tasks = [asyncio.create_task(work) for work in shared]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
