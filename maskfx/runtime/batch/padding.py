"""PaddedFrame: a frame's inputs with row counts from a few sizes, so that captured graphs fit.

Requests, the rows of each segment and loaded rows are padded at their ends. Rows of padding belong
to a request of padding, which is in no span and whose rows no table points to, so that no row of
the batch depends on them. Operators that read spans on the host leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from maskfx.ir.geometry.lanes import Batch, Lane, fixed_count, grid_segment
from maskfx.ir.programs.program import Interface
from maskfx.ir.programs.source_sizes import row_set
from maskfx.ir.programs.sources import (
    Adapted,
    CallSpans,
    Enter,
    Given,
    Halo,
    Lines,
    Loaded,
    Neighbours,
    Owner,
    Parents,
    RestSpans,
    RestStats,
    RestSum,
    Source,
    Spans,
    Subsites,
    Weights,
)
from maskfx.runtime.backends.graph_function import Fetch
from maskfx.runtime.batch.frame import Frame

LEAST = 16  # rows
STEPS = 4  # sizes between two powers of two: at most a quarter of the rows is padding
KNOWN = ("image", "grid", "text")  # segments whose rows may be padded, beside fixed ones


def padded_size(count: int, least: int = LEAST) -> int:
    """Return the smallest of the sizes that holds this number of rows; none stay none."""
    if count <= least:
        return least if count else 0
    step = max(1, (1 << (count - 1).bit_length()) // (2 * STEPS))
    return -(-count // step) * step


def can_pad(interface: Interface) -> bool:
    """Return True if the inputs of a program can be padded; those of adapters and lines can't."""
    unpadded = (Adapted, Lines)
    segments = {s for source in interface.inputs.values() for s in segments_of(source)}
    known = all(s.startswith(KNOWN) or fixed_count(s) is not None for s in segments)
    return known and not any(isinstance(s, unpadded) for s in interface.inputs.values())


def segments_of(source: Source) -> tuple[str, ...]:
    """Return the segments of an input's rows or spans, in their order."""
    return source.segments if isinstance(source, Spans) else row_set(source)


class PaddedFrame:
    """The padded inputs of the batches of one frame, and results without padding."""

    def __init__(self, frame: Frame) -> None:
        # not the frame, which its padding must not keep
        self.interface, self.layout = frame.interface, frame.layout
        self.requests = sum(frame.layout.batches)
        self.padded_requests = padded_size(self.requests + 1, 2)
        self._tables: dict[str, Tensor] = {}

    def fetch(self, fetch: Fetch) -> Callable[[str], Tensor]:
        """Return a function that gives padded inputs; `fetch` gives those of the frame."""
        return lambda name: self.pad(name, fetch)

    def pad(self, name: str, fetch: Fetch) -> Tensor:
        source = self.interface.inputs.get(name)  # of packed rows there is none
        match source:
            case (
                Owner()
                | Spans()
                | RestSpans()
                | CallSpans()
                | Neighbours()
                | Weights()
                | Parents()
                | Subsites()
                | Enter()
            ):
                if name not in self._tables:
                    self._tables[name] = self._table(source, fetch(name))
                return self._tables[name]
            case Given(_, _, lane) if lane.kind == "rows":
                return self._rows(fetch(name), lane.segments)
            case Given(_, _, lane) if lane.kind == "sample":
                return self._samples(fetch(name), lane)
            case Halo() | Loaded():
                rows = fetch(name)
                return to_length(rows, padded_size(len(rows)))
            case RestStats() | RestSum():
                return to_length(fetch(name), self.padded_requests)
        return fetch(name)

    def strip(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return a graph's results without the rows of padding."""
        lanes = self.interface.outputs
        found = []
        for lane, rows in zip(lanes, outputs, strict=True):
            assert lane is not None
            if lane.kind != "rows":  # one value for each request: those of padding come last
                found.append(rows)
                continue
            parts = [
                rows[start : start + self._count(segment)]
                for segment, start in zip(lane.segments, self._starts(lane.segments), strict=True)
            ]
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return found

    # Numbers of rows.

    def _count(self, segment: str) -> int:
        return sum(self.layout.counts(segment))

    def _padded(self, segment: str) -> int:
        fixed = fixed_count(segment)
        if fixed is not None:
            return fixed * self.padded_requests
        return padded_size(self._count(segment))

    def _starts(self, segments: Sequence[str]) -> list[int]:
        """Return where the rows of each segment begin."""
        starts, at = [], 0
        for segment in segments:
            starts.append(at)
            at += self._padded(segment)
        return starts

    # Inputs.

    def _rows(self, rows: Tensor, segments: Sequence[str], value: int = 0) -> Tensor:
        """Return rows with padding behind each segment."""
        parts = rows.split([self._count(s) for s in segments])
        wide = [to_length(p, self._padded(s), value) for p, s in zip(parts, segments, strict=True)]
        return wide[0] if len(wide) == 1 else torch.cat(wide)

    def _samples(self, value: Tensor, lane: Lane) -> Tensor:
        """Return values of requests with zeros for those of padding."""
        axis = next(i for i, dim in enumerate(lane.dims) if Batch() in dim)
        each = lane.features(axis)
        more = (self.padded_requests - self.requests) * each
        sizes = [0, 0] * (value.dim() - 1 - axis) + [0, more]
        return F.pad(value, sizes)

    def _table(self, source: Source, table: Tensor) -> Tensor:
        segments = segments_of(source)
        match source:
            case Owner():
                return self._rows(table, segments, self.requests)
            case Spans():
                return to_length(table + self._shifts(segments), self.padded_requests)
            case RestSpans() | CallSpans():
                return to_length(table, self.padded_requests)
            case Neighbours(window):
                rows = grid_segment(window.source)
                moved = self._moved(table, (rows,))
                zero = self._padded(rows) + padded_size(self._halo(source))
                moved = torch.where(table == self._count(rows) + self._halo(source), zero, moved)
                return self._rows(moved, segments, zero)
            case Enter(before, _):
                return self._rows(self._moved(table, before), segments)
        return self._rows(table, segments)

    def _halo(self, source: Neighbours) -> int:
        """Return the number of halo rows behind the rows that windows read."""
        each = [len(s.window(source.window)[1]) for s in self.layout.sites]
        return sum(n * batch for n, batch in zip(each, self.layout.batches, strict=True))

    def _shifts(self, segments: Sequence[str]) -> Tensor:
        """Return how far the rows of each segment move, for starts and stops."""
        at, shifts = 0, []
        for segment, start in zip(segments, self._starts(segments), strict=True):
            shifts += [start - at] * 2
            at += self._count(segment)
        return torch.tensor(shifts, dtype=torch.long)

    def _moved(self, table: Tensor, segments: Sequence[str]) -> Tensor:
        """Return indices into [rows of these segments | more rows] after padding."""
        at = 0
        moved = table
        starts = [*self._starts(segments), sum(map(self._padded, segments))]
        for segment, start in zip([*segments, None], starts, strict=True):
            moved = torch.where(table >= at, table + (start - at), moved)
            at += self._count(segment) if segment is not None else 0
        return moved


def to_length(rows: Tensor, length: int, value: int = 0) -> Tensor:
    """Return rows with further rows of one value."""
    if len(rows) == length:
        return rows
    more = rows.new_full((length - len(rows), *rows.shape[1:]), value)
    return torch.cat([rows, more])
