"""Tables of the heads of attentions that ranks divide; see `maskfx.ir.programs.head_sources`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.tables import exchange_tables, scaled
from maskfx.ir.programs.head_sources import ByHead, HeadRestSpans, HeadSpans
from maskfx.ir.programs.sources import RestSpans
from maskfx.runtime.sites.active import ActiveSites

Segments = tuple[str, ...]
HeadTable = ByHead | HeadSpans | HeadRestSpans
Tables = dict[object, tuple[Tensor, Tensor, Tensor]]


class HeadRows(Protocol):
    """The rows of one rank: a `RankLayout`."""

    partition: Partition
    rank: int

    def owners(self) -> Iterator[tuple[int, ActiveSites]]: ...

    def starts(self, segments: Segments) -> tuple[list[list[int]], int]: ...

    def positions(self, segments: Segments, rank: int) -> Tensor: ...

    def table(self, source: object) -> Tensor: ...


def head_table(source: HeadTable, layout: HeadRows, known: Tables) -> Tensor:
    """Return a table for a rank; the three of an exchange are made once, and kept in `known`."""
    match source:
        case ByHead(part, segments, heads, back):
            key = segments, heads, back
            if key not in known:
                known[key] = head_exchange(layout, segments, heads, back)
            return known[key][("send", "counts", "order").index(part)]
        case HeadSpans(segments, heads):
            counts = [sum(map(sites.active_count, segments)) for _, sites in layout.owners()]
            return unit_spans(counts, [len(own) for own in own_heads(layout, heads)])
        case HeadRestSpans(segments, heads):
            spans = layout.table(RestSpans(segments))
            counts = (spans[:, 1::2] - spans[:, ::2]).sum(1).tolist()
            return unit_spans(counts, [len(own) for own in own_heads(layout, heads)])


def head_exchange(
    layout: HeadRows, segments: Segments, heads: int, back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return send, counts and order of one rank, see `ops.to_heads` and `ops.from_heads`."""
    bases, total = layout.starts(segments)
    rows: list[Tensor] = []
    for (_, sites), starts in zip(layout.owners(), zip(*bases, strict=True), strict=True):
        pairs = zip(segments, starts, strict=True)
        rows.append(torch.cat([torch.arange(at, at + sites.active_count(s)) for s, at in pairs]))
    ranks = range(layout.partition.ranks)
    by_row = [scaled(layout.positions(segments, rank), heads) for rank in ranks]
    by_head = [units(rows, own_heads(layout, heads, rank), heads) for rank in ranks]
    held, needed = (by_head, by_row) if back else (by_row, by_head)
    return exchange_tables(held, needed, layout.rank, total * heads)


def own_heads(layout: HeadRows, heads: int, rank: int | None = None) -> list[range]:
    """Return, by owner, a rank's share of the heads."""
    number = layout.rank if rank is None else rank
    return [
        range(*layout.partition.stretch(member, number, heads)) for member, _ in layout.owners()
    ]


def units(rows: list[Tensor], own: list[range], heads: int) -> Tensor:
    """Return the units of these rows of each owner, head by head."""
    found = [torch.arange(0)]
    for some, mine in zip(rows, own, strict=True):
        numbers = torch.arange(mine.start, mine.stop)
        found.append((some * heads + numbers[:, None]).flatten())
    return torch.cat(found)


def unit_spans(counts: list[int], heads: list[int]) -> Tensor:
    """Return start and stop of the units of each owner and head."""
    each = [count for count, number in zip(counts, heads, strict=True) for _ in range(number)]
    ends = list(accumulate(each))
    pairs = list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2)
