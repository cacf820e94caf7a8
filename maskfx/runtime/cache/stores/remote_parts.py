"""Payloads of entries of an object store, read whole or in parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from maskfx.errors import CacheError
from maskfx.runtime.cache.stores.bounded_calls import BoundedCalls, Unavailable, open_remote
from maskfx.runtime.cache.stores.objects import PIECE
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.cache.stores.remote_entries import (
    PARALLEL,
    EntryIndex,
    RemoteEntries,
    pieces_of,
    rows_name,
)
from maskfx.runtime.cache.stores.store_entry import CorruptEntry, new_buffer


def read_whole(
    entries: RemoteEntries, reads: BoundedCalls, digest: bytes, length: int, hashed: bytes
) -> bytearray | None:
    """Read a payload; None if it is absent or has another length."""
    if not reads.run(lambda: entries.has_payload(digest, length, hashed)):
        return None
    into = bytearray(length)
    turns = 2 + pieces_of(length) // PARALLEL
    return into if reads.run(lambda: entries.read(digest, hashed, into), turns) else None


def open_parts(
    entries: RemoteEntries,
    reads: BoundedCalls,
    digest: bytes,
    speed: ReadSpeed,
    damaged: Callable[[EntryIndex], None],
    again: str | None = None,
) -> RemoteParts | None:
    """Return the payload of an entry to be read in parts; None if it can't be read now.

    Other processes find the store by `again`, a URL.
    """
    try:
        index = reads.run(lambda: entries.index(digest))
        if index is None:
            return None
        length, hashed = index.parsed(digest)
    except (Unavailable, CorruptEntry):  # read whole, which counts it
        return None
    name = rows_name(digest, hashed)
    return RemoteParts(entries, reads, name, length, speed, lambda: damaged(index), again)


@dataclass(frozen=True)
class RemoteParts:
    """The payload of an entry of an object store.

    Args:
        entries: The entries.
        reads: Limits the time of requests.
        name: The object's name, which has the hash of the payload: it is never replaced.
        nbytes: The bytes of the payload.
        speed: Counts the reads.
        remove: Removes the damaged entry.
        again: The URL by which other processes find the store; None if they can't.
        clock: Returns the time in seconds.
    """

    entries: RemoteEntries
    reads: BoundedCalls
    name: str
    nbytes: int
    speed: ReadSpeed
    remove: Callable[[], None]
    again: str | None = None
    clock: Callable[[], float] = time.perf_counter

    def read(self, begin: int, end: int) -> memoryview:
        with self.speed.time.reading():
            return self._read_timed(begin, end)

    def _read_timed(self, begin: int, end: int) -> memoryview:
        began, why = self.clock(), "it was removed while an edit reads it"
        turns = 2 + pieces_of(end - begin) // PARALLEL
        found = None
        try:
            found = self.reads.run(lambda: self._read(begin, end), turns)
        except Unavailable:
            why = "the store doesn't answer"
        if found is None:
            raise CacheError(
                f"{self.name}: rows of a recorded step can't be read: {why}; record its template "
                "again"
            )
        self.speed.add(len(found), self.clock() - began)
        return found

    async def _read(self, begin: int, end: int) -> memoryview | None:
        turn, whole = asyncio.Semaphore(PARALLEL), new_buffer(end - begin)

        async def piece(start: int) -> bool:
            into = whole[start - begin : start - begin + PIECE]
            async with turn:
                found = await self.entries.objects.read(self.name, start, start + len(into))
            if found is None or len(found) != len(into):
                return False
            into[:] = found
            return True

        return whole if all(await asyncio.gather(*map(piece, range(begin, end, PIECE)))) else None

    def is_damaged(self) -> None:
        self.remove()

    @property
    def elsewhere(self) -> bool:
        return self.again is not None

    def __reduce__(self) -> tuple[object, ...]:
        return reopened, (self.again, self.name, self.nbytes)


@cache
def store_at(url: str) -> tuple[RemoteEntries, BoundedCalls]:
    """Return the entries of a store and the bounds of reads, with connections of this process."""
    access = open_remote(url)
    return RemoteEntries(access.objects), access.reads


def reopened(url: str, name: str, nbytes: int) -> RemoteParts:
    """Return the payload in another process, which leaves it to the first one to remove it."""
    entries, reads = store_at(url)
    return RemoteParts(entries, reads, name, nbytes, ReadSpeed(), lambda: None, url)
