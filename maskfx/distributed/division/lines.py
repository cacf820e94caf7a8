"""Tables of the lines of a picture or a video for the rows of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.tables import TableRead
from maskfx.ir.geometry.lanes import of_each
from maskfx.ir.geometry.lines import line_table
from maskfx.ir.programs.sources import Lines, Neighbours, Reader, ReadLines, SameLines
from maskfx.runtime.batch.lines import numbered
from maskfx.runtime.sites.active import ActiveSites


class RankRows(Protocol):
    """The rows of one rank: a `RankLayout`."""

    partition: Partition
    rank: int

    def owners(self) -> Iterator[tuple[int, ActiveSites]]: ...

    def stretch(self, member: int, segment: str, rank: int) -> tuple[int, int]: ...

    def read(self, reader: Reader, member: int, rank: int, segment: int = 0) -> TableRead: ...


def rank_lines(source: Lines | ReadLines, layout: RankRows) -> Tensor:
    """Return a table of lines about the rows of a rank, or about those after an exchange.

    Lines have the same numbers on all ranks, and on a rank without rows of a line it is empty.
    """
    lines = source if isinstance(source, Lines) else source.lines
    found = []
    for member, sites in layout.owners():
        numbers, count = numbered(lines, sites)
        if isinstance(source, ReadLines):
            own = rows_read(source, layout, member)
        else:
            own = own_rows(source, layout, member)
        found.append((numbers[own if isinstance(own, slice) else own.numpy()], count))
    return torch.from_numpy(line_table(lines.part, found))


def own_rows(source: Lines, layout: RankRows, member: int) -> slice | Tensor:
    """Return a rank's rows of a member, or the cached ones that it loads."""
    (segment,) = source.segments
    each = of_each(segment)
    if each is not None:  # a row of each token for each frame
        frames, tokens = each
        return slice(*(frames * place for place in layout.stretch(member, tokens, layout.rank)))
    if not source.part.startswith("rest_"):
        return slice(*layout.stretch(member, segment, layout.rank))
    if source.window is not None:
        return layout.read(Neighbours(source.window), member, layout.rank).extra
    return slice(None if layout.partition.has_part(member, layout.rank) else 0)


def rows_read(source: ReadLines, layout: RankRows, member: int) -> slice | Tensor:
    """Return the rows of a member that a rank has after an exchange, or loads."""
    if source.reader is None:
        return slice(None if layout.partition.has_part(member, layout.rank) else 0)
    read = layout.read(source.reader, member, layout.rank)
    return read.extra if source.lines.part.startswith("rest_") else read.rows


def read_same_lines(reader: SameLines, sites: ActiveSites, start: int, stop: int) -> TableRead:
    """Return the rows, and the cached rows, in the lines of some of a target's rows."""
    parts = ("owner", reader.target), ("owner", reader.source), ("rest_owner", reader.source)
    own, rows, rest = (
        torch.from_numpy(numbered(Lines(part, (segment,), reader.axis), sites)[0])
        for part, segment in parts
    )
    found = [torch.isin(lines, own[start:stop]).nonzero().flatten() for lines in (rows, rest)]
    return TableRead(torch.arange(0), *found)
