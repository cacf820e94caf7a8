"""Chooses how ranks attend, by predicted seconds of each attention.

The ways differ in the number of exchanges, the bytes that ranks send, the cached keys and values
that they read, and, where heads don't divide evenly, in the FLOPs of the slowest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from maskfx import ops
from maskfx.compiler.rank_twins import SplitProgram
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.step_costs import Exchanges, exchanges_of, step_seconds
from maskfx.distributed.division.work import Work
from maskfx.ir.programs.head_sources import AttentionWay, AttentionWays
from maskfx.ir.programs.sources import ByHead, Merged, Rest
from maskfx.runtime.batch.member import Member


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
    loads: Sequence[tuple[float, float]],
    members: Sequence[Member],
    work: Sequence[Work],
    partition: Partition,
    costs: LinkCosts,
    flop: float,
) -> tuple[AttentionWays, float]:
    """Return the way that all attentions have, or else the ways of those that don't gather keys.

    Also returns the seconds that these ways save against gathered keys. Keys by rank take as many
    bytes as gathered keys: queries and partial results are as large as keys and values. A rank then
    reads its share of the cached keys: of the sites, or, where ranks divide heads, of the columns;
    of rows in a store, which are read whole, of the sites alone.

    Args:
        attentions: Those that may attend in several ways.
        loads: The seconds in which the cached keys and values of each are read, of the whole batch:
            from memory, and from stores.
        members: The members of the batch.
        work: Their FLOPs.
        partition: The ranks' shares of them.
        costs: What exchanges and loads cost.
        flop: Seconds per FLOP of a rank.
    """
    most = max(sum(share > 0 for share in own) for own in partition.shares)
    known: dict[Hashable, dict[AttentionWay, float]] = {}
    chosen: list[tuple[str, AttentionWay]] = []
    total = 0.0
    for one, load in zip(attentions, loads, strict=True):
        key = one.heads, tuple(one.exchanges.items()), load  # most attentions are alike
        if key not in known:
            own = [of_heads(each, *one.heads) for each in work]
            saved = (1 - 1 / most) * load[0], (1 - 1 / most) * sum(load)
            less = {"gathered": 0.0, "heads": saved[0], "keys by rank": saved[1]}
            known[key] = {
                way: step_seconds(exchanges, members, own, partition, costs, flop) - less[way]
                for way, exchanges in one.exchanges.items()
            }
        seconds = known[key]
        way = min(seconds, key=lambda way: seconds[way])
        chosen.append((one.name, way))
        total += seconds["gathered"] - seconds[way]
    ways = {way for _, way in chosen}
    if len(ways) < 2:
        return (ways.pop() if ways else "gathered"), total
    return tuple((name, way) for name, way in chosen if way != "gathered"), total


def of_heads(work: Work, heads: int, alike: int) -> Work:
    """Return the FLOPs of one of some attentions alike, as far as ways differ in them."""
    return Work(0.0, 0.0, 0.0, tuple((n, flops / alike) for n, flops in work.heads if n == heads))
