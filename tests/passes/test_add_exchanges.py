"""add_exchanges: rows of other ranks where operators mix sites, and nothing elsewhere."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import fx

from maskfx.compiler.rank_twins import split_program
from maskfx.ir.programs.head_sources import WAYS, AttentionWay, ByHead
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Exchanged, Merged, Neighbours, RestShare
from maskfx.passes.add_exchanges import add_exchanges
from maskfx.passes.context import PassContext, op_name
from tests.distributed import tiny


@cache
def program() -> Program:
    return next(iter(tiny.compiled().programs.values()))


def ops_of(graph: fx.Graph) -> Counter[str]:
    return Counter(op_name(node) for node in graph.nodes if op_name(node))


@pytest.mark.parametrize("way", WAYS)
def test_adds_exchanges_where_sites_mix(way: AttentionWay) -> None:
    before, by_rank, heads = ops_of(program().module.graph), way == WAYS[1], way == WAYS[2]
    split = split_program(program(), way, joined=False)
    assert not isinstance(split, str)
    after = ops_of(split.program.module.graph)
    # three convolutions, two ways up, and attention to sites and to the text alone
    assert after["exchange"] == 7 - heads
    assert (after["to_heads"], after["from_heads"]) == (heads, heads)
    assert after["merge_parts"] == after["attend_part"] == by_rank
    assert after["attend"] == before["attend"] - by_rank
    assert (after["peer_moments"], after["peer_sums"], after["sum_ranks"]) == (1, 1, 1)
    assert len(split.exchanges) == 7 + by_rank + heads + 3
    assert split.recorded == split.exchanges  # one that records changes nothing for others
    kinds = Counter(type(source) for source in split.program.interface.inputs.values())
    assert kinds[Merged] == 3 * by_rank
    assert kinds[ByHead] == 2 * 3 * heads
    assert list(split.gathered.values()) == ["its keys are those of a text"] * heads
    assert kinds[RestShare] == 2 + 2 * by_rank  # of the sum of products, and of the attention
    readers = [
        s.reader for s in split.program.interface.inputs.values() if isinstance(s, Exchanged)
    ]
    assert (
        sum(isinstance(reader, Neighbours) for reader in readers) == 2 * 3
    )  # two of the convolutions have one geometry


def test_keeps_the_whole_program_as_it_is() -> None:
    code, inputs = program().module.code, dict(program().interface.inputs)
    split_program(program(), "heads")
    assert program().module.code == code
    assert program().interface.inputs == inputs


def test_a_graph_on_each_row_alone_stays() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.silu.default, (node,)))
    assert add_exchanges(graph, PassContext(program().interface, {})) == 0


def test_the_recording_graph_returns_its_taps() -> None:
    split = split_program(program(), "heads")
    assert not isinstance(split, str)
    (output,) = split.program.recording.graph.find_nodes(op="output")
    assert len(output.args[0][1]) == len(program().interface.taps)
