"""Index tables of a batch: the tables of its calls one after another, shifted to their rows.

The rows of a batch lie by segment, in each segment by request; a call has one request for each
batch element. Cached rows lie by request, for each request by segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from maskfx.export.host.arrays import Index
from maskfx.export.host.sites import Sites
from maskfx.ir.geometry.grids import Floats
from maskfx.ir.geometry.lines import line_table
from maskfx.ir.json_values import Document


class BatchTables:
    """Makes the index tables of one batch.

    Args:
        sites: the active sites of each call.
        batches: the number of requests (batch elements) of each call.
    """

    def __init__(self, sites: Sequence[Sites], batches: Sequence[int]) -> None:
        self.sites, self.batches = tuple(sites), tuple(batches)
        self.layout = self.sites[0].layout

    @property
    def requests(self) -> int:
        return sum(self.batches)

    def each(self) -> Iterator[Sites]:
        """Yield the active sites of each request."""
        for sites, batch in zip(self.sites, self.batches, strict=True):
            for _ in range(batch):
                yield sites

    def counts(self, segment: str) -> list[int]:
        """Return the number of active rows of each request."""
        return [sites.active_count(segment) for sites in self.each()]

    def rest_counts(self, segments: Sequence[str]) -> list[int]:
        """Return the number of cached rows of each request."""
        return [sum(map(sites.rest_count, segments)) for sites in self.each()]

    # Which rows belong to which request.

    def owners(self, segments: Sequence[str]) -> Index:
        """Return, for each row of a row set, the number of its request."""
        numbers = np.arange(self.requests)
        return np.concatenate([np.repeat(numbers, self.counts(name)) for name in segments])

    def rest_owners(self, segments: Sequence[str]) -> Index:
        """Return, for each cached row of the rest of a row set, the number of its request."""
        return np.repeat(np.arange(self.requests), self.rest_counts(segments))

    def calls(self) -> Index:
        """Return, for each request, the number of its call."""
        return np.repeat(np.arange(len(self.batches)), self.batches)

    def call_spans(self) -> Index:
        """Return, for each request, start and stop of the requests of its call."""
        stops = np.cumsum(self.batches)
        spans = np.stack([stops - self.batches, stops], 1)
        return np.repeat(spans, self.batches, 0)

    def spans(self, segments: Sequence[str]) -> Index:
        """Return (requests, 2 * segments): start and stop of each request's rows by segment."""
        out, start = np.zeros((self.requests, 2 * len(segments)), dtype=np.int64), 0
        for column, name in enumerate(segments):
            for request, count in enumerate(self.counts(name)):
                out[request, 2 * column : 2 * column + 2] = start, start + count
                start += count
        return out

    def rest_spans(self, segments: Sequence[str]) -> Index:
        """Return (requests, 2 * segments): start and stop of each request's cached rows."""
        out, start = np.zeros((self.requests, 2 * len(segments)), dtype=np.int64), 0
        for request, sites in enumerate(self.each()):
            for column, name in enumerate(segments):
                count = sites.rest_count(name)
                out[request, 2 * column : 2 * column + 2] = start, start + count
                start += count
        return out

    def lines(self, source: Document) -> Index:
        """Return a table of the lines of a picture or a video."""
        part, axis, window = source["part"], source["axis"], source.get("window", "")
        (name,), rest = source["segments"], part.startswith("rest_")
        return line_table(part, [s.numbered(name, axis, rest, window) for s in self.each()])

    # Which rows a row is made from.

    def neighbours(self, window: str) -> Index:
        """Return a window's indices into [rows of the source | halo | one row of zeros]."""
        segment = f"grid{self.layout.windows[window].source}"
        rows = sum(self.counts(segment))
        halos = sum(len(sites.window(window)[1]) for sites in self.each())
        out, first_row, first_halo = [], 0, rows
        for sites in self.each():
            table, halo = sites.window(window)
            own = sites.active_count(segment)
            shifted = table + np.where(table < own, first_row, first_halo - own)
            shifted[table == own + len(halo)] = rows + halos
            out.append(shifted)
            first_row += own
            first_halo += len(halo)
        return np.concatenate(out)

    def weights(self, window: str) -> Floats:
        """Return the weights of what a window reads for each row of its target level."""
        return np.concatenate([sites.weights(window) for sites in self.each()])

    def parents(self, source: int, target: int) -> Index:
        """Return, for each row of the target level, the row of the source level around it."""
        tables = [sites.parents(source, target) for sites in self.each()]
        return self._shifted(tables, f"grid{source}", 1)

    def subsites(self, coarse: int, fine: int, patch: int) -> Index:
        """Return, for each row of the finer level, its index into (coarse row, patch, patch)."""
        tables = [sites.subsites(coarse, fine, patch) for sites in self.each()]
        return self._shifted(tables, f"grid{coarse}", patch * patch)

    def _shifted(self, tables: Sequence[Index], segment: str, times: int) -> Index:
        starts = np.cumsum([0, *self.counts(segment)])[:-1]
        return np.concatenate([t + n * times for t, n in zip(tables, starts, strict=True)])

    def enter(self, before: Sequence[str], after: Sequence[str]) -> Index:
        """Return, for each row of `after`, its index into [rows of `before` | loaded rows]."""
        totals = [sum(self.counts(name)) for name in before]
        starts, loaded = list(np.cumsum([0, *totals])[:-1]), sum(totals)
        pieces: list[list[Index]] = [[] for _ in after]
        for sites in self.each():
            for j, (old, new) in enumerate(zip(before, after, strict=True)):
                own = sites.active_count(old)
                if self.layout.segments[old].is_image:
                    table, missing = sites.enter(old, new)
                    shift = np.where(table < own, starts[j], loaded - own)
                    pieces[j].append(table + shift)
                    loaded += len(missing)
                else:
                    pieces[j].append(np.arange(starts[j], starts[j] + own))
                starts[j] += own
        return np.concatenate([piece for own in pieces for piece in own])
