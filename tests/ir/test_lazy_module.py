"""Graph modules without code until their first call."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import torch
from torch import fx, nn

from maskfx.ir.modules.lazy_module import LazyModule, over_same

aten = torch.ops.aten


def doubled(factor: int = 2) -> tuple[nn.Module, fx.Graph]:
    root = nn.Module()
    root.part = nn.Linear(3, 3, bias=False)
    graph = fx.Graph()
    weight = graph.get_attr("part.weight")
    rows = graph.call_function(aten.linear.default, (graph.placeholder("rows"), weight))
    graph.output(graph.call_function(aten.mul.Tensor, (rows, factor)))
    return root, graph


def is_written(module: nn.Module) -> bool:
    return "forward" in vars(type(module))


def test_code_is_written_at_the_first_call() -> None:
    module, rows = LazyModule(*doubled()), torch.randn(2, 3)
    assert not is_written(module)
    assert torch.equal(module(rows), fx.GraphModule(module, module.graph)(rows))
    assert is_written(module)


def test_fx_gets_the_code_that_it_asks_for() -> None:
    """Inductor's cache on disk makes its key from it."""
    module = LazyModule(*doubled())
    assert "linear" in module._real_recompile().src
    assert is_written(module)


def test_code_is_written_for_its_readers() -> None:
    assert "linear" in LazyModule(*doubled()).code
    assert "linear" in str(LazyModule(*doubled()))
    assert list(inspect.signature(LazyModule(*doubled()).forward).parameters) == ["rows"]


def test_a_changed_graph_is_run_after_recompile() -> None:
    module, rows = LazyModule(*doubled()), torch.randn(2, 3)
    once = module(rows)
    product = module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)[0]
    product.args = (product.args[0], 4)
    module.recompile()
    assert torch.equal(module(rows), 2 * once)


def test_copies_compute_the_same() -> None:
    module, rows = LazyModule(*doubled()), torch.randn(2, 3)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(rows), module(rows))


def test_a_module_over_the_same_weights() -> None:
    module, rows = LazyModule(*doubled()), torch.randn(2, 3)
    table: Any = torch.full((3,), 5.0).numpy()  # neither a tensor nor a part
    module.table = table
    wanted = module(rows)
    graph = fx.Graph()
    value = graph.placeholder("rows")
    product = graph.call_function(aten.linear.default, (value, graph.get_attr("part.weight")))
    graph.output((product, graph.get_attr("table")))
    other = over_same(module, graph)
    found, read = other(rows)
    assert torch.equal(2 * found, wanted)
    assert read is table
    assert other.part is module.part
    module.part.weight.data.mul_(2)  # type: ignore[union-attr, operator]
    assert torch.equal(other(rows)[0], 2 * found)
    assert torch.equal(module(rows), 2 * wanted)
