"""Symbolic arithmetic of an export is computed once, and changes nothing about the graph."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._logging import _internal
from torch.fx import proxy
from torch.fx._lazy_graph_module import _get_graph_module_cls
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn import functional

from maskfx.compiler.capture import export
from maskfx.compiler.capture.capture import capture
from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.capture.tracing import size_arithmetic
from maskfx.compiler.capture.tracing.unread_records import without_records
from tests.passes.tools import numbers


class Denoiser(nn.Module):
    """A convolution, a norm, attention over pixels, and a resize: sizes are derived in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8)
        self.keys = nn.Linear(8, 16)

    def forward(self, sample: Tensor) -> Tensor:
        down = self.norm(self.layer(sample))
        rows = down.flatten(2).transpose(1, 2)
        key, value = self.keys(rows).chunk(2, -1)
        mixed = functional.scaled_dot_product_attention(rows, key, value)
        back = mixed.transpose(1, 2).reshape(down.shape)
        return functional.interpolate(back, size=sample.shape[2:])[:, :4]


def captured() -> Capture:
    return capture(Denoiser().eval(), {"sample": numbers(2, 4, 8, 12, seed=0)})


def stacks(module: fx.GraphModule) -> int:
    """Return how many nodes know the line of the module that they are made by."""
    return sum("in forward" in node.meta.get("stack_trace", "") for node in module.graph.nodes)


def test_the_graph_is_that_of_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = captured()
    for name in ("size_arithmetic", "without_records", "norm_shapes"):
        monkeypatch.setattr(export, name, nullcontext)
    alone = captured()
    assert found.module is not None
    assert alone.module is not None
    assert str(found.module.graph) == str(alone.module.graph)
    assert str(found.symbols) == str(alone.symbols)
    conditions, all_conditions = (set(map(str, one.guards or ())) for one in (found, alone))
    assert conditions
    assert conditions <= all_conditions
    assert all(
        one.startswith("Ne(") for one in all_conditions - conditions
    )  # of the norm's formula
    assert stacks(alone.module) > 0 == stacks(found.module)


def test_no_condition_is_described_with_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler that torch begins with removes itself, also while its reports are silenced."""
    handler = _internal.LazyTraceHandler(None)
    monkeypatch.setattr(_internal.trace_log, "handlers", [handler])
    assert captured().module is not None
    assert not _internal.trace_log.handlers


def sizes(env: ShapeEnv, *values: int) -> list[Any]:
    made = []
    for number, value in enumerate(values):
        source = ConstantSource(f"size{number}")
        symbol = env.create_symbol(value, source, DimDynamic.DYNAMIC)
        made.append(env.create_symintnode(symbol, hint=value, source=source))
    return made


def test_equal_results_are_computed_once_and_are_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[str] = []
    multiply = SymNode._mul  # type: ignore[attr-defined]

    def noted(one: SymNode, other: SymNode) -> SymNode:
        computed.append(f"{one} {other}")
        return multiply(one, other)

    monkeypatch.setattr(SymNode, "_mul", noted)
    height, width = sizes(ShapeEnv(), 8, 12)
    with size_arithmetic.size_arithmetic():
        first, second, third = height * width, height * width, height * 3
    assert len(computed) == 2
    assert first.node is not second.node
    assert first.node.expr == second.node.expr != third.node.expr
    assert (first.node.hint, third.node.hint) == (96, 24)


def test_sizes_found_equal_later_are_one_expression() -> None:
    height, width = sizes(ShapeEnv(), 8, 8)
    with size_arithmetic.size_arithmetic():
        before = height * 2, width * 2
        assert before[0].node.expr != before[1].node.expr
        torch._check(height == width)
        assert before[0].node.expr == before[1].node.expr == (width * 2).node.expr


def test_torch_has_its_own_functions_afterwards() -> None:
    def own() -> list[object]:
        unread = [vars(proxy)["CapturedTraceback"], vars(proxy_tensor)["_extract_tensor_metadata"]]
        return [dict(vars(SymNode)), *unread, _get_graph_module_cls()]

    before = own()

    def fails() -> None:
        with size_arithmetic.size_arithmetic(), without_records():
            assert not any(one == other for one, other in zip(own(), before, strict=True))
            raise KeyError

    pytest.raises(KeyError, fails)
    assert own() == before


def test_another_torch_without_these_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_arithmetic, "READ", (*size_arithmetic.READ, "_absent"))
    before = dict(vars(SymNode))
    with size_arithmetic.size_arithmetic():
        assert dict(vars(SymNode)) == before
    assert captured().module is not None
