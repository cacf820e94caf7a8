"""RankLayout: where the rows of one rank lie, made from the layout of the whole batch.

Every rank makes the tables of all ranks from masks, sizes and shares alone, so that ranks agree on
what they exchange without asking each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from maskfx.distributed.division.head_tables import head_table
from maskfx.distributed.division.lines import rank_lines, read_same_lines
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.tables import (
    TableRead,
    exchange_tables,
    merge_tables,
    owners_of,
    read_part,
    scale_of,
    scaled,
)
from maskfx.ir.geometry.lanes import fixed_count, is_image, is_text
from maskfx.ir.programs.sources import (
    ByHead,
    Cached,
    Enter,
    Exchanged,
    Halo,
    HeadRestSpans,
    HeadShare,
    HeadSpans,
    Kept,
    KeySpans,
    Lines,
    Loaded,
    Merged,
    Neighbours,
    Owner,
    OwnSpans,
    Parents,
    Peers,
    Places,
    Reader,
    ReadLines,
    ReadOwner,
    ReadSpans,
    Rest,
    RestShare,
    RestShareSpans,
    SameLines,
    Subsites,
)
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.sites.active import ActiveSites

Segments = tuple[str, ...]


@dataclass
class RankLayout(Layout):
    """The rows of one rank.

    Args:
        partition: The ranks' shares of the members.
        rank: The rank.
    """

    partition: Partition = field(default_factory=lambda: Partition(((1.0,),)))
    rank: int = 0
    _reads: dict[Hashable, TableRead] = field(default_factory=dict)
    _own: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _exchanges: dict[object, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    # Rows of a rank.

    @property
    def whole(self) -> bool:
        return False

    def owners(self) -> Iterator[tuple[int, ActiveSites]]:
        """Yield the member and the sites of each batch element."""
        for member, (sites, batch) in enumerate(zip(self.sites, self.batches, strict=True)):
            for _ in range(batch):
                yield member, sites

    def stretch(self, member: int, segment: str, rank: int) -> tuple[int, int]:
        """Return where a rank's rows of a member start and stop among the active ones."""
        count = self.sites[member].active_count(segment)
        if is_image(segment):
            return self.partition.stretch(member, rank, count)
        if fixed_count(segment) is not None:
            return 0, count  # what is made of a request's values is made on all ranks
        return self.partition.text(member, rank, count)

    def part(self, member: int, segment: str) -> tuple[int, int]:
        return self.stretch(member, segment, self.rank)

    def counts(self, segment: str) -> list[int]:
        """Return the number of this rank's rows of each owner."""
        stretches = [self.stretch(m, segment, self.rank) for m, _ in self.owners()]
        return [stop - start for start, stop in stretches]

    def starts(self, segments: Segments) -> tuple[list[list[int]], int]:
        """Return by segment where each owner's rows start in the whole batch, and their number."""
        counts = [[s.active_count(segment) for _, s in self.owners()] for segment in segments]
        ends = list(accumulate(n for row in counts for n in row))
        flat = iter([0, *ends])
        return [[next(flat) for _ in row] for row in counts], ends[-1] if ends else 0

    def positions(self, segments: Segments, rank: int) -> Tensor:
        """Return the index in the whole batch of each row of a rank."""
        out = [torch.arange(0)]
        for segment, row in zip(segments, self.starts(segments)[0], strict=True):
            for (member, _), base in zip(self.owners(), row, strict=True):
                start, stop = self.stretch(member, segment, rank)
                out.append(torch.arange(base + start, base + stop))
        return torch.cat(out)

    # What a rank reads.

    def read(self, reader: Reader, member: int, rank: int, segment: int = 0) -> TableRead:
        """Return what a rank's part of a table picks; an Enter has one for each segment."""
        key = reader, member, rank, segment
        if key not in self._reads:
            self._reads[key] = self._read(reader, member, rank, segment)
        return self._reads[key]

    def _read(self, reader: Reader, member: int, rank: int, segment: int) -> TableRead:
        sites, extra = self.sites[member], 0
        match reader:
            case Neighbours(window):
                source, target = f"grid{window.source}", f"grid{window.target}"
                table, halo = sites.window(window)
                rows, extra = sites.active_count(source), len(halo)
            case Parents(coarse, fine):
                target, rows = f"grid{fine}", sites.active_count(f"grid{coarse}")
                table = sites.parents(coarse, fine)
            case Subsites(coarse, fine, patch):
                target, rows = f"grid{fine}", sites.active_count(f"grid{coarse}") * patch * patch
                table = sites.subsites(coarse, fine, patch)
            case SameLines(_, _, target):
                return read_same_lines(reader, sites, *self.stretch(member, target, rank))
            case Enter(before, after):
                source, target = before[segment], after[segment]
                rows = sites.active_count(source)
                if is_image(source):
                    table, missing = sites.enter(source, target)
                    extra = len(missing)
                else:
                    table = torch.arange(rows)
        start, stop = self.stretch(member, target, rank)
        return read_part(table[start:stop], rows, extra)

    def _needed_rows(self, segments: Segments, reader: Reader | None, rank: int) -> Tensor:
        """Return the index in the whole batch of each row that a rank reads, in order."""
        scale = scale_of(reader)
        out = [torch.arange(0)]
        for j, (segment, row) in enumerate(zip(segments, self.starts(segments)[0], strict=True)):
            for (member, sites), base in zip(self.owners(), row, strict=True):
                if reader is None:
                    whole = self.partition.has_part(member, rank)
                    count = sites.active_count(segment) if whole else 0
                    out.append(torch.arange(base, base + count))
                else:
                    out.append(self.read(reader, member, rank, j).rows + base * scale)
        return torch.cat(out)

    def exchange(self, segments: Segments, reader: Reader | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tables of this rank's part in an exchange: send, counts, order."""
        key = segments, reader
        if key not in self._exchanges:
            held, needed, total = self.exchanged(segments, reader)
            self._exchanges[key] = exchange_tables(held, needed, self.rank, total)
        return self._exchanges[key]

    def exchanged(
        self, segments: Segments, reader: Reader | None
    ) -> tuple[list[Tensor], list[Tensor], int]:
        """Return by rank the rows that it has, and those that it reads; and the number of all."""
        total, scale = self.starts(segments)[1], scale_of(reader)
        ranks = range(self.partition.ranks)
        held = [scaled(self.positions(segments, rank), scale) for rank in ranks]
        needed = [self._needed_rows(segments, reader, rank) for rank in ranks]
        return held, needed, total * scale

    def merge(self, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tables by which this rank's partial results are returned and merged."""
        key = "merge", segments
        if key not in self._exchanges:
            ranks = range(self.partition.ranks)
            held = [self.positions(segments, rank) for rank in ranks]
            read = [self._needed_rows(segments, None, rank) for rank in ranks]
            total = self.starts(segments)[1]
            self._exchanges[key] = merge_tables(held, read, self.rank, total)
        return self._exchanges[key]

    # Tables.

    def on_host(self, source: object) -> bool:
        match source:
            case Exchanged() | Merged() | ByHead():
                return source.part == "counts"
            case ReadLines(lines):
                return super().on_host(lines)
        return isinstance(source, ON_HOST) or super().on_host(source)

    def table(self, source: object) -> Tensor:
        match source:
            case Owner(segments):
                each = torch.arange(sum(self.batches))
                counts = (torch.tensor(self.counts(s), dtype=torch.long) for s in segments)
                return torch.cat(list(map(each.repeat_interleave, counts)))
            case Exchanged(part, segments, reader):
                return self.exchange(segments, reader)[PARTS.index(part)]
            case Merged(part, segments):
                return self.merge(segments)[PARTS.index(part)]
            case ReadOwner(segments, reader):
                return owners_of(self, segments, self._needed_rows(segments, reader, self.rank))
            case ReadSpans(segments):
                return self._spans([self._read_counts(s) for s in segments])
            case KeySpans(segments):
                return self._spans_of_own(segments, lambda m: self.rank == self.partition.holder(m))
            case OwnSpans(segments):
                return self._spans_of_own(segments, lambda _: False)
            case Places(segments):
                read = self._needed_rows(segments, None, self.rank)
                return torch.searchsorted(read, self.positions(segments, self.rank))
            case Peers():
                return torch.tensor(self.partition.peers(self.rank), dtype=torch.long)
            case RestShareSpans(segments):
                return self._spans_by_owner(
                    [
                        [stop - start for start, stop in map(self._share(m), segments)]
                        for m, _ in self.owners()
                    ]
                )
            case Neighbours() | Parents() | Subsites():
                return self._picking(source)
            case Lines() | ReadLines():
                return rank_lines(source, self)
            case ByHead() | HeadSpans() | HeadRestSpans():
                return head_table(source, self, self._exchanges)
        return super().table(source)

    def _read_counts(self, segment: str) -> list[int]:
        return [
            s.active_count(segment) if self.partition.has_part(m, self.rank) else 0
            for m, s in self.owners()
        ]

    def _spans_of_own(self, segments: Segments, holds: Callable[[int], bool]) -> Tensor:
        """Return spans of this rank's rows, without those that others have too if it holds none."""
        spans = self._spans([self.counts(s) for s in segments])
        for owner, (member, _) in enumerate(self.owners()):
            shared = self.partition.texts[member]
            for j, segment in enumerate(segments):
                whole = not is_image(segment) and not (shared and is_text(segment))
                if whole and not holds(member):
                    spans[owner, 2 * j + 1] = spans[owner, 2 * j]
        return spans

    def _spans_by_owner(self, counts: list[list[int]]) -> Tensor:
        """Return spans of rows that lie owner by owner, each by segment."""
        ends = list(accumulate(n for row in counts for n in row))
        pairs = list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []
        return torch.tensor(pairs, dtype=torch.long).view(sum(self.batches), -1)

    def _rest_spans(self, segments: Segments) -> Tensor:
        return self._spans_by_owner(
            [
                [
                    s.count(n) - s.active_count(n) if self.partition.has_part(m, self.rank) else 0
                    for n in segments
                ]
                for m, s in self.owners()
            ]
        )

    def _picking(self, reader: Reader) -> Tensor:
        """Return this rank's part of a table, with places in [rows read | cached | zero]."""
        reads = [self.read(reader, m, self.rank) for m, _ in self.owners()]
        rows = sum(len(read.rows) for read in reads)
        cached = sum(len(read.extra) for read in reads)
        out, row, extra = [torch.zeros(0, dtype=torch.long)], 0, rows
        for read in reads:
            own, more = len(read.rows), len(read.extra)
            moved = read.table + torch.where(read.table < own, row, extra - own)
            moved[read.table == own + more] = rows + cached
            out.append(moved)
            row, extra = row + own, extra + more
        return torch.cat(out[1:] if len(out) > 1 else out)

    def _enter(self, before: Segments, after: Segments) -> Tensor:
        """Return an Enter's table: rows of `before` lie by segment, loaded ones by owner."""
        reader = Enter(before, after)
        owners = [m for m, _ in self.owners()]
        reads = [[self.read(reader, m, self.rank, j) for m in owners] for j in range(len(before))]
        rows = sum(len(read.rows) for row in reads for read in row)
        loaded = [[len(row[o].extra) for row in reads] for o in range(len(owners))]
        bases = [
            [span[2 * j] for span in self._spans_by_owner(loaded).tolist()]
            for j in range(len(before))
        ]
        out, start = [], 0
        for row, base in zip(reads, bases, strict=True):
            for read, extra in zip(row, base, strict=True):
                own = len(read.rows)
                out.append(read.table + torch.where(read.table < own, start, rows + extra - own))
                start += own
        return torch.cat(out)

    # Rows of arguments and of the cache.

    def heads(self, member: int, count: int) -> range:
        return range(*self.partition.stretch(member, self.rank, count))

    def index(self, member: int, segment: str) -> Tensor | None:
        start, stop = self.stretch(member, segment, self.rank)
        if stop - start == self.sites[member].count(segment):
            return None
        key = member, segment
        if key not in self._own:
            self._own[key] = self.sites[member].active(segment)[start:stop]
        return self._own[key]

    def picks(self, source: Cached) -> list[Tensor]:
        """Return, for each member, the indices of the cached rows that this rank loads."""
        match source:
            case Halo(_, window):
                return self._extras(Neighbours(window), lambda s: s.window(window)[1])
            case Loaded(_, before, after):
                return [self._loaded(m, before, after) for m in range(len(self.sites))]
            case RestShare(_, (segment,), SameLines() as lines):
                return self._extras(lines, lambda s: s.rest(segment))
            case RestShare(_, segments):
                return [s.laid_out(segments, self._rest_part(m)) for m, s in enumerate(self.sites)]
            case Rest() | Kept() | HeadShare():
                own = [self.partition.has_part(m, self.rank) for m in range(len(self.sites))]
                picks = zip(own, super().picks(source), strict=True)
                return [index if there else index[:0] for there, index in picks]
        raise AssertionError(f"no rows are picked for {source}")

    def _extras(self, reader: Reader, cached: Callable[[ActiveSites], Tensor]) -> list[Tensor]:
        """Return, for each member, those of the cached rows that a reader reads."""
        reads = (self.read(reader, member, self.rank) for member in range(len(self.sites)))
        return [cached(s)[read.extra] for s, read in zip(self.sites, reads, strict=True)]

    def _loaded(self, member: int, before: Segments, after: Segments) -> Tensor:
        sites, out, base = self.sites[member], [torch.arange(0)], 0
        for j, (old, new) in enumerate(zip(before, after, strict=True)):
            if is_image(old):
                extra = self.read(Enter(before, after), member, self.rank, j).extra
                out.append(sites.enter(old, new)[1][extra] + base)
                base += sites.count(old) if len(before) > 1 else 0
        return torch.cat(out)

    def _share(self, member: int) -> Callable[[str], tuple[int, int]]:
        """Return a function that gives where this rank's share of a segment's rest lies."""
        sites = self.sites[member]

        def share(segment: str) -> tuple[int, int]:
            count = sites.count(segment) - sites.active_count(segment)
            return self.partition.stretch(member, self.rank, count)

        return share

    def _rest_part(self, member: int) -> Callable[[str], Tensor]:
        sites, share = self.sites[member], self._share(member)

        def part(segment: str) -> Tensor:
            start, stop = share(segment)
            return sites.rest(segment)[start:stop]

        return part

    def _order_here(
        self, member: int, sites: ActiveSites, segments: Segments, keys: bool
    ) -> Tensor:
        """Return the sources of this rank's queries, or of the keys that it reads."""
        if keys:
            whole = self._order_of(sites, segments, True)
            return whole if self.partition.has_part(member, self.rank) else whole[:0]
        out, base = [torch.arange(0)], 0
        for segment in segments:
            start, stop = self.stretch(member, segment, self.rank)
            out.append(sites.active(segment)[start:stop] + base)
            base += sites.count(segment)
        return torch.cat(out)


PARTS = ("send", "counts", "order")
ON_HOST = ReadSpans | KeySpans | OwnSpans | RestShareSpans | HeadSpans | HeadRestSpans | Peers
