"""`Idempotency-Key`: repeated calls with the same key are computed once.

Owns the cache of responses, limited in number and bytes. Failures aren't cached, so that a retry
can succeed. Work is cancelled when all calls that wait for it have disconnected.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from maskfx.serve.errors import ApiError

HEADER = "Idempotency-Key"
LONGEST = 255
ENTRIES = 1024
BYTES = 128 << 20

Compute = Callable[[], Coroutine[object, None, bytes]]


@dataclass(eq=False)
class IdempotentCall:
    """A call that runs or has finished, the number of waiters, and the bytes that are counted."""

    digest: bytes
    task: asyncio.Task[bytes]
    waiting: int = 0
    size: int | None = None  # None: it runs


class Idempotency:
    """A cache of responses by key, with eviction of the least recently used."""

    def __init__(self, entries: int = ENTRIES, size: int = BYTES) -> None:
        self._most, self._room = entries, size
        # not an `LruCache`: bounds the bytes too, and calls that run aren't evicted
        self._entries: OrderedDict[str, IdempotentCall] = OrderedDict()
        self._bytes = 0

    async def answer(self, key: str | None, digest: bytes, compute: Compute) -> bytes:
        if key is None:
            return await compute()
        check(key)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._start(key, digest, compute)
        elif entry.digest != digest:
            raise ApiError(
                "idempotency_key_reused",
                f"This {HEADER} came with another body before; use a new one.",
                param=HEADER,
            )
        self._entries.move_to_end(key)
        return await self._wait(key, entry)

    def _start(self, key: str, digest: bytes, compute: Compute) -> IdempotentCall:
        entry = self._entries[key] = IdempotentCall(digest, asyncio.create_task(compute()))
        entry.task.add_done_callback(lambda task: self._ended(key, entry))
        return entry

    async def _wait(self, key: str, entry: IdempotentCall) -> bytes:
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiting -= 1
            if not entry.waiting and not entry.task.done():
                self._forget(key, entry)
                entry.task.cancel()
                await asyncio.gather(entry.task, return_exceptions=True)

    def _ended(self, key: str, entry: IdempotentCall) -> None:
        if entry.task.cancelled() or entry.task.exception() is not None:
            self._forget(key, entry)
            return
        if self._entries.get(key) is not entry:  # all waiters left before it finished
            return
        entry.size = len(entry.task.result())
        self._bytes += entry.size
        for old, kept in list(self._entries.items()):
            if self._bytes <= self._room and len(self._entries) <= self._most:
                break
            if kept.size is not None:
                self._bytes -= kept.size
                del self._entries[old]

    def _forget(self, key: str, entry: IdempotentCall) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]


def check(key: str) -> None:
    if not 0 < len(key) <= LONGEST or not key.isascii() or not key.isprintable():
        raise ApiError(
            "invalid_value", f"{HEADER} must be 1 to {LONGEST} printable characters.", param=HEADER
        )
