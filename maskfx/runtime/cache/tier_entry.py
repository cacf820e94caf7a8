"""An entry in memory: where it lies, since when; and what is counted of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.store_entry import EntryKey


class Tier(Enum):
    """Where an entry lies, or was found."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class FoundStep:
    """A recorded step, and where it was when it was asked for."""

    cache: StepCache
    tier: Tier


@dataclass
class TierEntry:
    """One entry in memory."""

    key: EntryKey
    cache: StepCache
    nbytes: int
    tier: Tier
    stored: bool  # the disk has it too, as far as we know
    used: int = 0  # ticks, for the order
    seen: float = 0.0  # seconds, for the time to live
    moving: bool = False


@dataclass
class TierCounters:
    """What happened so far, and the bytes that each tier in memory holds now."""

    hits: Counter[Tier] = field(default_factory=Counter)
    evictions: Counter[Tier] = field(default_factory=Counter)
    nbytes: Counter[Tier] = field(default_factory=Counter)
    misses: int = 0
    loads: int = 0  # reads from disk
    shared: int = 0  # callers who waited for a read that was under way
    expired: int = 0
    corrupt: int = 0
    lost: int = 0  # left memory and could not be written
