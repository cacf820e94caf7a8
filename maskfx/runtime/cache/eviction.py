"""Which entry in memory is evicted to make room. Pure functions of entries; no locks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from maskfx.runtime.cache.stores.store_entry import EntryKey
from maskfx.runtime.cache.tier_entry import Tier, TierEntry

PROTECTED = 0.5  # share of a tier that templates which were read keep from a spared one


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
            entries stay, and so do templates that were read, the latest first, until they take a
            share of the tier.
    """
    free = [e for e in entries if e.tier is tier and not e.moving and not pinned(e.key)]
    if spared is None:
        return min(free, key=lambda entry: entry.used, default=None)
    kept, latest = {spared, *in_use(free, PROTECTED * budget)}, Counter[str]()
    for entry in free:  # a template that has lost an entry is of no use: one after the other goes
        latest[entry.key.template] = max(entry.used, latest[entry.key.template])
    free = [entry for entry in free if entry.key.template not in kept]
    return min(free, key=lambda entry: (latest[entry.key.template], entry.used), default=None)


def in_use(entries: Sequence[TierEntry], share: float) -> list[str]:
    """Return the template that was read last, and those before that fit in a share with it."""
    nbytes, used = Counter[str](), dict[str, int]()
    for entry in entries:
        template = entry.key.template
        nbytes[template] += entry.nbytes
        if entry.read:
            used[template] = max(entry.used, used.get(template, 0))
    latest = sorted(used, key=lambda name: -used[name])
    taken = accumulate(nbytes[template] for template in latest)
    return latest[: max(1, sum(total <= share for total in taken))]
