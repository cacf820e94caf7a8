"""RowPlaces: where the rows of a batch's members lie in the buffers of a block.

If the sites of all stretches are known, the places of all row sets are found together: those that a
step writes, those of the rest that it reads, and those that a stretch reads because the one before
it lacks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ir.geometry.lanes import is_image
from maskfx.ir.lru import LruCache
from maskfx.ir.programs.program import Interface
from maskfx.ir.programs.sources import Cached, Loaded, Rest
from maskfx.ops import ChosenRows
from maskfx.runtime.cache.rolling.placement import RowPlacement, placed, spans_of
from maskfx.runtime.hardware.devices import moved
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.row_sets import RowSets, SetKey

Group = tuple[str, ...]  # row sets without regions: their taps have equal numbers of rows
Segments = tuple[str, ...]
ALL, NONE = -1, -2  # regions of which all rows are chosen, and none
Picks = Callable[[], Sequence[Tensor]]  # returns the sites that are read of each member


class Batched(Protocol):
    """The members of a batch: their sites, batch elements and rows per element.

    `places` holds where these rows lie. Without `whole`, a member's rows are those of some of its
    active sites.
    """

    @property
    def sites(self) -> Sequence[ActiveSites]: ...

    @property
    def batches(self) -> Sequence[int]: ...

    @property
    def places(self) -> LruCache[object, RowPlaces]: ...

    @property
    def whole(self) -> bool: ...

    def counts(self, segment: str) -> Sequence[int]: ...

    def part(self, member: int, segment: str) -> tuple[int, int]:
        """Return where the rows of a member start and stop among those of its active sites."""
        ...


@dataclass(frozen=True)
class Read:
    """What a source reads.

    Args:
        key: The same for sources that read the same sites of taps of one group.
        group: The group of its tap.
        kind: Of its sets: "rest" or "missing".
        sets: The set that it reads of each segment; empty if they aren't found with others.
    """

    key: int
    group: Group
    kind: str
    sets: tuple[SetKey, ...]


class Regions:
    """The regions whose rows a program reads or writes, and the pairs of which one lacks sites.

    Args:
        interface: The interface of the program.
    """

    def __init__(self, interface: Interface) -> None:
        self._pyramid = interface.pyramid
        self._segments: dict[str, tuple[str, int]] = {}
        self._reads: dict[Cached, Read] = {}
        self._keys: dict[object, int] = {}
        self.groups = {name: self.group_of(tap.segments) for name, tap in interface.taps.items()}
        sets: dict[tuple[str, str], dict[SetKey, None]] = {}
        for tap in interface.taps.values():
            for base, region in map(self.of, filter(is_image, tap.segments)):
                for kind in ("active", "rest"):
                    sets.setdefault((kind, base), {})[region] = None
        for source in interface.inputs.values():
            if isinstance(source, Rest | Loaded) and source.tap in self.groups:
                own = self.read_by(source)
                for base, found in zip(own.group, own.sets, strict=False):
                    sets.setdefault((own.kind, base), {})[found] = None
        self._together = {key: tuple(found) for key, found in sets.items()}
        every: dict[str, set[int]] = {}
        for (_, base), keys in sets.items():
            for key in keys:
                every.setdefault(base, set()).update([key] if isinstance(key, int) else key)
        self._every = {base: tuple(sorted(found)) for base, found in every.items()}

    def of(self, segment: str) -> tuple[str, int]:
        """Return the base of a segment of image sites, and its region."""
        if segment not in self._segments:
            [base] = self._pyramid.base_segments((segment,))
            self._segments[segment] = base, self._pyramid.region_of(segment)
        return self._segments[segment]

    def group_of(self, segments: Sequence[str]) -> Group:
        """Return the image segments without their regions."""
        return tuple(self.of(segment)[0] for segment in segments if is_image(segment))

    def together(self, kind: str, base: str, wanted: SetKey) -> tuple[SetKey, ...]:
        """Return the sets of one kind that are found with this one."""
        found = self._together.get((kind, base), ())
        return found if wanted in found else (wanted,)

    def every(self, base: str) -> tuple[int, ...]:
        """Return all regions of a base whose rows are read or written."""
        return self._every.get(base, ())

    def read_by(self, source: Cached) -> Read:
        """Return what a source reads."""
        if source not in self._reads:
            group, kind, sets = self.groups[source.tap], "", list[SetKey]()
            key: object = source
            if isinstance(source, Rest) and self._fits(source.segments, group):
                kind, key = "rest", (group, source.segments)
                sets = [self.of(segment)[1] for segment in source.segments]
            if isinstance(source, Loaded):
                pairs = zip(source.before, source.after, strict=True)
                images = [pair for pair in pairs if is_image(pair[0])]
                if self._fits([after for _, after in images], group):
                    kind, key = "missing", (group, source.before, source.after)
                    sets = [(self.of(before)[1], self.of(after)[1]) for before, after in images]
            number = self._keys.setdefault(key, len(self._keys))
            self._reads[source] = Read(number, group, kind, tuple(sets))
        return self._reads[source]

    def _fits(self, segments: Sequence[str], group: Group) -> bool:
        return all(map(is_image, segments)) and self.group_of(segments) == group


@dataclass(frozen=True)
class PlacedSets:
    """Sets of rows: the number of each, its places, and its rows by batch element."""

    number: dict[SetKey, int]
    places: Sequence[Tensor]
    counts: list[list[int]]


class RowPlaces:
    """Finds where the rows that a batch writes and reads lie in a block.

    Holds no cache, so that a cache without other references returns its rows to the pool.

    Args:
        regions: The regions of the program.
        layout: The batch.
        numbers: The members that have rows in the block.
        starts: By group, where the rows of each of their batch elements start.
        device: The device of the buffers.
    """

    def __init__(
        self,
        regions: Regions,
        layout: Batched,
        numbers: Sequence[int],
        starts: dict[Group, NDArray[np.int64]],
        device: torch.device,
    ) -> None:
        self._regions, self._layout, self._numbers = regions, layout, numbers
        self._starts, self.device = starts, device
        self._sites = [layout.sites[number] for number in numbers]
        self._batches = [layout.batches[number] for number in numbers]
        self._rows = RowSets(self._sites, self._batches)
        self._all: dict[tuple[Group, int], NDArray[np.int64]] = {}
        self._totals: dict[Group, list[int]] = {}
        self._placed: dict[tuple[str, Group, int], PlacedSets] = {}
        self._written: dict[Segments, RowPlacement] = {}
        self._read: dict[int, Tensor] = {}

    @property
    def are_known(self) -> bool:
        """Return True if the batch has all rows of its members, and their sites are known."""
        return self._layout.whole and self._rows.are_known

    @property
    def complete(self) -> bool:
        """Return True if all members of the batch have rows in the block, and are known."""
        return self.are_known and len(self._numbers) == len(self._layout.batches)

    def chosen(self, group: Group, wanted: Sequence[int], without: Sequence[int]) -> ChosenRows:
        """Return rows of several buffers that are active in one region and not in another.

        Args:
            group: The base of the only segment of the rows.
            wanted: By buffer, the region that has them, or `ALL`.
            without: By buffer, the region that lacks them, or `NONE`.
        """
        flags, number = self._rows.flags(group[0], self._regions.every(group[0]))
        numbers = {**number, ALL: len(flags) - 2, NONE: len(flags) - 1}
        sets = ([numbers[region] for region in own] for own in (wanted, without))
        return ChosenRows(flags, self._places_of(group, 0), *map(np.array, sets))

    def written(self, segments: Segments) -> RowPlacement:
        """Return which rows of a row set are written, and where."""
        if segments not in self._written:
            self._written[segments] = self._placement(segments)
        return self._written[segments]

    def read(self, source: Cached, picks: Picks) -> Tensor:
        """Return the places of the rows of a source, of one batch element after the other.

        Args:
            source: A source that reads a tap of this block.
            picks: Returns the sites that it reads of each member, in the concatenated segments.
        """
        own = self._regions.read_by(source)
        found = self._read.get(own.key)
        if found is None:
            if own.sets and self._layout.whole:
                numbered = enumerate(own.sets)
                found = joined([self._rows_of(own.kind, own.group, i, s)[0] for i, s in numbered])
            else:
                found = self._picked(own.group, picks())
            self._read[own.key] = found
        return found

    def _picked(self, group: Group, picks: Sequence[Tensor]) -> Tensor:
        repeated = zip(self._numbers, self._batches, strict=True)
        chosen = [picks[number] for number, batch in repeated for _ in range(batch)]
        places = placed(chosen, [len(index) for index in chosen], self._starts[group])
        return moved(places, self.device)

    def _placement(self, segments: Segments) -> RowPlacement:
        group = self._regions.group_of(segments)
        parts: list[Tensor] = []
        sizes: list[int] = []
        source: list[tuple[int, int]] = []
        at = 0
        for segment in segments:
            if not is_image(segment):
                at += sum(self._layout.counts(segment))
                continue
            region = self._regions.of(segment)[1]
            places, counts = self._rows_of("active", group, len(parts), region)
            if not self._layout.whole:
                places, counts = self._here(segment, places, counts)
            parts.append(places)
            sizes += counts
            spans, at = self._spans(segment, at, len(places))
            source += spans
        first = slice(*source[0]) if source else slice(0)
        place = RowPlacement(first, joined(parts), sizes, self._batches, self._totals_of(group))
        if len(source) < 2:
            return place
        index = torch.cat([torch.arange(*span) for span in source])
        return replace(place, source=moved(index, self.device))

    def _here(
        self, segment: str, places: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Return those of the active rows that this process has, and how many of each element."""
        spans = [self._layout.part(number, segment) for number in self._numbers]
        each = [span for span, n in zip(spans, self._batches, strict=True) for _ in range(n)]
        parts = zip(places.split(list(counts)), each, strict=True)
        return torch.cat([own[slice(*span)] for own, span in parts]), [b - a for a, b in each]

    def _totals_of(self, group: Group) -> list[int]:
        """Return the number of rows of a batch element of each member."""
        if group not in self._totals:
            self._totals[group] = [sum(map(sites.count, group)) for sites in self._sites]
        return self._totals[group]

    def _spans(self, segment: str, at: int, written: int) -> tuple[list[tuple[int, int]], int]:
        """Return the spans of the members' rows of a segment among those of the batch.

        Also returns where the next segment starts.
        """
        layout = self._layout
        if len(self._numbers) == len(layout.batches):
            return [(at, at + written)] if written else [], at + written
        parts = [layout.part(number, segment) for number in range(len(layout.batches))]
        rows = [(b - a) * n for (a, b), n in zip(parts, layout.batches, strict=True)]
        spans = spans_of(rows, self._numbers, at)
        return [span for span in spans if span[0] < span[1]], at + sum(rows)

    def _rows_of(
        self, kind: str, group: Group, segment: int, wanted: SetKey
    ) -> tuple[Tensor, list[int]]:
        """Return the places of a set's rows, and how many each batch element has.

        Args:
            kind: "active", "rest" or "missing".
            group: The base of each image segment of a tap.
            segment: The number of the segment.
            wanted: The set.
        """
        key = kind, group, segment
        found = self._placed.get(key)
        if found is None or wanted not in found.number:
            found = self._placed[key] = self._find(kind, group, segment, wanted)
        number = found.number[wanted]
        return found.places[number], found.counts[number]

    def _find(self, kind: str, group: Group, segment: int, wanted: SetKey) -> PlacedSets:
        base = group[segment]
        asked: tuple[SetKey, ...] = (wanted,)
        if self._rows.are_known:
            asked = self._regions.together(kind, base, wanted)
            self._rows.flags(base, self._regions.every(base))  # once for all kinds
        sets = getattr(self._rows, kind)(base, asked)
        places = torch.from_numpy(self._places_of(group, segment).take(sets.rows))
        parts = moved(places, self.device).split(sets.counts.sum(1).tolist())
        return PlacedSets(sets.number, parts, sets.counts.tolist())

    def _places_of(self, group: Group, segment: int) -> NDArray[np.int64]:
        """Return the place of each site of a segment of each batch element."""
        if (group, segment) not in self._all:
            totals = [self._rows.totals(base) for base in group]
            own, first = totals[segment], self._starts[group].copy()
            for before in totals[:segment]:
                first += before
            shift = (first - own.cumsum() + own).repeat(own)
            self._all[group, segment] = shift + np.arange(len(shift))
        return self._all[group, segment]


def joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
