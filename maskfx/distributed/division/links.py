"""LinkCosts: what exchanges cost; and which texts' rows ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from maskfx.compiler.rank_twins import SplitProgram
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.work import Work
from maskfx.ir.geometry.lanes import is_image, is_text
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Exchanged, Rest
from maskfx.runtime.batch.member import Member


@dataclass(frozen=True)
class LinkCosts:
    """Seconds that exchanges, loads and products take.

    A `RankGroup` measures them when its ranks start (`measure_links`); the defaults are those of
    gloo between processes of one machine.

    Args:
        exchange: Seconds of an exchange without data.
        load: Seconds per byte of cached rows that a rank reads.
        send: Seconds per byte that a rank sends to another.
        flop: Seconds per FLOP of a rank, in a product alone.
    """

    exchange: float = 3e-4
    load: float = 2.5e-10
    send: float = 1e-9
    flop: float = 2.5e-11


def shared_texts(
    split: SplitProgram,
    members: Sequence[Member],
    work: Sequence[Work],
    partition: Partition,
    costs: LinkCosts,
    flop: float,
) -> tuple[bool, ...]:
    """Return, by member, whether it costs less if ranks share the rows of its text.

    A text that is whole is computed by each rank with a share. If they share it, its keys and
    values are exchanged together with those of the sites; and attentions to the text alone have an
    exchange each, which they don't have else.

    Args:
        split: The program with its exchanges.
        members: The members of the batch.
        work: Their FLOPs.
        partition: The ranks' shares of them.
        costs: What exchanges cost.
        flop: Seconds per FLOP of a rank.
    """
    own = [sent.segments for sent in split.exchanges.values() if isinstance(sent, Exchanged)]
    alone = costs.exchange * sum(not any(map(is_image, segments)) for segments in own)
    found = []
    for member, one, shares in zip(members, work, partition.shares, strict=True):
        ranks = sum(share > 0 for share in shares)
        most = flop * one.text * (1 - 1 / ranks)  # saved, but for the bytes that are sent
        if most <= alone:
            found.append(False)
            continue
        sent = costs.send * text_bytes(split.program, member) * (1 - 1 / ranks)
        found.append(most - sent > alone)
    return tuple(found)


def text_bytes(program: Program, member: Member) -> int:
    """Return the bytes of keys and values of a member's text, in all attentions to sites too."""
    taps, total = program.interface.taps, 0
    for source in program.interface.inputs.values():
        if isinstance(source, Rest):
            tap = taps[source.tap]
            rows = sum(member.sites.active_count(s) for s in tap.segments if is_text(s))
            total += rows * prod(tap.shape) * tap.dtype.itemsize
    return total * member.batch
