"""RemoteStore: a store of entries in an object store; the counterpart of `Store` for a URL.

Writes, removals and the notes of use run in the background. A store that fails or does not answer
is left alone for a pause: reads are misses and writes are refused meanwhile, at once, so that
requests record for themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from threading import RLock

from maskfx.runtime.cache.stores import remote_queue as queue
from maskfx.runtime.cache.stores.bounded_calls import RemoteAccess, Unavailable, open_remote
from maskfx.runtime.cache.stores.check_remote import check_remote
from maskfx.runtime.cache.stores.known_entries import KnownEntries
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.cache.stores.remote_entries import (
    PARALLEL,
    STATUSES,
    EntryIndex,
    RemoteEntries,
    folder_of,
    pieces_of,
)
from maskfx.runtime.cache.stores.remote_parts import RemoteParts, open_parts, read_whole
from maskfx.runtime.cache.stores.store import Report, StoreCounters
from maskfx.runtime.cache.stores.store_entry import (
    HEADER,
    Buffer,
    CorruptEntry,
    EntryKey,
    StoreEntry,
    header_of,
)

LISTING, REMOVALS = 4, 20  # times the time of one call
SETTLE = 120.0  # seconds for the writes at the end
log = logging.getLogger(__name__)


class RemoteStore:
    """Stores entries below the URL of an object store; safe between threads and processes.

    Args:
        url: Such as `s3://bucket/prefix`; credentials are from the environment.
        access: The objects and the bounds of calls; by default those of the URL.
        backlog_bytes: Payloads that may wait to be written; further ones are refused.
        noted_after: Seconds after which another use of an entry is noted in the store.
        looked_after: Seconds between listings for the limit of bytes.
        abandoned_after: Seconds after which a payload without an index is removed.
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(
        self,
        url: str,
        *,
        access: RemoteAccess | None = None,
        backlog_bytes: int = 1 << 30,
        noted_after: float = 600.0,
        looked_after: float = 60.0,
        abandoned_after: float = 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_remote(url, access, backlog_bytes, noted_after, looked_after, abandoned_after)
        self.url, self._again = url, url if access is None else None  # for other processes
        self.counters, self.speed = StoreCounters(), ReadSpeed()
        access = open_remote(url) if access is None else access
        self.entries = RemoteEntries(access.objects)
        self.reads, self.writes, self.clock = access.reads, access.writes, clock
        self._most, self._noted_after = backlog_bytes, noted_after
        self._looked_after, self._abandoned_after = looked_after, abandoned_after
        self._queue = queue.ActionQueue(self._act, self._trim_soon)
        self._lock = RLock()
        self._known = KnownEntries()
        self._limits: tuple[int | None, float | None, Collection[bytes]] | None = None
        self._trimming = self._failed = False  # a write failed since the last `settle`
        self._looked, self._total = float("-inf"), 0

    # Writing, in the background.

    def put(self, key: EntryKey, payload: Buffer) -> bool:
        """Accept an entry to be written; return False, and count it, if the store is left alone.

        Reads of this object find it at once.
        """
        full = self._queue.nbytes + len(payload) > self._most
        if full or self.writes.paused:
            if full:
                log.warning("%s: an entry isn't written: too many wait already", self.url)
            self._count(failed_writes=1)
            return False
        self._add(key.digest(), queue.Write(payload))
        return True

    def drop(self, key: EntryKey) -> None:
        """Remove an entry; reads of this object miss it at once."""
        self._add(key.digest(), queue.Removal())

    def settle(self) -> bool:
        """Wait until nothing is left to write; return False if a write failed since the last call.

        The time for it is limited.
        """
        done = self._queue.settle(SETTLE)
        with self._lock:
            failed, self._failed = self._failed, False
        return done and not failed

    def _add(self, digest: bytes, action: queue.Action) -> None:
        self._queue.add(digest, action)
        with self._lock:  # after a `_see` that began before
            self._known.forget(digest)

    async def _act(self, digest: bytes, action: queue.Action) -> None:
        """Write or remove an entry; failures are counted, and logged once."""
        try:
            if isinstance(action, queue.Removal):
                found = await self.writes.run_in_loop(
                    lambda: self.entries.remove(digest, action.only), 1 + PARALLEL
                )
                self._count(removed=int(found and action.only is None))
                return
            size = len(action.payload)
            await self.writes.run_in_loop(
                lambda: self.entries.write(digest, action.payload), 2 + pieces_of(size)
            )
        except Unavailable:
            self._count(failed_writes=1)
            self._failed = True
            return
        self._count(writes=1, bytes_written=HEADER.size + size)
        self._known.note(digest)

    # Reading.

    def get(self, key: EntryKey, ttl: float | None = None) -> bytearray | None:
        """Return the payload, or None; with `ttl`, an entry unused for longer is removed."""
        digest = key.digest()
        waiting = self._queue.of(digest)
        if isinstance(waiting, queue.Write):
            self._count(hits=1)
            return bytearray(waiting.payload)
        payload = None
        try:
            if waiting is None:
                payload = self._read(digest, ttl)
        except (Unavailable, MemoryError):
            self._count(failed_reads=1)
        if payload is None:
            self._count(misses=1)
            return None
        self._count(hits=1, bytes_read=HEADER.size + len(payload))
        self._note(digest, ttl)
        return payload

    def parts(self, key: EntryKey, ttl: float | None = None) -> RemoteParts | None:
        """Return the payload to be read in parts, or None: written entries, without a `ttl`."""
        digest = key.digest()
        if ttl is not None or self._queue.of(digest) is not None:
            return None
        self._note(digest)
        damaged = partial(self._corrupt, digest, why=CorruptEntry("a part has another hash"))
        return open_parts(self.entries, self.reads, digest, self.speed, damaged, self._again)

    def _read(self, digest: bytes, ttl: float | None) -> bytearray | None:
        for last in (False, True):
            index = self.reads.run(lambda: self.entries.index(digest))
            if index is None:
                return None
            try:
                length, hashed = index.parsed(digest)
                if ttl is not None and self._expired(digest, index, ttl):
                    return None
                payload = read_whole(self.entries, self.reads, digest, length, hashed)
                if payload is None:
                    if not last:  # the entry may have been replaced or removed meanwhile
                        continue
                    raise CorruptEntry("its payload is absent or has another length")
                if header_of(digest, memoryview(payload)) != index.content:
                    raise CorruptEntry("its payload has another hash")
            except CorruptEntry as why:
                self._corrupt(digest, index, why)
                return None
            self._see(digest, HEADER.size + length)
            return payload
        return None

    def _expired(self, digest: bytes, index: EntryIndex, ttl: float) -> bool:
        """Return True if an entry is unused for longer than `ttl`; it is removed then."""
        if self.clock() - index.written <= ttl:
            return False
        used = self.reads.run(lambda: self.entries.used(digest))
        if self.clock() - used <= ttl:
            return False
        self._count(expired=1)
        self._add(digest, queue.Removal(index.content))
        return True

    def _corrupt(self, digest: bytes, index: EntryIndex, why: Exception) -> None:
        self._count(corrupt=1)
        log.warning(
            "%s/%s is damaged: %s; it is removed, and its template recorded again",
            self.url.rstrip("/"),
            folder_of(digest),
            why,
        )
        if self._queue.of(digest) is None:
            self._add(digest, queue.Removal(index.content))

    def touch(self, key: EntryKey) -> bool:
        """Mark an entry as used now; return True if it exists."""
        return self.touch_all([key])

    def touch_all(self, keys: Sequence[EntryKey]) -> bool:
        """Mark entries as used now; return True if all of them exist."""
        digests = [key.digest() for key in keys]
        found = all(self._sizes(digests))
        if found:
            for digest in digests:
                self._note(digest)
        return found

    def nbytes(self, key: EntryKey) -> int:
        """Return the size of an entry, or 0 if there is none."""
        return self._sizes([key.digest()])[0]

    def _sizes(self, digests: Sequence[bytes]) -> list[int]:
        """Return the sizes of entries; 0 for those that are absent."""
        found: dict[bytes, int] = {}
        for digest in digests:
            action, seen = self._queue.of(digest), self._known.size(digest)
            if action is not None:
                whole = HEADER.size + queue.size_of(action)
                found[digest] = whole if isinstance(action, queue.Write) else 0
            elif seen is not None:
                found[digest] = seen
        unknown = [digest for digest in digests if digest not in found]
        try:
            if unknown:
                turns = 1 + len(unknown) // STATUSES
                indices = self.reads.run(lambda: self.entries.indices(unknown), turns)
                for digest, index in zip(unknown, indices, strict=True):
                    found[digest] = 0 if index is None else index.size(digest)
                    if found[digest]:
                        self._see(digest, found[digest])
        except Unavailable:
            self._count(failed_reads=1)
        return [found.get(digest, 0) for digest in digests]

    # The whole store.

    def ls(self) -> list[StoreEntry]:
        """List the entries, least recently used first; none if the store does not answer."""
        try:
            listed = self.reads.run(self.entries.ls, LISTING)
        except Unavailable:
            self._count(failed_reads=1)
            return []
        found = []
        for entry in listed:
            if entry.index is not None:
                path = Path(folder_of(entry.digest))
                found.append(StoreEntry(entry.digest, path, entry.nbytes, entry.used))
                self._see(entry.digest, entry.nbytes)
        self._total, self._looked = sum(entry.nbytes for entry in found), time.monotonic()
        return found

    def total_bytes(self) -> int:
        """Return the size of all entries as of the last listing; starts one that is due."""
        if time.monotonic() - self._looked > self._looked_after:
            self._looked = time.monotonic()
            queue.start(self._look())
        return self._total

    async def _look(self) -> None:
        try:
            listed = await self.reads.run_in_loop(self.entries.ls, LISTING)
        except Unavailable:
            return
        self._total = sum(entry.nbytes for entry in listed if entry.index is not None)

    def prefix(self, entry: StoreEntry) -> bytes:
        """Return the first bytes of an entry's payload, unchecked, or b"" if it can't be read."""
        try:
            return self.reads.run(lambda: self.entries.beginning(entry.digest, 1 << 20))
        except (Unavailable, CorruptEntry):
            return b""

    def verify(self) -> Report:
        """Read every entry; remove damaged ones, and what writers left."""
        report = self.gc()
        entries = nbytes = removed = freed = unreadable = 0
        for entry in self.ls():
            before = self.counters.corrupt
            try:
                payload = self._read(entry.digest, None)
            except Unavailable:
                unreadable += 1
                continue
            if payload is not None:
                entries, nbytes = entries + 1, nbytes + entry.nbytes
            elif self.counters.corrupt > before:
                removed, freed = removed + 1, freed + entry.nbytes
        unreadable += not self.settle()
        return Report(entries, nbytes, report.removed + removed, report.freed + freed, unreadable)

    def gc(
        self,
        budget_bytes: int | None = None,
        ttl: float | None = None,
        keep: Collection[bytes] = (),
    ) -> Report:
        """Remove entries unused for `ttl` seconds, then the least recently used over a budget.

        Entries whose digest is in `keep` stay. What dead writers left is removed too.
        """
        try:
            return self.writes.run(lambda: self._gc(budget_bytes, ttl, keep), REMOVALS)
        except Unavailable:
            self._count(failed_writes=1)
            return Report(unreadable=1)

    async def _gc(
        self, budget_bytes: int | None, ttl: float | None, keep: Collection[bytes]
    ) -> Report:
        now = self.clock()
        before = now - self._abandoned_after
        report, gone = await self.entries.trim(budget_bytes, ttl, keep, now, before)
        for digest in gone:
            self._known.forget(digest)
        self._count(removed=report.removed)
        self._total, self._looked = report.nbytes, time.monotonic()
        return report

    def trim(self, budget_bytes: int | None, ttl: float | None, keep: Collection[bytes]) -> None:
        """Do what `gc` does in the background: after the writes, and not with every one."""
        with self._lock:
            self._limits = (budget_bytes, ttl, keep)
        if self._queue.idle:
            self._trim_soon()

    def _trim_soon(self) -> None:
        """Start a removal over the limits, unless one is due already."""
        with self._lock:
            if self._limits is not None and not self._trimming:
                self._trimming = True
                queue.start(self._trim())

    async def _trim(self) -> None:
        await asyncio.sleep(max(0.0, self._looked + self._looked_after - time.monotonic()))
        with self._lock:
            limits, self._limits, self._trimming = self._limits, None, False
        if limits is None:
            return
        writing = not self._queue.idle
        try:
            await self.writes.run_in_loop(lambda: self._gc(*limits), REMOVALS)
        except Unavailable:
            self._count(failed_writes=1)
        if writing:  # what wasn't written yet wasn't counted
            with self._lock:
                self._limits = self._limits or limits
            if self._queue.idle:
                self._trim_soon()

    # Parts of the above.

    def _note(self, digest: bytes, ttl: float | None = None) -> None:
        """Note a use in the store, in the background, unless a recent one is noted."""
        recent = self._noted_after if ttl is None else min(self._noted_after, ttl / 4)
        if self._known.note(digest, recent) and not self.writes.paused:
            queue.start(self._mark(digest))

    async def _mark(self, digest: bytes) -> None:
        try:
            await self.writes.run_in_loop(lambda: self.entries.mark(digest))
        except Unavailable:  # only the order of use is lost
            return

    def _see(self, digest: bytes, nbytes: int) -> None:
        with self._lock:
            if self._queue.of(digest) is None:
                self._known.see(digest, nbytes)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, amount in more.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)
