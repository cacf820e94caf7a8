"""Popularity of nets and adapters: which of them stay resident within a limit of bytes.

Decides from uses alone: knows nothing of processes, clocks or torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from math import inf
from typing import Protocol

from maskfx.errors import InputError

FORGOTTEN = 1e-3  # a key whose uses have aged to less is as good as unused


class Popularity(Protocol):
    """Ranks keys by their uses, those of evicted keys included."""

    def use(self, key: Hashable) -> None:
        """Count a use."""
        ...

    def least(self, keys: Collection[Hashable]) -> Hashable:
        """Return the key to evict first."""
        ...


class LeastRecentlyUsed:
    """Evicts the key whose last use is the longest ago."""

    def __init__(self) -> None:
        self._uses = 0
        self._last: dict[Hashable, int] = {}

    def use(self, key: Hashable) -> None:
        self._uses += 1
        self._last[key] = self._uses

    def least(self, keys: Collection[Hashable]) -> Hashable:
        return min(keys, key=lambda key: self._last.get(key, 0))


class LeastFrequentlyUsed:
    """Evicts the key with the fewest uses, where older uses count less.

    Args:
        half_life: The number of uses, of all keys together, after which a use counts half; by
            default uses don't age.
    """

    def __init__(self, half_life: float = inf) -> None:
        if not half_life > 0:
            raise InputError(f"LeastFrequentlyUsed: half_life={half_life!r}: give more than 0 uses")
        self.half_life = half_life
        self._uses = 0
        self._counts: dict[Hashable, tuple[float, int]] = {}  # count at its last use, and when

    def use(self, key: Hashable) -> None:
        self._uses += 1
        self._counts[key] = self.count(key) + 1.0, self._uses
        if self.half_life < inf and self._uses % (1 + int(8 * self.half_life)) == 0:
            for old in [old for old in self._counts if self.count(old) < FORGOTTEN]:
                del self._counts[old]

    def count(self, key: Hashable) -> float:
        """Return the number of uses of a key, each weighted by its age."""
        count, last = self._counts.get(key, (0.0, 0))
        share: float = 0.5 ** ((self._uses - last) / self.half_life)
        return count * share

    def least(self, keys: Collection[Hashable]) -> Hashable:
        """Return the key with the fewest uses; of equal ones, that with the oldest last use."""
        return min(keys, key=lambda key: (self.count(key), self._counts.get(key, (0.0, 0))[1]))


class ResidentSet:
    """The keys that are resident, bounded by bytes.

    Args:
        limit: The bytes of all resident keys together; None sets no limit.
        popularity: Selects the key to evict.
    """

    def __init__(self, limit: int | None, popularity: Popularity) -> None:
        self.limit, self.popularity = limit, popularity
        self._bytes: dict[Hashable, int] = {}
        self._pins: Counter[Hashable] = Counter()

    @property
    def nbytes(self) -> int:
        return sum(self._bytes.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._bytes

    def __len__(self) -> int:
        return len(self._bytes)

    def use(self, key: Hashable) -> bool:
        """Count a use; return True if the key is resident."""
        self.popularity.use(key)
        return key in self._bytes

    def pin(self, key: Hashable) -> None:
        """Exempt a key from eviction, even before it is resident; each pin needs one `unpin`."""
        self._pins[key] += 1

    def unpin(self, key: Hashable) -> None:
        assert self._pins[key] > 0, f"{key} isn't pinned"
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def admit(self, key: Hashable, nbytes: int) -> list[Hashable] | None:
        """Make a key resident and return the evicted ones.

        Return None, and change nothing, if pinned keys leave no room, or if a key that would be
        evicted is more popular than this one.
        """
        if key in self._bytes:
            return []
        evicted: list[Hashable] = []
        idle = [one for one in self._bytes if not self._pins[one]]
        left = self.nbytes + nbytes
        while self.limit is not None and left > self.limit:
            least = self.popularity.least([*idle, key])
            if least == key:
                return None
            idle.remove(least)
            left -= self._bytes[least]
            evicted.append(least)
        for one in evicted:
            del self._bytes[one]
        self._bytes[key] = nbytes
        return evicted

    def remove(self, key: Hashable) -> None:
        """Remove a key; ignore one that isn't resident."""
        self._bytes.pop(key, None)
