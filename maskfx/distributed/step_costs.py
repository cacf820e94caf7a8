"""The predicted time of a step for a way to divide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from maskfx import ops
from maskfx.compiler.rank_twins import SplitProgram
from maskfx.distributed.links import LinkCosts
from maskfx.distributed.partition import Partition
from maskfx.distributed.work import Work, rank_flops
from maskfx.ir.lanes import fixed_count, is_image, is_text
from maskfx.ir.lines import APART
from maskfx.ir.sources import Exchanged, Neighbours, Reader, SameLines
from maskfx.runtime.batch.member import Member


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a program that is split.

    Args:
        count: Their number.
        whole: For those in which each rank reads (nearly) all rows: the row set, and the bytes of a
            row.
            The others send border rows or a few numbers, which count as nothing.
    """

    count: int
    whole: tuple[tuple[tuple[str, ...], int], ...]


def exchanges_of(split: SplitProgram, widths: Mapping[str, int]) -> Exchanges:
    """Return the exchanges of a program.

    Args:
        split: The program.
        widths: The bytes of a row of the values of the whole program's graph, by name.
    """
    whole = []
    for node in split.program.module.graph.nodes:
        if node.target is not ops.exchange:
            continue
        source = split.exchanges[node.args[-1]]
        assert isinstance(source, Exchanged)
        if reads_all(source.reader):
            values: list[fx.Node] = node.args[0]
            whole.append((source.segments, sum(widths[value.name] for value in values)))
    return Exchanges(len(split.exchanges), tuple(whole))


def reads_all(reader: Reader | None) -> bool:
    """Return True if ranks read nearly all rows: of lines that lie across their shares, too."""
    match reader:
        case SameLines(axis):
            return axis in APART
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
        flop * rank_flops(work, partition, rank)
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
