"""The exchanges of compiled code are those of the graph, in its order."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from maskfx import ops
from maskfx.compiler.order_exchanges import exchanges_in, order_exchanges
from maskfx.ops.exchange import within
from maskfx.runtime.backends import inductor

ROWS = 6


class Noted:
    """The group of a rank whose peer sends ones; notes the exchanges."""

    rank = 0

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def exchange(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> None:
        self.numbers.append(number)
        for value in incoming.values():
            value.fill_(1)


def exchanging(graph: fx.Graph, value: fx.Node, tables: list[fx.Node], number: int) -> fx.Node:
    return graph.call_function(ops.exchange, ([value], *tables, number))


def apart() -> fx.GraphModule:
    """Exchanges that don't read each other; results are read in another order, or not at all."""
    graph = fx.Graph()
    x, *tables, peers = (graph.placeholder(n) for n in ("x", "send", "counts", "order", "peers"))
    found = []
    for number in range(1, 5):
        scaled = graph.call_function(torch.ops.aten.mul.Tensor, (x, float(number)))
        found.append(exchanging(graph, scaled, tables, number))
    summed = graph.call_function(ops.sum_ranks, (x, peers, 5))
    values = [
        graph.call_method("sin", (graph.call_function(operator.getitem, (one, 0)),))
        for one in found
    ]
    exchanging(graph, x, tables, 6)  # its result is not read
    last = graph.call_function(torch.ops.aten.add.Tensor, (values[3], values[1]))
    graph.output((last, graph.call_method("cos", (values[2],)), summed, values[0]))
    return fx.GraphModule(nn.Module(), graph)


def given() -> list[Tensor]:
    tables = [torch.arange(2), torch.tensor([[0, 2], [0, 2]]), torch.arange(ROWS + 2)]
    return [torch.randn(ROWS, 8), *tables, torch.tensor([1])]


def compiled_order(module: fx.GraphModule, inputs: list[Tensor], wanted: Any) -> list[int]:
    group = Noted()
    with inductor.configured(inputs, freezing=False):
        mode = torch._subclasses.FakeTensorMode()
        fakes = [mode.from_tensor(value, static_shapes=True) for value in inputs]
        code = inductor.compiled(module, mode, fakes, donated=False)
    with within(group), torch.no_grad():
        for one, other in zip(code(*inputs), wanted, strict=True):
            torch.testing.assert_close(one, other)
    return group.numbers


def test_compiled_exchanges_keep_their_order_and_none_is_dropped() -> None:
    module, inputs, group = apart(), given(), Noted()
    with within(group):
        wanted = module(*inputs)
    assert group.numbers == [1, 2, 3, 4, 5, 6]
    assert compiled_order(apart(), inputs, wanted) != group.numbers, "Inductor changes nothing"
    ordered = apart()
    order_exchanges(ordered.graph)
    assert compiled_order(ordered, inputs, wanted) == group.numbers


def test_a_graph_without_exchanges_stays_as_it_is() -> None:
    graph = fx.Graph()
    graph.output((graph.call_method("sin", (graph.placeholder("x"),)),))
    before = str(graph)
    order_exchanges(graph)
    assert str(graph) == before
    assert not exchanges_in(graph)


def test_every_exchange_has_a_table_by_which_it_is_ordered() -> None:
    for one in ops.EXCHANGES:
        names = [argument.name for argument in one._schema.arguments]
        assert ("number" in names) == (not {"counts", "peers"}.isdisjoint(names)), one
