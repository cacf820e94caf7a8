"""Places: where the rows of a batch's members lie in the buffers of a block.

If the sites of all stretches are known, the places of all row sets are found together: those that a
step writes, those of the rest that it reads, and those that a stretch reads because the one before
it lacks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ir.lanes import is_image
from maskfx.ir.lru import LruCache
from maskfx.ir.program import Interface
from maskfx.ir.sources import Cached, Loaded, Rest
from maskfx.runtime.cache.placement import Placement, placed, spans_of
from maskfx.runtime.devices import moved
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.row_sets import FoundRows, Pair, RowSets, SetKey

Group = tuple[str, ...]  # row sets without regions: their taps have equal numbers of rows
Segments = tuple[str, ...]
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
    def places(self) -> LruCache[object, Places]: ...

    @property
    def whole(self) -> bool: ...

    def counts(self, segment: str) -> Sequence[int]: ...


class Regions:
    """The regions whose rows a program reads or writes, and the pairs of which one lacks sites.

    Args:
        interface: The interface of the program.
    """

    def __init__(self, interface: Interface) -> None:
        self._pyramid = interface.pyramid
        self._known: dict[str, tuple[str, int]] = {}
        self.groups = {name: self.group_of(tap.segments) for name, tap in interface.taps.items()}
        alone: dict[str, dict[int, None]] = {}
        pairs: dict[str, dict[Pair, None]] = {}
        sources = list(interface.inputs.values())
        read = [source.segments for source in sources if isinstance(source, Rest)]
        for segments in [*read, *(tap.segments for tap in interface.taps.values())]:
            for base, region in map(self.of, filter(is_image, segments)):
                alone.setdefault(base, {})[region] = None
        for before, after in (pair for s in sources if isinstance(s, Loaded) for pair in loaded(s)):
            (base, old), (_, new) = self.of(before), self.of(after)
            pairs.setdefault(base, {})[old, new] = None
        self._alone = {base: tuple(found) for base, found in alone.items()}
        self._pairs = {base: tuple(found) for base, found in pairs.items()}

    def of(self, segment: str) -> tuple[str, int]:
        """Return the base of a segment of image sites, and its region."""
        if segment not in self._known:
            [base] = self._pyramid.base_segments((segment,))
            self._known[segment] = base, self._pyramid.region_of(segment)
        return self._known[segment]

    def group_of(self, segments: Sequence[str]) -> Group:
        """Return the image segments without their regions."""
        return tuple(self.of(segment)[0] for segment in segments if is_image(segment))

    def sets(self, kind: str, base: str) -> Sequence[SetKey]:
        """Return the sets of one kind that are found together."""
        return (self._pairs if kind == "missing" else self._alone).get(base, ())


def loaded(source: Loaded) -> list[tuple[str, str]]:
    """Return the image segments before and after, in pairs."""
    pairs = zip(source.before, source.after, strict=True)
    return [(before, after) for before, after in pairs if is_image(before)]


@dataclass(frozen=True)
class PlacedSets:
    """Sets of rows, and the places of each."""

    sets: FoundRows
    places: Sequence[Tensor]


class Places:
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
        self._starts, self._device = starts, device
        self._sites = [layout.sites[number] for number in numbers]
        self._batches = [layout.batches[number] for number in numbers]
        self._rows = RowSets(self._sites, self._batches)
        self._known = False
        self._all: dict[tuple[Group, int], NDArray[np.int64]] = {}
        self._placed: dict[tuple[object, ...], PlacedSets] = {}
        self._written: dict[Segments, Placement] = {}
        self._read: dict[object, Tensor] = {}

    def written(self, segments: Segments) -> Placement:
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
        group, key = self._regions.groups[source.tap], without_tap(source)
        if key not in self._read:
            sets = self._sets_of(source, group) if self._layout.whole else []
            found = [self._placed_rows(kind, group, i, own) for i, (kind, own) in enumerate(sets)]
            self._read[key] = joined(found) if sets else self._picked(group, picks())
        return self._read[key]

    def _sets_of(self, source: Cached, group: Group) -> list[tuple[str, SetKey]]:
        """Return the kind and the set that a source reads of each segment.

        Return nothing for a source whose sites aren't found together with others.
        """
        of = self._regions.of
        sets: list[tuple[str, SetKey]]
        match source:
            case Rest(_, segments) if all(map(is_image, segments)):
                sets = [("rest", of(segment)[1]) for segment in segments]
            case Loaded(_, _, segments):
                pairs = loaded(source)
                sets = [("missing", (of(old)[1], of(new)[1])) for old, new in pairs]
            case _:
                return []
        return sets if self._regions.group_of(segments) == group else []

    def _picked(self, group: Group, picks: Sequence[Tensor]) -> Tensor:
        repeated = zip(self._numbers, self._batches, strict=True)
        chosen = [picks[number] for number, batch in repeated for _ in range(batch)]
        places = placed(chosen, [len(index) for index in chosen], self._starts[group])
        return moved(places, self._device)

    def _placement(self, segments: Segments) -> Placement:
        group = self._regions.group_of(segments)
        parts: list[Tensor] = []
        sizes: list[int] = []
        source: list[tuple[int, int]] = []
        at, image = 0, 0
        for segment in segments:
            if not is_image(segment):
                at += sum(self._layout.counts(segment))
                continue
            region = self._regions.of(segment)[1]
            parts.append(self._placed_rows("active", group, image, region))
            sizes += self._counts("active", group, image, region)
            spans, at = self._spans(segment, at, len(parts[-1]))
            source += spans
            image += 1
        first = slice(*source[0]) if source else slice(0)
        totals = [sum(map(sites.count, group)) for sites in self._sites]
        place = Placement(first, joined(parts), sizes, self._batches, totals)
        if len(source) < 2:
            return place
        index = torch.cat([torch.arange(*span) for span in source])
        return replace(place, source=moved(index, self._device))

    def _spans(self, segment: str, at: int, written: int) -> tuple[list[tuple[int, int]], int]:
        """Return the spans of the members' rows of a segment among those of the batch.

        Also returns where the next segment starts.
        """
        layout = self._layout
        if len(self._numbers) == len(layout.batches):
            return [(at, at + written)] if written else [], at + written
        members = zip(layout.sites, layout.batches, strict=True)
        rows = [sites.active_count(segment) * batch for sites, batch in members]
        spans = spans_of(rows, self._numbers, at)
        return [span for span in spans if span[0] < span[1]], at + sum(rows)

    def _placed_rows(self, kind: str, group: Group, segment: int, wanted: SetKey) -> Tensor:
        found = self._found(kind, group, segment, wanted)
        return found.places[found.sets.number[wanted]]

    def _counts(self, kind: str, group: Group, segment: int, wanted: SetKey) -> list[int]:
        sets = self._found(kind, group, segment, wanted).sets
        counts: list[int] = sets.counts[sets.number[wanted]].tolist()
        return counts

    def _found(self, kind: str, group: Group, segment: int, wanted: SetKey) -> PlacedSets:
        """Return the places of sets of a kind, this one among them.

        Args:
            kind: "active", "rest" or "missing".
            group: The base of each image segment of a tap.
            segment: The number of the segment.
            wanted: The region or the pair of regions.
        """
        self._known = self._known or self._rows.are_known
        base = group[segment]
        together = self._regions.sets(kind, base) if self._known else ()
        key = kind, group, segment, *(() if wanted in together else (wanted,))
        if key not in self._placed:
            find = {"active": self._rows.active, "rest": self._rows.rest}
            asked: Any = together if wanted in together else (wanted,)
            sets = find.get(kind, self._rows.missing)(base, asked)
            places = torch.from_numpy(self._places_of(group, segment).take(sets.rows))
            sizes = sets.counts.sum(1).tolist()
            self._placed[key] = PlacedSets(sets, moved(places, self._device).split(sizes))
        return self._placed[key]

    def _places_of(self, group: Group, segment: int) -> NDArray[np.int64]:
        """Return the place of each site of a segment of each batch element."""
        if (group, segment) not in self._all:
            totals = [np.array(self._rows.totals(base)) for base in group]
            first = self._starts[group] + sum(totals[:segment], np.zeros(1, np.int64))
            own = totals[segment]
            shift = np.repeat(first - np.cumsum(own) + own, own)
            self._all[group, segment] = shift + np.arange(len(shift))
        return self._all[group, segment]


def joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def without_tap(source: Cached) -> object:
    """Return a key that is equal for sources of equal places, of one group of taps."""
    match source:
        case Rest(_, segments):
            return segments
        case Loaded(_, before, after):
            return before, after
    return source
