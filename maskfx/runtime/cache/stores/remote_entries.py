"""RemoteEntries: entries of a store as objects, read, written, listed and removed by coroutines.

An entry is a folder of objects: `HASH.rows` is the payload, `index` the header of an entry's file,
with the payload's length and hash, and `used` is written again when the entry is used. The payload
is written before the index and removed after it, so an index without its payload is damage. Several
processes may write the same entry: each payload has a name of its own.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from maskfx.runtime.cache.stores.objects import PIECE, ObjectInfo, Objects
from maskfx.runtime.cache.stores.store import Report
from maskfx.runtime.cache.stores.store_entry import (
    DIGEST_SIZE,
    HEADER,
    MAGIC,
    VERSION,
    Buffer,
    CorruptEntry,
    header_of,
)

FOLDER = "entries"
INDEX, USED, ROWS = "index", "used", ".rows"
PARALLEL = 4  # requests of one read
STATUSES = 16  # concurrent requests for the indices of several entries


@dataclass(frozen=True)
class EntryIndex:
    """The index of an entry: its content, and when it was written."""

    content: bytes
    written: float

    def parsed(self, digest: bytes) -> tuple[int, bytes]:
        """Return the payload's length and hash; raise CorruptEntry if this is no such index."""
        if len(self.content) != HEADER.size:
            raise CorruptEntry("its index has another length than a header")
        magic, version, found, length, hashed = HEADER.unpack(self.content)
        if (magic, version, found) != (MAGIC, VERSION, digest):
            raise CorruptEntry("its index has another magic, version or key")
        return length, hashed

    def size(self, digest: bytes) -> int:
        """Return the size of the entry, without the notes of its use; 0 if this is no index."""
        try:
            return HEADER.size + self.parsed(digest)[0]
        except CorruptEntry:
            return 0


@dataclass
class ListedEntry:
    """The objects of an entry, as a listing shows them."""

    digest: bytes
    index: ObjectInfo | None = None
    used: float = 0.0  # seconds since the epoch
    others: list[ObjectInfo] = field(default_factory=list)  # payloads, and foreign objects
    nbytes: int = 0  # of all objects


def folder_of(digest: bytes) -> str:
    return f"{FOLDER}/{digest.hex()}"


def pieces_of(length: int) -> int:
    return -(-length // PIECE)


class RemoteEntries:
    """The entries below the URL of some objects; failures of the store raise."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    async def index(self, digest: bytes) -> EntryIndex | None:
        found = await self.objects.get(f"{folder_of(digest)}/{INDEX}", HEADER.size)
        return None if found is None else EntryIndex(found[1], found[0].written)

    async def indices(self, digests: Iterable[bytes]) -> list[EntryIndex | None]:
        """Read several indices at a time."""
        turn = asyncio.Semaphore(STATUSES)

        async def one(digest: bytes) -> EntryIndex | None:
            async with turn:
                return await self.index(digest)

        return await asyncio.gather(*map(one, digests))

    async def used(self, digest: bytes) -> float:
        """Return the time of the last noted use, or 0."""
        found = await self.objects.status(f"{folder_of(digest)}/{USED}")
        return 0.0 if found is None else found.written

    async def mark(self, digest: bytes) -> None:
        """Note a use of an entry."""
        await self.objects.put(f"{folder_of(digest)}/{USED}", b"used")

    async def has_payload(self, digest: bytes, length: int, hashed: bytes) -> bool:
        """Return True if a payload is there and has this length; small ones aren't looked for."""
        if length <= PIECE:
            return True
        status = await self.objects.status(rows_name(digest, hashed))
        return status is not None and status.nbytes == length

    async def read(self, digest: bytes, hashed: bytes, into: bytearray) -> bool:
        """Read a payload, a large one in ranges; return False if it is absent or of another length.

        Its hash isn't checked.
        """
        name, length = rows_name(digest, hashed), len(into)
        if length <= PIECE:
            found = await self.objects.get(name, length) if length else None
            if found is not None and len(found[1]) == length:
                into[:] = found[1]
                return True
            return not length
        turn = asyncio.Semaphore(PARALLEL)

        async def read(start: int) -> bool:
            end = min(start + PIECE, length)
            async with turn:
                piece = await self.objects.read(name, start, end)
            if piece is None or len(piece) != end - start:
                return False
            into[start:end] = piece
            return True

        return all(await asyncio.gather(*map(read, range(0, length, PIECE))))

    async def beginning(self, digest: bytes, nbytes: int) -> bytes:
        """Return the first bytes of a payload, unchecked, or b""."""
        index = await self.index(digest)
        if index is None:
            return b""
        length, hashed = index.parsed(digest)
        piece = await self.objects.read(rows_name(digest, hashed), 0, min(nbytes, length))
        return b"" if piece is None else bytes(piece)

    async def write(self, digest: bytes, payload: Buffer) -> None:
        """Write the payload first and the index last: readers see the whole entry or none."""
        data = memoryview(payload).cast("B")
        header = header_of(digest, data)
        if data:
            await self.objects.put(rows_name(digest, header[-16:]), data)
        await self.objects.put(f"{folder_of(digest)}/{INDEX}", header)

    async def remove(self, digest: bytes, only: bytes | None = None) -> bool:
        """Remove an entry, its index first; with `only`, not if it has another index now."""
        if only is not None:
            index = await self.index(digest)
            if index is None or index.content != only:
                return False
        found = await self.objects.names(folder_of(digest))
        for info in sorted(found, key=lambda info: not info.name.endswith("/" + INDEX)):
            await self.objects.remove(info.name)
        return bool(found)

    async def ls(self) -> list[ListedEntry]:
        """List all entries, those without an index too, least recently used first."""
        found: defaultdict[bytes, ListedEntry] = defaultdict(lambda: ListedEntry(b""))
        for info in await self.objects.names(FOLDER):
            digest, name = split_name(info.name)
            if digest is None:
                continue
            entry = found[digest]
            entry.digest = digest
            entry.nbytes += info.nbytes
            entry.used = max(entry.used, info.written)
            if name == INDEX:
                entry.index = info
            elif name != USED:
                entry.others.append(info)
        return sorted(found.values(), key=lambda entry: (entry.used, entry.digest))

    async def trim(
        self,
        budget_bytes: int | None,
        ttl: float | None,
        keep: Collection[bytes],
        now: float,
        before: float,
    ) -> tuple[Report, set[bytes]]:
        """Remove expired entries, then the least recently used over a budget.

        Args:
            budget_bytes: The most bytes of all entries; None sets no limit.
            ttl: Seconds without use after which an entry expires; None never.
            keep: Digests of entries that stay.
            now: The time in seconds since the epoch.
            before: Payloads from before this time without an index are removed.
        """
        removed = freed = 0
        listed = await self.ls()
        left = [entry for entry in listed if entry.index is not None]
        total, gone = sum(entry.nbytes for entry in left), set[bytes]()
        for entry in left:
            expired = ttl is not None and now - entry.used > ttl
            over = budget_bytes is not None and total > budget_bytes
            if (expired or over) and entry.digest not in keep:
                await self.remove(entry.digest)
                gone.add(entry.digest)
                removed, freed = removed + 1, freed + entry.nbytes
                total -= entry.nbytes
        for entry in listed:
            if entry.digest not in gone:
                swept = await self.sweep(entry, before)
                removed, freed = removed + bool(swept), freed + swept
        return Report(len(left) - len(gone), total, removed, freed), gone

    async def sweep(self, entry: ListedEntry, before: float) -> int:
        """Remove what writers left before a time; return the bytes.

        These are payloads without an index, and those that another one has replaced.
        """
        old = [info for info in entry.others if info.written < before]
        keep: Collection[str] = ()
        if entry.index is not None:
            if len(entry.others) < 2 or not old:
                return 0
            index = await self.index(entry.digest)
            if index is None or len(index.content) != HEADER.size:
                return 0
            keep = (rows_name(entry.digest, index.content[-16:]),)
        elif entry.used < before:
            old = [*old, ObjectInfo(f"{folder_of(entry.digest)}/{USED}", 0, entry.used)]
        gone = [info for info in old if info.name not in keep]
        for info in gone:
            await self.objects.remove(info.name)
        return sum(info.nbytes for info in gone)


def rows_name(digest: bytes, hashed: bytes) -> str:
    return f"{folder_of(digest)}/{hashed.hex()}{ROWS}"


def split_name(name: str) -> tuple[bytes | None, str]:
    """Return the digest and the last part of an object's name; no digest for foreign objects."""
    folder, _, rest = name.partition("/")
    text, _, last = rest.partition("/")
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None, last
    whole = folder == FOLDER and len(digest) == DIGEST_SIZE and digest.hex() == text
    return (digest if whole else None), last
