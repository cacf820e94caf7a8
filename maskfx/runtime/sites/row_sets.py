"""RowSets: which rows of a batch are active, inactive or missing, for many row sets at once.

The sets of all stretches of a step are found by one search over the sites of all members, and sets
that are equal for all members are found once. Rows count over all sites, member by member and
batch element by batch element; where they lie in memory isn't known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

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
        self._totals: dict[str, Ints] = {}
        self._known: dict[str, tuple[Flags, dict[SetKey, int]]] = {}  # by base

    @property
    def are_known(self) -> bool:
        """Return False as long as the sites of some stretches aren't chosen."""
        return all(sites.are_known for sites in self._sites)

    def totals(self, base: str) -> Ints:
        """Return the number of sites of each batch element."""
        if base not in self._totals:
            counts = [sites.count(base) for sites in self._sites]
            self._totals[base] = np.repeat(np.array(counts, np.int64), self._batches)
        return self._totals[base]

    def active(self, base: str, regions: tuple[int, ...]) -> FoundRows:
        """Return the rows of the active sites of these regions; 0 is the mask."""
        flags, number = self.flags(base, regions)
        return self._found(base, flags[:-2], number)

    def rest(self, base: str, regions: tuple[int, ...]) -> FoundRows:
        """Return the rows of the inactive sites of these regions."""
        flags, number = self.flags(base, regions)
        return self._found(base, ~flags[:-2], number)

    def missing(self, base: str, pairs: Sequence[Pair]) -> FoundRows:
        """Return the rows of sites that are active in the second region of a pair alone."""
        flags, number = self.flags(base, tuple(dict.fromkeys(chain(*pairs))))
        sets = [(number[before], number[after]) for before, after in pairs]
        distinct = {pair: i for i, pair in enumerate(dict.fromkeys(sets))}
        before, after = (list(column) for column in zip(*distinct, strict=True))
        found: dict[SetKey, int] = {
            pair: distinct[own] for pair, own in zip(pairs, sets, strict=True)
        }
        return self._found(base, flags[after] & ~flags[before], found)

    def flags(self, base: str, regions: tuple[int, ...]) -> tuple[Flags, dict[SetKey, int]]:
        """Return (sets, rows) flags, True for active sites, and the set of each region.

        Two more sets follow: one of all rows, and one of none.
        """
        known = self._known.get(base)
        if known is not None and known[1].keys() >= set(regions):
            return known
        alike = list(zip(*(sites.firsts(regions) for sites in self._sites), strict=True))
        distinct = {firsts: i for i, firsts in enumerate(dict.fromkeys(alike))}
        columns = zip(self._sites, self._batches, zip(*distinct, strict=True), strict=True)
        each = [own for sites, n, of in columns for own in repeat(sites.flags(base, of), n)]
        found = b"".join(chain.from_iterable(zip(*each, strict=True)))
        rows = len(found) // max(len(distinct), 1)
        flags = np.frombuffer(found + b"\1" * rows + bytes(rows), bool)
        number: dict[SetKey, int] = {r: distinct[a] for r, a in zip(regions, alike, strict=True)}
        self._known[base] = flags.reshape(len(distinct) + 2, -1), number
        return self._known[base]

    def _found(self, base: str, flags: Flags, number: dict[SetKey, int]) -> FoundRows:
        (sets, rows), totals = flags.shape, self.totals(base)
        places, firsts = np.flatnonzero(flags), np.arange(sets) * rows
        starts = totals.cumsum() - totals
        bounds = places.searchsorted((firsts[:, None] + starts).reshape(-1))
        counts = np.diff(bounds, append=len(places)).reshape(sets, -1)
        places -= firsts.repeat(counts.sum(1))
        return FoundRows(places, counts, number)
