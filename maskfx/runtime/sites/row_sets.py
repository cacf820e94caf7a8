"""RowSets: which rows of a batch are active, inactive or missing, for many row sets at once.

The sets of all stretches of a step are found by one search over the sites of all members, and sets
that are equal for all members are found once. Rows count over all sites, member by member and
batch element by batch element; where they lie in memory isn't known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from maskfx.ir.lanes import grid_level, padded
from maskfx.runtime.sites.active import ActiveSites

Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]
Pair = tuple[int, int]  # regions: the sites of the second that the first lacks
SetKey = int | Pair  # of the active or the inactive sites of a region, or of the missing of a pair


@dataclass(frozen=True)
class FoundRows:
    """The rows of several sets.

    Args:
        rows: The rows, one set after the other.
        counts: (sets, batch elements): the number of rows.
        number: Which of the sets belongs to each key; equal sets are found once.
    """

    rows: Ints
    counts: Ints
    number: dict[SetKey, int]


class RowSets:
    """Finds the rows of a batch's sets of sites.

    A base is a segment of image sites without a region. Regions of one base have equally many rows.

    Args:
        sites: The sites of each member.
        batches: The number of batch elements of each member.
    """

    def __init__(self, sites: Sequence[ActiveSites], batches: Sequence[int]) -> None:
        self._sites, self._batches = sites, batches
        self._known: dict[tuple[str, tuple[int, ...]], tuple[Flags, dict[SetKey, int]]] = {}

    @property
    def are_known(self) -> bool:
        """Return False as long as the sites of some stretches aren't chosen."""
        return all(sites.are_known for sites in self._sites)

    def totals(self, base: str) -> list[int]:
        """Return the number of sites of each batch element."""
        pairs = zip(self._sites, self._batches, strict=True)
        return [count for sites, n in pairs for count in repeat(sites.count(base), n)]

    def active(self, base: str, regions: tuple[int, ...]) -> FoundRows:
        """Return the rows of the active sites of these regions; 0 is the mask."""
        flags, number = self._flags(base, regions)
        return self._found(base, flags, number)

    def rest(self, base: str, regions: tuple[int, ...]) -> FoundRows:
        """Return the rows of the inactive sites of these regions."""
        flags, number = self._flags(base, regions)
        return self._found(base, ~flags, number)

    def missing(self, base: str, pairs: Sequence[Pair]) -> FoundRows:
        """Return the rows of sites that are active in the second region of a pair alone."""
        flags, number = self._flags(base, tuple(dict.fromkeys(chain(*pairs))))
        sets = [(number[before], number[after]) for before, after in pairs]
        distinct = {pair: i for i, pair in enumerate(dict.fromkeys(sets))}
        before, after = (list(column) for column in zip(*distinct, strict=True))
        found: dict[SetKey, int] = {
            pair: distinct[own] for pair, own in zip(pairs, sets, strict=True)
        }
        return self._found(base, flags[after] & ~flags[before], found)

    def _flags(self, base: str, regions: tuple[int, ...]) -> tuple[Flags, dict[SetKey, int]]:
        """Return (sets, rows) flags, True for active sites, and the set of each region."""
        key = base, regions
        if key not in self._known:
            alike = list(zip(*(sites.firsts(regions) for sites in self._sites), strict=True))
            distinct = {firsts: i for i, firsts in enumerate(dict.fromkeys(alike))}
            parts = [part for firsts in distinct for part in self._parts(base, firsts)]
            flags = np.concatenate(parts).reshape(len(distinct), -1)
            self._known[key] = flags, {r: distinct[a] for r, a in zip(regions, alike, strict=True)}
        return self._known[key]

    def _parts(self, base: str, regions: Sequence[int]) -> Iterator[Flags]:
        """Yield the flags of each batch element, whose member has this region."""
        level, whole = grid_level(base), padded(base) is not None
        for sites, batch, region in zip(self._sites, self._batches, regions, strict=True):
            if whole:  # padding is active with all sites of the image
                flags = np.full(sites.count(base), sites.full)
            else:
                flags = sites.mask_at((level, region)).flags
            yield from repeat(flags, batch)

    def _found(self, base: str, flags: Flags, number: dict[SetKey, int]) -> FoundRows:
        sets, rows = flags.shape
        places = np.flatnonzero(flags)
        starts = np.cumsum([0, *self.totals(base)[:-1]])
        firsts = np.arange(sets) * rows
        bounds = np.searchsorted(places, (firsts[:, None] + starts).reshape(-1))
        counts = np.diff(bounds, append=len(places)).reshape(sets, -1)
        places -= np.repeat(firsts, counts.sum(1))
        return FoundRows(places, counts, number)
