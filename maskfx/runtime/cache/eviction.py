"""Which entry in memory is evicted to make room. Pure functions of entries; no locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from maskfx.runtime.cache.stores.store_entry import EntryKey
from maskfx.runtime.cache.tier_entry import Tier, TierEntry

PROTECTED = 0.75  # share of a tier that entries which were read keep from sparing ones


def least_used(
    entries: Iterable[TierEntry],
    tier: Tier,
    pinned: Callable[[EntryKey], object],
    budget: int,
    spared: str | None = None,
) -> TierEntry | None:
    """Return the least recently used entry that may leave a tier; None without one.

    Args:
        entries: All entries in memory.
        tier: The tier.
        pinned: Returns whether an entry is pinned.
        budget: The bytes of the tier.
        spared: The template that needs the room, if it is one that may never be read: its own
            entries stay, and so do those that were read, the latest first, up to a share of the
            tier.
    """
    free = (e for e in entries if e.tier is tier and not e.moving and not pinned(e.key))
    if spared is None:
        return min(free, key=lambda entry: entry.used, default=None)
    room, unprotected = PROTECTED * budget, list[TierEntry]()
    for entry in sorted(free, key=lambda entry: -entry.used):
        if entry.key.template == spared:
            continue
        if entry.read and room >= entry.nbytes:
            room -= entry.nbytes
        else:
            unprotected.append(entry)
    return unprotected[-1] if unprotected else None
