"""Tiers: caches recorded steps on the device, in host memory and on disk, and moves them.

An entry in memory lies on the device or on the host. The least recently used entry is evicted from
the device to the host, and from the host to the disk; use promotes it again. Bytes are reserved for
an entry before it is copied, so no tier ever holds more than its budget. Entries never change, so
one that is being moved is still read at its old place. Knows nothing of models, masks and plans.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from threading import Condition, RLock

from maskfx.errors import BudgetError, InputError
from maskfx.runtime.cache.check_tiers import check_habits, check_places
from maskfx.runtime.cache.disk_tier import DiskTier
from maskfx.runtime.cache.eviction import least_used
from maskfx.runtime.cache.movers import HostMover, Mover
from maskfx.runtime.cache.quantize import LOSSLESS, Encoding
from maskfx.runtime.cache.step_cache import StepCache, Then, has_unread, is_found
from maskfx.runtime.cache.stores.entry_store import EntryStore
from maskfx.runtime.cache.stores.store_entry import EntryKey
from maskfx.runtime.cache.tier_entry import FoundStep, Tier, TierCounters, TierEntry


class Tiers:
    """Caches recorded steps by key; thread-safe.

    Args:
        store: The directory or object store of the disk tier; None has no disk tier.
        host_bytes: The budget of the host tier.
        device_bytes: The budget of the device tier; above 0 it needs `mover`.
        disk_bytes: The budget of the disk tier; None sets no limit. Needs `store`.
        ttl: Seconds without use after which an entry expires; None never.
        encoding: The formats that `put` rounds steps to.
        write_through: Write entries to disk in `put`; otherwise when they leave memory, or by
            `flush`.
        mover: Copies entries between host and device.
        clock: Returns the time in seconds, for `ttl`.
        readers: The number of prefetch threads.
    """

    def __init__(
        self,
        store: EntryStore | None = None,
        *,
        host_bytes: int,
        device_bytes: int = 0,
        disk_bytes: int | None = None,
        ttl: float | None = None,
        encoding: Encoding = LOSSLESS,
        write_through: bool = True,
        mover: Mover | None = None,
        clock: Callable[[], float] = time.time,
        readers: int = 2,
    ) -> None:
        check_places(store, host_bytes, device_bytes, disk_bytes, mover)
        check_habits(ttl, encoding, write_through, readers)
        self.store = store
        self.encoding = encoding
        self._budget = {Tier.DEVICE: device_bytes, Tier.HOST: host_bytes}
        self._on_device = device_bytes > 0
        self._ttl = ttl
        self._write_through = write_through
        self._mover: Mover = mover or HostMover()
        self._clock, self._tick = clock, count(1)
        self._lock = RLock()
        self._moved = Condition(self._lock)  # an entry is no longer being moved
        self._kept: dict[EntryKey, TierEntry] = {}
        self._pins: Counter[EntryKey] = Counter()
        self._sparing: set[str] = set()  # templates
        self._disk = DiskTier(store, disk_bytes, ttl, self._pinned)
        self._loading: dict[EntryKey, Future[StepCache | None]] = {}
        self._counters = TierCounters()
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="maskfx-prefetch")

    # Public interface.

    def put(self, key: EntryKey, cache: StepCache, keep: Collection[str] | None = None) -> None:
        """Cache a recorded step; with `keep`, only these taps' rows.

        With a lossy encoding it is rounded here, once, and stays packed in every tier: a picture
        never depends on the tier in which its step was found.
        """
        cache = cache.packed(self.encoding, keep)
        spared = key.template if key.template in self._sparing else None
        stored = self._write_through and self._disk.put(key, cache, trims=spared is None)
        with self._lock:
            self._replace(key)
        if self._keep(key, cache, stored, spared=spared) is None and not stored:
            if spared is not None:
                raise BudgetError(f"no room for template {spared} without evicting ones in use")
            self._leave(key, cache)

    @contextmanager
    def sparing(self, template: str) -> Iterator[None]:
        """Put a template that may never be read: within the context it evicts none in use.

        It evicts unread and old entries, none on disk; without room, `put` raises BudgetError.
        """
        self._sparing.add(template)
        try:
            yield
        finally:
            self._sparing.discard(template)

    def get(self, key: EntryKey, parts: bool = False) -> FoundStep | None:
        """Return a recorded step and its tier, or None; move it to the fastest tier with room.

        With `parts`, the rows of a step on disk are read when they are used.
        """
        cache, tier = self._fetch(key, parts)
        if cache is None:
            with self._lock:
                self._counters.misses += 1
            return None
        with self._lock:
            self._counters.hits[tier] += 1
        if self._on_device and not has_unread(cache):
            cache = self._promote(key, cache)
        return FoundStep(cache, tier)

    def prefetch(self, key: EntryKey, parts: bool = False, then: Then = is_found) -> Future[bool]:
        """Read an entry in the background; the result, that of `then`, is False on a miss."""
        return self._readers.submit(lambda: then(self._fetch(key, parts)[0]))

    def pin(self, key: EntryKey) -> None:
        """Exempt an entry from eviction, even before it is cached; each pin needs one `unpin`."""
        with self._lock:
            self._pins[key] += 1

    def unpin(self, key: EntryKey) -> None:
        """Remove one pin of an entry."""
        with self._lock:
            if not self._pins[key]:
                raise InputError(f"unpin({key}): it isn't pinned; call pin() first")
            self._pins[key] -= 1
            self._pins += Counter()  # drops zeros

    def drop(self, key: EntryKey) -> None:
        """Remove an entry from every tier."""
        with self._lock:
            self._replace(key)
            self._disk.drop(key)

    def gc(self) -> None:
        """Remove entries unused for longer than the time to live, and the disk's excess."""
        with self._lock:
            for key in [k for k, kept in self._kept.items() if self._is_expired(kept)]:
                self._forget(key)
                self._counters.expired += 1
        self._disk.trim()

    def flush(self) -> bool:
        """Write the entries that aren't on disk yet; return True if all are there now."""
        with self._lock:
            unwritten = [kept for kept in self._kept.values() if not kept.stored]
        return all([self._write(kept) for kept in unwritten]) & self._disk.settle()

    def close(self) -> None:
        """Stop prefetching and write the entries that aren't on disk yet."""
        self._readers.shutdown(cancel_futures=True)
        self.flush()

    def counters(self) -> TierCounters:
        """Return a copy of the counters, with those of the disk tier."""
        with self._lock:
            now = self._counters
            return replace(
                now,
                hits=Counter(now.hits),
                evictions=Counter(now.evictions),
                nbytes=Counter(now.nbytes),
                **self._disk.counts(),
            )

    @property
    def room(self) -> int:
        """Return the bytes that memory may hold."""
        return sum(self._budget.values())

    def where(self, key: EntryKey) -> Tier | None:
        """Return the tier of an entry in memory, or None; doesn't count as use."""
        with self._lock:
            return self._kept[key].tier if key in self._kept else None

    def holds(self, keys: Iterable[EntryKey]) -> bool:
        """Return True if all these entries are in some tier, without reading them."""
        return self._disk.has_all([key for key in keys if self.where(key) is None])

    def bytes_of(self, key: EntryKey) -> dict[Tier, int]:
        """Return an entry's bytes in each tier; doesn't count as use, reads nothing."""
        with self._lock:
            kept = self._kept.get(key)
            found = {} if kept is None else {kept.tier: kept.nbytes}
        stored = self._disk.nbytes(key)
        return {**found, Tier.DISK: stored} if stored else found

    # Lookup.

    def _fetch(self, key: EntryKey, parts: bool = False) -> tuple[StepCache | None, Tier]:
        """Return an entry from memory or disk; concurrent callers share one read from disk."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and self._is_expired(kept):
                self._forget(key)
                self._counters.expired += 1
            elif kept is not None:
                self._use(kept, read=True)
                return kept.cache, kept.tier
            if self.store is None:
                return None, Tier.DISK
            under_way = self._loading.get(key)
            if under_way is None:
                mine: Future[StepCache | None] = Future()
                self._loading[key] = mine
            else:
                self._counters.shared += 1
        if under_way is not None:
            return under_way.result(), Tier.DISK
        try:
            cache = self._load(key, mine, parts)
        except BaseException as error:
            self._end_loading(key, mine)
            mine.set_exception(error)
            raise
        self._end_loading(key, mine)
        mine.set_result(cache)
        return cache, Tier.DISK

    def _end_loading(self, key: EntryKey, mine: Future[StepCache | None]) -> None:
        with self._lock:
            if self._loading.get(key) is mine:
                del self._loading[key]

    def _load(self, key: EntryKey, mine: Future[StepCache | None], parts: bool) -> StepCache | None:
        cache = self._disk.get(key, not self._pins[key], parts)
        if cache is None:
            return None
        with self._lock:
            self._counters.loads += 1
        kept = self._keep(key, cache, stored=True, tiers=(Tier.HOST,), read=mine)
        return kept if kept is not None else cache

    def _promote(self, key: EntryKey, cache: StepCache) -> StepCache:
        """Move an entry from the host to the device, if room can be made."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept.tier is not Tier.HOST or kept.moving:
                return kept.cache if kept is not None else cache
            kept.moving = True
        with self._moving(kept):
            if self._make_room(Tier.DEVICE, kept.nbytes):
                self._move(kept, self._mover.to_device, Tier.DEVICE)
        return kept.cache

    # Insertion and eviction.

    def _keep(
        self,
        key: EntryKey,
        cache: StepCache,
        stored: bool,
        tiers: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST),
        read: Future[StepCache | None] | None = None,
        spared: str | None = None,
    ) -> StepCache | None:
        """Insert an entry into the first tier with room; return its copy there, or None.

        An entry that was read from disk (`read`) isn't inserted if it was replaced or dropped
        during the read.
        """
        nbytes = cache.nbytes()
        for tier in tiers:
            if not self._budget[tier] or not self._make_room(tier, nbytes, spared):
                continue
            moved = self._mover.to_device if tier is Tier.DEVICE else self._mover.to_host
            try:
                kept = TierEntry(key, moved(cache), nbytes, tier, stored)
            except BaseException:
                self._give_back(tier, nbytes)
                raise
            with self._lock:
                if read is not None and self._loading.get(key) is not read:
                    self._give_back(tier, nbytes)
                    return None
                self._forget(key)
                self._kept[key] = kept
                self._use(kept, read=read is not None)
            return kept.cache
        return None

    def _make_room(self, tier: Tier, nbytes: int, spared: str | None = None) -> bool:
        """Reserve bytes of a tier, evicting others; return False if pins or its size forbid it."""
        if nbytes > self._budget[tier]:
            return False
        while True:
            with self._lock:
                if self._counters.nbytes[tier] + nbytes <= self._budget[tier]:
                    self._counters.nbytes[tier] += nbytes
                    return True
                pinned, budget = self._pins.__getitem__, self._budget[tier]
                victim = least_used(self._kept.values(), tier, pinned, budget, spared)
                if victim is None:
                    return False
                victim.moving = True
            with self._moving(victim):
                self._evict(victim)

    def _evict(self, victim: TierEntry) -> None:
        """Evict an entry one tier down: to the host if it has room, else to the disk."""
        origin = victim.tier
        if origin is Tier.DEVICE and self._make_room(Tier.HOST, victim.nbytes):
            self._move(victim, self._mover.to_host, Tier.HOST)
        else:
            self._leave(victim.key, victim.cache, victim.stored)
            with self._lock:
                if self._pins[victim.key]:  # pinned meanwhile
                    return
                if self._kept.get(victim.key) is victim:
                    self._forget(victim.key)
        with self._lock:
            self._counters.evictions[origin] += 1

    @contextmanager
    def _moving(self, kept: TierEntry) -> Iterator[None]:
        """Clear an entry's `moving` flag on exit.

        The caller has set it; until then no other thread moves, replaces or drops the entry.
        """
        try:
            yield
        finally:
            with self._lock:
                kept.moving = False
                self._moved.notify_all()

    def _move(self, kept: TierEntry, moved: Callable[[StepCache], StepCache], to: Tier) -> None:
        """Copy an entry into bytes reserved for it; drop the copy if the entry was replaced."""
        try:
            copy = moved(kept.cache)
        except BaseException:
            self._give_back(to, kept.nbytes)
            raise
        with self._lock:
            gone = self._kept.get(kept.key) is not kept
            self._give_back(to if gone else kept.tier, kept.nbytes)
            if not gone:
                kept.cache, kept.tier = copy, to

    def _leave(self, key: EntryKey, cache: StepCache, stored: bool = False) -> None:
        """Ensure that an entry which leaves memory is on disk; count it as lost otherwise."""
        if not (stored and self._disk.has(key)) and not self._disk.put(key, cache):
            with self._lock:
                self._counters.lost += 1

    def _write(self, kept: TierEntry) -> bool:
        """Write an entry to disk, unless it left memory meanwhile; return True if it is there."""
        with self._lock:
            self._moved.wait_for(lambda: not kept.moving)
            if self._kept.get(kept.key) is not kept:
                return True
            kept.moving = True
        with self._moving(kept):
            kept.stored = self._disk.put(kept.key, kept.cache)
        return kept.stored

    def _pinned(self) -> list[EntryKey]:
        with self._lock:
            return list(self._pins)

    # Under the lock.

    def _use(self, kept: TierEntry, read: bool) -> None:
        kept.used, kept.seen, kept.read = next(self._tick), self._clock(), kept.read or read

    def _is_expired(self, kept: TierEntry) -> bool:
        old = self._ttl is not None and self._clock() - kept.seen > self._ttl
        return old and not self._pins[kept.key]

    def _replace(self, key: EntryKey) -> None:
        """Remove an entry to replace or drop it; reads in flight of it are not inserted."""
        self._moved.wait_for(lambda: key not in self._kept or not self._kept[key].moving)
        self._loading.pop(key, None)
        self._forget(key)

    def _forget(self, key: EntryKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._give_back(kept.tier, kept.nbytes)

    def _give_back(self, tier: Tier, nbytes: int) -> None:
        with self._lock:
            self._counters.nbytes[tier] -= nbytes
