"""TierEntry, an entry in memory with its tier and last use, and the counters of all entries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stores.store_entry import EntryKey


class Tier(Enum):
    """The memory in which an entry lies, or was found."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class FoundStep:
    """A recorded step, and the tier in which the lookup found it."""

    cache: StepCache
    tier: Tier


@dataclass
class TierEntry:
    """One entry in memory."""

    key: EntryKey
    cache: StepCache
    nbytes: int
    tier: Tier
    stored: bool  # on disk too, as far as known
    used: int = 0  # tick of the last use, for eviction
    seen: float = 0.0  # time of the last use in seconds, for the time to live
    read: bool = False  # since it was put
    moving: bool = False


@dataclass
class TierCounters:
    """Counts of events so far, and the bytes that each tier in memory holds now."""

    hits: Counter[Tier] = field(default_factory=Counter)
    evictions: Counter[Tier] = field(default_factory=Counter)
    nbytes: Counter[Tier] = field(default_factory=Counter)
    misses: int = 0
    loads: int = 0  # reads from disk
    shared: int = 0  # lookups that waited for a read in flight
    expired: int = 0
    corrupt: int = 0  # entries on disk that were damaged, or can't be decoded
    read_bytes: int = 0  # from disk, of whole entries and of rows
    read_seconds: float = 0.0  # in which at least one read ran
    lost: int = 0  # left memory and couldn't be written
