"""DiskTier: recorded steps in a store, within a limit of bytes and a time to live.

Without a store it holds nothing. Knows nothing of the entries in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from math import inf
from threading import Lock
from typing import Any

from maskfx.errors import CacheError
from maskfx.runtime.cache.serialize import decode, encode
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stored_steps import decode_parts
from maskfx.runtime.cache.stores.entry_store import EntryStore
from maskfx.runtime.cache.stores.store_entry import EntryKey

log = logging.getLogger(__name__)


class DiskTier:
    """The disk tier of `Tiers`; thread-safe.

    Args:
        store: The directory or the object store, or None.
        limit: Its maximum number of bytes; None sets no limit.
        ttl: Seconds without use after which an entry expires; None never.
        pinned: Returns the keys of the entries that stay.
    """

    def __init__(
        self,
        store: EntryStore | None,
        limit: int | None,
        ttl: float | None,
        pinned: Callable[[], Collection[EntryKey]],
    ) -> None:
        self.store = store
        self._limit, self._ttl, self._pinned = limit, ttl, pinned
        self._lock = Lock()
        self._unreadable = 0  # entries that were intact, but not readable by this version

    def counts(self) -> dict[str, Any]:
        """Return the fields of `TierCounters` that are counted here."""
        if self.store is None:
            return {}
        corrupt, reads = self.store.counters.corrupt + self._unreadable, self.store.speed.time
        return {"corrupt": corrupt, "read_bytes": reads.nbytes, "read_seconds": reads.seconds}

    def get(self, key: EntryKey, expires: bool, in_parts: bool = False) -> StepCache | None:
        """Read a step; None on a miss. An entry that can't be decoded is removed.

        With `in_parts`, its rows are read when they are used, if it was stored for that.
        """
        if self.store is None:
            return None
        ttl = self._ttl if expires else None
        parts = self.store.parts(key, ttl) if in_parts else None
        if parts is not None:
            try:
                found = decode_parts(parts)
            except CacheError:  # read as a whole, which finds what is damaged
                found = None
            if found is not None:
                return found
        with self.store.speed.time.reading():
            return self._read(self.store, key, ttl)

    def _read(self, store: EntryStore, key: EntryKey, ttl: float | None) -> StepCache | None:
        payload = store.get(key, ttl)
        if payload is None:
            return None
        try:
            found = decode(payload)
        except CacheError as error:
            self.drop(key)
            with self._lock:
                self._unreadable += 1
                first = self._unreadable == 1
            if first:
                log.warning(
                    "an entry of the store can't be decoded: %s; it is removed, and recorded "
                    "again; further ones aren't logged",
                    error,
                )
            return None
        store.speed.time.add(len(payload))
        return found

    def put(self, key: EntryKey, cache: StepCache, trims: bool = True) -> bool:
        """Write a step; return False if it can't be stored or written.

        Args:
            key: Its key.
            cache: The step.
            trims: Whether others are removed for it; else it isn't written beyond the limit.
        """
        if self.store is None:
            return False
        payload = encoded(key, cache)
        if payload is None:
            return False
        limit = inf if trims or self._limit is None else self._limit - self.store.total_bytes()
        if len(payload) > limit or not self.store.put(key, payload):
            return False
        self.trim()
        return True

    def has(self, key: EntryKey) -> bool:
        """Return True if the entry is there; counts as use."""
        return self.store is not None and self.store.touch(key)

    def has_all(self, keys: Sequence[EntryKey]) -> bool:
        """Return True if all the entries are there; counts as use."""
        return not keys or (self.store is not None and self.store.touch_all(keys))

    def drop(self, key: EntryKey) -> None:
        """Remove an entry."""
        if self.store is not None:
            self.store.drop(key)

    def nbytes(self, key: EntryKey) -> int:
        """Return the bytes of an entry, 0 if it isn't there."""
        return 0 if self.store is None else self.store.nbytes(key)

    def trim(self) -> None:
        """Remove expired entries, and the least recently used ones beyond the limit."""
        if self.store is not None and (self._limit is not None or self._ttl is not None):
            self.store.trim(self._limit, self._ttl, {key.digest() for key in self._pinned()})

    def settle(self) -> bool:
        """Wait until everything is written; return False if something can't be."""
        return self.store is None or self.store.settle()


def encoded(key: EntryKey, cache: StepCache) -> bytes | None:
    """Encode a step without rounding; return None if it holds a value that can't be stored."""
    try:
        return encode(cache, labels=key.labels())
    except CacheError:
        return None
