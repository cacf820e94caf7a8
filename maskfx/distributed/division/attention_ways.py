"""Chooses how ranks attend, by predicted seconds: all attentions alike, or each by itself.

The ways differ in the number of exchanges, the bytes that ranks send, the cached keys and values
that they read, and, where heads don't divide evenly, in the FLOPs of the slowest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from maskfx import ops
from maskfx.compiler.rank_twins import SplitProgram
from maskfx.distributed.division.links import LinkCosts, shared_keys
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.step_costs import Exchanges, exchanges_of, step_seconds
from maskfx.distributed.division.work import Work
from maskfx.ir.head_sources import AttentionWay, AttentionWays, HeadShare
from maskfx.ir.sources import ByHead, Merged, Rest
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


@dataclass(frozen=True)
class Attention:
    """An attention whose keys ranks may divide.

    Args:
        name: The name of its node.
        cached: The inputs with its cached keys and values, where keys are gathered.
        heads: Its number of heads of keys, and the number of attentions with as many.
        exchanges: Its exchanges, by way.
    """

    name: str
    cached: tuple[str, ...]
    heads: tuple[int, int]
    exchanges: Mapping[AttentionWay, Exchanges]


def attentions_of(
    splits: Mapping[AttentionWay, SplitProgram], widths: Mapping[str, int]
) -> list[Attention]:
    """Return the attentions that may attend in several ways.

    Args:
        splits: The programs of the ways that serve.
        widths: The bytes of a row of the values of the whole program's graph, by name.
    """
    gathered, found = splits["gathered"], []
    inputs, taps = gathered.program.interface.inputs, gathered.program.interface.taps
    nodes = gathered.program.module.graph.find_nodes(op="call_function", target=ops.attend)
    for node in nodes:
        numbers = gathered.attentions[node.name]
        own: dict[AttentionWay, Exchanges] = {"gathered": exchanges_of(gathered, widths, numbers)}
        for way, split in splits.items():
            sent = [split.exchanges[number] for number in split.attentions[node.name]]
            if way == "keys by rank" and any(isinstance(one, Merged) for one in sent):
                own[way] = replace(own["gathered"], count=len(sent))
            elif way == "heads" and any(isinstance(one, ByHead) for one in sent):
                own[way] = exchanges_of(split, widths, split.attentions[node.name])
        if len(own) > 1:
            cached = tuple(str(rest.target) for rest in node.args[3:5])
            source = inputs[cached[0]]
            assert isinstance(source, Rest)
            found.append(Attention(node.name, cached, (taps[source.tap].shape[0], 1), own))
    counts = Counter(one.heads[0] for one in found)
    return [replace(one, heads=(one.heads[0], counts[one.heads[0]])) for one in found]


def quickest_ways(
    attentions: Sequence[Attention],
    frame: Frame,
    members: Sequence[Member],
    work: Sequence[Work],
    partition: Partition,
    costs: LinkCosts,
    flop: float,
) -> AttentionWays:
    """Return the way that all attentions have, or else the ways of those that don't gather keys.

    Args:
        attentions: Those that may attend in several ways.
        frame: The whole batch.
        members: Its members.
        work: Their FLOPs.
        partition: The ranks' shares of them.
        costs: What exchanges and loads cost.
        flop: Seconds per FLOP of a rank.
    """
    most = max(sum(share > 0 for share in own) for own in partition.shares)
    chosen: list[tuple[str, AttentionWay]] = []
    for one in attentions:
        number, alike = one.heads
        own = [of_heads(each, number, alike) for each in work]
        saved = costs.load * sum(frame.loaded_bytes(members, one.cached).values()) * (1 - 1 / most)
        seconds = {
            way: step_seconds(exchanges, members, own, partition, costs, flop)
            - (saved if way != "gathered" else 0.0)
            for way, exchanges in one.exchanges.items()
        }
        chosen.append((one.name, min(seconds, key=lambda way: seconds[way])))
    ways = {way for _, way in chosen}
    if len(ways) < 2:
        return ways.pop() if ways else "gathered"
    return tuple((name, way) for name, way in chosen if way != "gathered")


def of_heads(work: Work, heads: int, alike: int) -> Work:
    """Return the FLOPs of one of some attentions alike, as far as ways differ in them."""
    return Work(0.0, 0.0, 0.0, tuple((n, flops / alike) for n, flops in work.heads if n == heads))
