"""A graph as a Python function computes what its module does, whatever its arguments are."""

from __future__ import annotations

import math
import operator
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from maskfx.runtime.backends.graph_function import graph_function

aten = torch.ops.aten
Pair = namedtuple("Pair", ["first", "second"])


def pick(values: Any, *more: Any, **named: Any) -> Any:
    """Return the arguments as they came."""
    return values, more, named


def one_call(*arguments: Any, **named: Any) -> fx.GraphModule:
    """A graph that returns what `pick` gets: an input, a weight, and these arguments."""
    root = nn.Module()
    root.inner = nn.Linear(4, 3)
    graph = fx.Graph()
    value, weight = graph.placeholder("x"), graph.get_attr("inner.weight")
    graph.output(graph.call_function(pick, ([value, (weight,)], *arguments), named))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize(
    "argument",
    [
        *(None, True, -3, "it's", 0.1, math.inf, ()),
        *((1,), [1, (2.5,)], {"a": [1]}, slice(1, None, 2), Pair(1, (2,))),
        *(torch.float16, torch.device("cpu"), torch.channels_last, torch.strided),
    ],
)
def test_arguments_come_as_they_are_in_the_graph(argument: Any) -> None:
    module, value = one_call(argument, key=argument), torch.randn(2)
    (held, (weight,)), more, named = graph_function(module)({"x": value}.__getitem__)
    assert held is value
    assert weight is module.inner.weight  # type: ignore[union-attr]
    assert (more, named) == ((argument,), {"key": argument})
    assert type(more[0]) is type(argument)


def test_not_a_number_stays_one() -> None:
    _, (found,), _ = graph_function(one_call(math.nan))({"x": torch.zeros(1)}.__getitem__)
    assert math.isnan(found)


def test_the_same_as_the_module() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.placeholder("unread")
    halves = graph.call_function(aten.chunk.default, (x, 2, 1))
    first, last = (graph.call_function(operator.getitem, (halves, i)) for i in (0, -1))
    total = graph.call_function(aten.add.Tensor, (first, y), {"alpha": 3})
    graph.call_function(aten.neg.default, (total,))  # nothing reads it
    last = graph.call_method("add", (last, 1), {"alpha": 2})
    results: Any = (total, {"last": last, "same": [y, y]})
    graph.output(results)
    module = fx.GraphModule(nn.Module(), graph)
    given = {"x": torch.randn(2, 4), "y": torch.randn(2, 2)}
    asked: list[str] = []

    def fetch(name: str) -> Tensor:
        asked.append(name)
        return given[name]

    found, wanted = graph_function(module)(fetch), module(given["x"], given["y"], None)
    assert asked == ["x", "y"]
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1]["last"], wanted[1]["last"])
    assert found[1]["same"][0] is found[1]["same"][1] is given["y"]


def test_values_are_freed_after_their_last_use() -> None:
    graph, alive = fx.Graph(), []

    def step(value: Tensor) -> Tensor:
        made = value + 1
        alive.append(sum(kept() is not None for kept in kept_values))
        kept_values.append(weakref.ref(made))
        return made

    kept_values: list[weakref.ref[Tensor]] = []
    value = graph.placeholder("x")
    for _ in range(5):
        value = graph.call_function(step, (value,))
    graph.output(value)
    module = fx.GraphModule(nn.Module(), graph)
    assert float(graph_function(module)({"x": torch.zeros(1)}.__getitem__)) == 5
    assert alive == [0, 1, 1, 1, 1]


def test_what_is_called_in_place_of_an_operator() -> None:
    module = one_call(1)
    found = graph_function(module, lambda node: (max, node.args[1:] + (2,)))
    assert found({"x": torch.zeros(1)}.__getitem__) == 2
