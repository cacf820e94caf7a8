"""Layout: where the rows of a ragged batch lie, and the tables that depend on that alone.

A ragged batch concatenates the rows of members with different numbers of active sites. All tables
here are on the host and are computed once per batch of the same masks and sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from maskfx.ir.geometry.lanes import is_image
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.lru import LruCache
from maskfx.ir.programs.sources import (
    Cached,
    Calls,
    CallSpans,
    Enter,
    Halo,
    HeadShare,
    Kept,
    Lines,
    Loaded,
    Neighbours,
    Owner,
    Parents,
    Requests,
    Rest,
    RestOwner,
    RestShare,
    RestSpans,
    Spans,
    Subsites,
    Weights,
)
from maskfx.runtime.batch.lines import lines_table
from maskfx.runtime.cache.rolling.places import RowPlaces
from maskfx.runtime.sites.active import ActiveSites

PLACES = 4  # members and places of their rows in buffers for which tables are kept


@dataclass
class Layout:
    """The rows of a batch.

    Args:
        sites: The active sites of each member.
        batches: The number of batch elements, also called owners, of each member.
    """

    sites: tuple[ActiveSites, ...]
    batches: tuple[int, ...]
    places: LruCache[object, RowPlaces] = field(default_factory=lambda: LruCache(PLACES))
    _indices: dict[tuple[str, ...], list[Tensor]] = field(default_factory=dict)
    _active: dict[tuple[str, ...], list[Tensor]] = field(default_factory=dict)
    _orders: dict[tuple[object, ...], list[Tensor]] = field(default_factory=dict)
    _counts: dict[tuple[str, ...], list[tuple[int, ...]]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Return True if the batch has all active rows of its members."""
        return True

    def counts(self, segment: str) -> list[int]:
        """Return the number of active rows of each owner."""
        return [
            s.active_count(segment)
            for s, b in zip(self.sites, self.batches, strict=True)
            for _ in range(b)
        ]

    def part(self, member: int, segment: str) -> tuple[int, int]:
        """Return where the rows of a member start and stop among those of its active sites."""
        return 0, self.sites[member].active_count(segment)

    def index(self, member: int, segment: str) -> Tensor | None:
        """Return the indices of a member's rows in a segment of its own, None if it has all."""
        sites = self.sites[member]
        return None if sites.full or not is_image(segment) else sites.active(segment)

    def heads(self, member: int, count: int) -> range:
        """Return the heads of keys, of this number, of which a member's are read here."""
        return range(count)

    def on_host(self, source: object) -> bool:
        """Return True for tables that Python reads."""
        if isinstance(source, Lines):
            return source.part.endswith("spans")
        return isinstance(source, (Spans, RestSpans, CallSpans))

    def row_counts(self, segments: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return the rows of each owner by segment; without segments, one row for each."""
        if segments not in self._counts:
            found = [tuple(self.counts(s)) for s in segments]
            self._counts[segments] = found or [(1,) * sum(self.batches)]
        return self._counts[segments]

    def active(self, segments: tuple[str, ...]) -> list[Tensor]:
        """Return, for each member, the indices of its active sites in the concatenated segments."""
        if segments not in self._active:
            self._active[segments] = [s.laid_out(segments, s.active) for s in self.sites]
        return self._active[segments]

    def picks(self, source: Cached) -> list[Tensor]:
        """Return, for each member, the indices of the cached rows that are loaded."""
        match source:
            case Halo(_, window):
                return [s.window(window)[1] for s in self.sites]
            case Rest(_, segments) | HeadShare(_, segments):
                if segments not in self._indices:
                    self._indices[segments] = [s.laid_out(segments, s.rest) for s in self.sites]
                return self._indices[segments]
            case Loaded(_, before, after):
                return [self._loaded_index(s, before, after) for s in self.sites]
            case Kept(_, segments):
                return [
                    s.laid_out(
                        segments, s.active if any(map(len, map(s.rest, segments))) else s.rest
                    )
                    for s in self.sites
                ]
            case RestShare():
                raise AssertionError("shares of the rest are picked by the frame of a rank")

    def _loaded_index(
        self, sites: ActiveSites, before: tuple[str, ...], after: tuple[str, ...]
    ) -> Tensor:
        out, base = [], 0
        for old, new in zip(before, after, strict=True):
            if is_image(old):
                missing = sites.enter(old, new)[1]
                out.append(missing + base if base else missing)
                base += sites.count(old) if len(before) > 1 else 0
        return out[0] if len(out) == 1 else torch.cat(out)

    def order(self, segments: tuple[str, ...], with_rest: bool) -> list[Tensor]:
        """Return, per member, the sources of a joint axis' rows: active ones, then the rest."""
        key = segments, with_rest
        if key not in self._orders:
            self._orders[key] = [
                self._order_here(m, s, segments, with_rest) for m, s in enumerate(self.sites)
            ]
        return self._orders[key]

    def _order_here(
        self, member: int, sites: ActiveSites, segments: tuple[str, ...], keys: bool
    ) -> Tensor:
        return self._order_of(sites, segments, keys)

    def _order_of(self, sites: ActiveSites, segments: tuple[str, ...], with_rest: bool) -> Tensor:
        active, rest, base = [torch.arange(0)], [], 0
        for segment in segments:
            active.append(sites.active(segment) + base)
            if with_rest and is_image(segment):
                rest.append(sites.rest(segment) + base)
            base += sites.count(segment)
        return torch.cat([*active, *rest])

    def table(self, source: object) -> Tensor:
        """Return the table that an input of a graph is."""
        match source:
            case Owner(segments):
                count = sum(self.batches)
                if count == 1:
                    rows = sum(self.sites[0].active_count(s) for s in segments)
                    return torch.zeros(rows, dtype=torch.long)
                each = torch.arange(count)
                return torch.cat(
                    [each.repeat_interleave(torch.tensor(self.counts(s))) for s in segments]
                )
            case Spans(segments):
                return self._spans([self.counts(s) for s in segments])
            case RestSpans(segments):
                return self._rest_spans(segments)
            case Requests():
                return torch.arange(sum(self.batches))
            case Calls():
                numbers = torch.arange(len(self.batches))
                return numbers.repeat_interleave(torch.tensor(self.batches))
            case CallSpans():
                stops = torch.tensor(self.batches).cumsum(0)
                starts = stops - torch.tensor(self.batches)
                spans = torch.stack([starts, stops], 1)
                return spans.repeat_interleave(torch.tensor(self.batches), 0)
            case RestOwner(segments):
                spans = self._rest_spans(segments)
                counts = (spans[:, 1::2] - spans[:, ::2]).sum(1)
                return torch.arange(len(spans)).repeat_interleave(counts)
            case Enter(before, after):
                return self._enter(before, after)
            case Neighbours(window):
                return self._neighbours(window)
            case Weights(window):
                return self._weights(window)
            case Lines():
                pairs = zip(self.sites, self.batches, strict=True)
                return lines_table(source, [s for s, batch in pairs for _ in range(batch)])
            case Parents(source_level, target):
                return self._offset(
                    [s.parents(source_level, target) for s in self.sites],
                    f"grid{source_level}",
                    1,
                )
            case Subsites(coarse, fine, patch):
                return self._offset(
                    [s.subsites(coarse, fine, patch) for s in self.sites],
                    f"grid{coarse}",
                    patch * patch,
                )
        raise AssertionError(f"no way to build {source}")

    def _spans(self, counts: list[list[int]]) -> Tensor:
        owners = sum(self.batches)
        out, start = [[0] * (2 * len(counts)) for _ in range(owners)], 0
        for i, segment in enumerate(counts):
            for owner, n in enumerate(segment):
                out[owner][2 * i], out[owner][2 * i + 1] = start, start + n
                start += n
        return torch.tensor(out, dtype=torch.long).view(owners, -1)

    def _rest_spans(self, segments: tuple[str, ...]) -> Tensor:
        """Return the spans of the rest (inactive sites): owner by owner, each by segment."""
        out, start = [], 0
        for sites, batch in zip(self.sites, self.batches, strict=True):
            for _ in range(batch):
                row = []
                for segment in segments:
                    n = sites.count(segment) - sites.active_count(segment)
                    row += [start, start + n]
                    start += n
                out.append(row)
        return torch.tensor(out, dtype=torch.long).view(sum(self.batches), -1)

    def _enter(self, before: tuple[str, ...], after: tuple[str, ...]) -> Tensor:
        """Return an Enter's table: rows of `before` lie by segment, loaded ones by owner."""
        starts, at = [], 0
        for segment in before:
            starts.append(at)
            at += sum(self.counts(segment))
        pieces: list[list[Tensor]] = [[] for _ in after]
        for sites, batch in zip(self.sites, self.batches, strict=True):
            for _ in range(batch):
                for j, (old, new) in enumerate(zip(before, after, strict=True)):
                    own = sites.active_count(old)
                    if is_image(old):
                        table, missing = sites.enter(old, new)
                        pieces[j].append(table + torch.where(table < own, starts[j], at - own))
                        at += len(missing)
                    else:
                        pieces[j].append(torch.arange(starts[j], starts[j] + own))
                    starts[j] += own
        return torch.cat([p for piece in pieces for p in piece])

    def _neighbours(self, window: Window) -> Tensor:
        tables = [s.window(window) for s in self.sites]
        if sum(self.batches) == 1:
            return tables[0][0]
        segment = f"grid{window.source}"
        rows = sum(self.counts(segment))
        halos = sum(len(h) * b for (_, h), b in zip(tables, self.batches, strict=True))
        out, base_row, base_halo = [], 0, rows
        for sites, batch, (table, halo) in zip(self.sites, self.batches, tables, strict=True):
            own = sites.active_count(segment)
            for _ in range(batch):
                shift = torch.where(table < own, base_row, base_halo - own)
                moved = table + shift
                moved[table == own + len(halo)] = rows + halos
                out.append(moved)
                base_row += own
                base_halo += len(halo)
        return torch.cat(out)

    def _weights(self, window: Window) -> Tensor:
        out = []
        for member, (sites, batch) in enumerate(zip(self.sites, self.batches, strict=True)):
            index, whole = self.index(member, f"grid{window.target}"), sites.weights(window)
            out += [whole if index is None else whole[index]] * batch
        return out[0] if len(out) == 1 else torch.cat(out)

    def _offset(self, tables: list[Tensor], segment: str, scale: int) -> Tensor:
        if sum(self.batches) == 1:
            return tables[0]
        out, base = [], 0
        for sites, batch, table in zip(self.sites, self.batches, tables, strict=True):
            for _ in range(batch):
                out.append(table + base * scale)
                base += sites.active_count(segment)
        return torch.cat(out)
