"""Chooses how ranks attend, by predicted seconds.

The ways differ in the number of exchanges, the bytes that ranks send, the cached keys and values
that they read, and, where heads don't divide evenly, in the FLOPs of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from maskfx.compiler.rank_twins import SplitProgram
from maskfx.distributed.division.links import LinkCosts, shared_keys
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.step_costs import Exchanges, step_seconds
from maskfx.distributed.division.work import Work
from maskfx.ir.head_sources import AttentionWay, HeadShare
from maskfx.ir.sources import Rest
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member


def attention_seconds(
    splits: Mapping[AttentionWay, SplitProgram],
    exchanges: Mapping[AttentionWay, Exchanges],
    frame: Frame,
    members: Sequence[Member],
    work: Sequence[Work],
    partition: Partition,
    costs: LinkCosts,
    flop: float,
) -> dict[AttentionWay, float]:
    """Return, by way, the seconds of the slowest rank, without what all ways have in common.

    Keys by rank take as many bytes as gathered keys: queries and partial results are as large as
    keys and values. A rank then reads its share of the cached keys: of the sites, or, where ranks
    divide heads, of the columns.

    Args:
        splits: The programs of the ways that serve; "gathered" is one.
        exchanges: Their exchanges; those of keys by rank follow from gathered keys.
        frame: The whole batch.
        members: Its members.
        work: Their FLOPs.
        partition: The ranks' shares of them.
        costs: What exchanges and loads cost.
        flop: Seconds per FLOP of a rank.
    """
    most = max(sum(share > 0 for share in own) for own in partition.shares)
    gathered = splits["gathered"]

    def reading(names: Sequence[str]) -> float:
        return costs.load * sum(frame.loaded_bytes(members, names).values())

    found: dict[AttentionWay, float] = {}
    for way, split in splits.items():
        own, loads = exchanges["gathered"], 0.0
        if way == "keys by rank":
            own = replace(own, count=len(split.exchanges))
            loads = -reading(shared_keys(gathered, split)) * (1 - 1 / most)
        elif way == "heads":
            own = exchanges["heads"]
            loads = -reading(keys_by_head(gathered, split)) * (1 - 1 / most)
        found[way] = loads + step_seconds(own, members, work, partition, costs, flop)
    return found


def keys_by_head(gathered: SplitProgram, split: SplitProgram) -> list[str]:
    """Return the inputs with cached keys and values of which ranks may read some heads."""
    taps = {s.tap for s in split.program.interface.inputs.values() if isinstance(s, HeadShare)}
    inputs = gathered.program.interface.inputs.items()
    return [name for name, s in inputs if isinstance(s, Rest) and s.tap in taps]
