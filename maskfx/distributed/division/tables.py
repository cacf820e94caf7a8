"""Tables of what ranks exchange, made from the rows that each rank has and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from maskfx.ir.programs.sources import Reader, Subsites


@dataclass
class TableRead:
    """What one rank's part of a table of one member picks.

    Args:
        table: The part, with places in [rows | extra | zero].
        rows: The rows that it picks, by their number among the member's active rows.
        extra: The cached rows that it picks, by their number among those of the whole table.
    """

    table: Tensor
    rows: Tensor
    extra: Tensor


def read_part(table: Tensor, rows: int, extra: int) -> TableRead:
    """Return what a part of a table reads.

    Args:
        table: The part, with places in [`rows` rows | `extra` cached rows | one zero row].
        rows: The number of rows.
        extra: The number of cached rows.
    """
    picked = torch.unique(table)
    fresh = picked[picked < rows]
    cached = picked[(picked >= rows) & (picked < rows + extra)]
    code = torch.zeros(rows + extra + 1, dtype=torch.long)
    code[fresh] = torch.arange(len(fresh))
    code[cached] = torch.arange(len(fresh), len(fresh) + len(cached))
    code[rows + extra] = len(fresh) + len(cached)
    return TableRead(code[table], fresh, cached - rows)


class BatchRows(Protocol):
    """Where the rows of a batch lie: a `RankLayout`."""

    def starts(self, segments: tuple[str, ...]) -> tuple[list[list[int]], int]: ...


def owners_of(layout: BatchRows, segments: tuple[str, ...], rows: Tensor) -> Tensor:
    """Return the owner of each of some rows, given by their indices in the whole batch."""
    starts = torch.tensor(layout.starts(segments)[0])
    owners = torch.arange(starts.shape[1]).repeat(len(segments))
    return owners[torch.searchsorted(starts.flatten(), rows, right=True) - 1]


def received_rows(
    held: Sequence[Tensor], needed: Sequence[Tensor], total: int
) -> list[list[Tensor]]:
    """Return the rows that each rank receives of each, from the first rank that has them.

    Args:
        held: By rank, the rows that it has, of `total`.
        needed: By rank, the rows that it reads.
        total: The number of rows of the whole batch.
    """
    first = torch.full((total,), len(held))
    for other in reversed(range(len(held))):
        first[held[other]] = other
    found = []
    for own, rows in zip(held, needed, strict=True):
        has = torch.zeros(total, dtype=torch.bool)
        has[own] = True
        missing = rows[~has[rows]]
        found.append([missing[first[missing] == source] for source in range(len(held))])
    return found


def exchange_tables(
    held: Sequence[Tensor], needed: Sequence[Tensor], rank: int, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return send, counts and order of one rank, see `ops.exchange`.

    Args:
        held: By rank, the rows that it has, of `total`.
        needed: By rank, the rows that it reads.
        rank: The rank.
        total: The number of rows of the whole batch.
    """
    every = received_rows(held, needed, total)
    sent, received = [rows[rank] for rows in every], every[rank]
    place = torch.zeros(total, dtype=torch.long)
    place[held[rank]] = torch.arange(len(held[rank]))
    send = place[torch.cat(sent)]
    arrived = torch.cat(received)
    place[arrived] = torch.arange(len(held[rank]), len(held[rank]) + len(arrived))
    counts = torch.tensor([list(map(len, sent)), list(map(len, received))])
    return send, counts, place[needed[rank]]


def merge_tables(
    held: Sequence[Tensor], read: Sequence[Tensor], rank: int, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return send, counts and order of one rank, see `ops.merge_parts`.

    Args:
        held: By rank, the queries whose results it needs, of `total`.
        read: By rank, the queries that it has a partial result of.
        rank: The rank.
        total: The number of queries of the whole batch.
    """
    ranks = range(len(held))
    partial = torch.zeros(len(held), total, dtype=torch.bool)
    for other, rows in enumerate(read):
        partial[other, rows] = True

    def common(source: int, reader: int) -> Tensor:
        rows = held[reader]
        return rows[partial[source, rows]] if source != reader else rows[:0]

    place = torch.zeros(total, dtype=torch.long)
    place[read[rank]] = torch.arange(len(read[rank]))
    sent = [common(rank, other) for other in ranks]
    received = [common(other, rank) for other in ranks]
    counts = torch.tensor([list(map(len, sent)), list(map(len, received))])
    send = place[torch.cat(sent)]
    at = len(read[rank])
    nothing = at + sum(map(len, received))
    order = torch.full((len(held), len(held[rank])), nothing)
    for other in ranks:
        rows = held[rank]
        if other == rank:
            order[other] = place[rows]
            continue
        mine = partial[other, rows]
        order[other, mine] = torch.arange(at, at + int(mine.sum()))
        at += int(mine.sum())
    return send, counts, order


def scale_of(reader: Reader | None) -> int:
    """Return how many rows a reader counts for each row of its row set."""
    return reader.patch * reader.patch if isinstance(reader, Subsites) else 1


def scaled(rows: Tensor, scale: int) -> Tensor:
    """Return the numbers of the parts of each row, if each is cut into `scale` parts."""
    return rows if scale == 1 else (rows[:, None] * scale + torch.arange(scale)).flatten()
