"""The predicted time of a step for a way to divide it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from maskfx import ops
from maskfx.compiler.rank_twins import SplitProgram
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.work import Work, rank_flops
from maskfx.ir.geometry.lanes import fixed_count, is_image, is_text
from maskfx.ir.geometry.lines import is_apart
from maskfx.ir.programs.sources import ByHead, Exchanged, Neighbours, Reader, SameLines
from maskfx.runtime.batch.member import Member


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a program that is split.

    Args:
        count: Their number.
        whole: For those in which each rank reads (nearly) all rows: the row set, and the bytes of a
            row.
            The others send border rows or a few numbers, which count as nothing.
        heads: For those that divide heads.
    """

    count: int
    whole: tuple[tuple[tuple[str, ...], int], ...]
    heads: tuple[HeadExchange, ...] = ()


@dataclass(frozen=True)
class HeadExchange:
    """What ranks send each other of an attention whose heads they divide.

    Args:
        segments: The row set.
        heads: The number of heads of keys.
        width: The bytes of a unit.
        back: Whether it returns results.
    """

    segments: tuple[str, ...]
    heads: int
    width: int
    back: bool


def exchanges_of(
    split: SplitProgram, widths: Mapping[str, int], some: Collection[int] | None = None
) -> Exchanges:
    """Return the exchanges of a program.

    Args:
        split: The program.
        widths: The bytes of a row of the values of the whole program's graph, by name.
        some: The numbers of those that count; by default all.
    """
    whole, heads = [], []
    for node in split.program.module.graph.nodes:
        if node.target not in (ops.exchange, ops.to_heads, ops.from_heads):
            continue
        if some is not None and node.args[-1] not in some:
            continue
        source = split.exchanges[node.args[-1]]
        values: list[fx.Node] = node.args[0]
        if isinstance(source, ByHead):
            names = [node.meta["origin"]] if source.back else [value.name for value in values]
            width = sum(map(widths.__getitem__, names)) // source.heads
            heads.append(HeadExchange(source.segments, source.heads, width, source.back))
            continue
        assert isinstance(source, Exchanged)
        if reads_all(source.reader):
            whole.append((source.segments, sum(widths[value.name] for value in values)))
    count = len(split.exchanges if some is None else some)
    return Exchanges(count, tuple(whole), tuple(heads))


def reads_all(reader: Reader | None) -> bool:
    """Return True if ranks read nearly all rows: of lines that lie across their shares, too."""
    match reader:
        case SameLines(axis):
            return is_apart(axis)
        case Neighbours(window):
            return window.depth > 1 and window.kernel == (1, 1)  # each place in all frames
    return reader is None


def step_seconds(
    exchanges: Exchanges,
    members: Sequence[Member],
    work: Sequence[Work],
    partition: Partition,
    costs: LinkCosts,
    flop: float,
) -> float:
    """Return the seconds that the slowest rank takes, without those that all ways have in common.

    Args:
        exchanges: Those of the program.
        members: The members of the batch.
        work: Their FLOPs.
        partition: The ranks' shares of them.
        costs: What exchanges cost.
        flop: Seconds per FLOP of a rank.
    """
    return max(
        flop * (rank_flops(work, partition, rank) + uneven(exchanges, work, partition, rank))
        + costs.exchange * exchanges.count * bool(partition.peers(rank))
        + costs.send * sent_bytes(exchanges, members, partition, rank)
        for rank in range(partition.ranks)
    )


def sent_bytes(
    exchanges: Exchanges, members: Sequence[Member], partition: Partition, rank: int
) -> int:
    """Return the bytes of the rows that a rank sends where others read all of them."""
    total = 0
    for number, member in enumerate(members):
        others = sum(share > 0 for share in partition.shares[number]) - 1
        if not partition.has_part(number, rank) or not others:
            continue
        for segments, width in exchanges.whole:
            rows = sum(own_rows(segment, member, number, partition, rank) for segment in segments)
            total += rows * width * others * member.batch
        for sent in exchanges.heads:
            total += head_units(sent, member, number, partition, rank) * sent.width * member.batch
    return total


def head_units(
    sent: HeadExchange, member: Member, number: int, partition: Partition, rank: int
) -> int:
    """Return the number of units of a member that a rank sends."""
    start, stop = partition.stretch(number, rank, sent.heads)
    by_rank = [
        sum(own_rows(segment, member, number, partition, other) for segment in sent.segments)
        for other in range(partition.ranks)
    ]
    if not sent.back:
        return by_rank[rank] * (sent.heads - (stop - start))
    # all ranks with a part need the results of rows that each of them has
    each = sum(map(member.sites.active_count, sent.segments)) - sum(by_rank)
    others = sum(share > 0 for share in partition.shares[number]) - 1
    return (sum(by_rank) - by_rank[rank] + each * others) * (stop - start)


def uneven(exchanges: Exchanges, work: Sequence[Work], partition: Partition, rank: int) -> float:
    """Return by how many FLOPs a rank's share of divided heads exceeds its share of the rows."""
    total = 0.0
    if not exchanges.heads:
        return total
    for member, (one, shares) in enumerate(zip(work, partition.shares, strict=True)):
        for heads, flops in one.heads:
            start, stop = partition.stretch(member, rank, heads)
            total += flops * ((stop - start) / heads - shares[rank] / sum(shares))
    return total


def own_rows(segment: str, member: Member, number: int, partition: Partition, rank: int) -> int:
    """Return the number of rows that only this rank has."""
    if fixed_count(segment) is not None:
        return 0
    if is_text(segment) and not partition.texts[number]:
        return 0
    if not is_image(segment) and not is_text(segment):
        return 0
    start, stop = partition.stretch(number, rank, member.sites.active_count(segment))
    return stop - start
