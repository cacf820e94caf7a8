"""The runner: a graph that fetches its inputs when it needs them."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import maskfx
from maskfx.runtime.backends import eager
from maskfx.runtime.backends.eager import WORTH, Runner
from tests.passes.test_cut_keys import Block, block_inputs

aten = torch.ops.aten


def chain(count: int) -> fx.GraphModule:
    """x0 + x1 + x2 ..., one input after another, then a linear layer."""
    root = nn.Module()
    root.inner = nn.Linear(4, 3)
    graph = fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(count)]
    total = values[0]
    for value in values[1:]:
        total = graph.call_function(aten.add.Tensor, (total, value))
    weight, bias = graph.get_attr("inner.weight"), graph.get_attr("inner.bias")
    out = graph.call_function(aten.linear.default, (total, weight, bias))
    graph.output((out,))
    return fx.GraphModule(root, graph)


def watched(seen: list[tuple[str, int]]) -> Callable[[str], Tensor]:
    """Gives inputs, and notes how many of them are alive when the next one is asked for."""
    alive: list[weakref.ref[Tensor]] = []

    def fetch(name: str) -> Tensor:
        seen.append((name, sum(r() is not None for r in alive)))
        value = torch.full((2, 4), float(name[1:]))
        alive.append(weakref.ref(value))
        return value

    return fetch


def test_inputs_come_when_needed_and_go_after_their_last_use() -> None:
    seen: list[tuple[str, int]] = []
    module = chain(6)
    [found] = Runner(module)(watched(seen))
    assert [name for name, _ in seen] == [f"x{i}" for i in range(6)]
    assert max(count for _, count in seen) <= 1
    assert torch.equal(found, module(*(torch.full((2, 4), float(i)) for i in range(6)))[0])


def test_weights_that_change_in_place_are_followed() -> None:
    module = chain(2)
    run = Runner(module)
    module.inner.weight.mul_(2)  # type: ignore[union-attr, operator]
    values = {"x0": torch.randn(2, 4), "x1": torch.randn(2, 4)}
    assert torch.equal(run(values.__getitem__)[0], module(*values.values())[0])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_only_weights_worth_it_are_packed() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, WORTH // 8), nn.Linear(WORTH // 8, 8))
    value = torch.randn(2, 4)
    graph = torch.export.export(module, (value,)).module(check_guards=False)
    run = Runner(graph, prepack=True)
    assert len(run._packed) == 2
    found = run({"input": value}.__getitem__)
    assert torch.allclose(found[0], module(value), atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_packed_weights_give_the_same_and_follow_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "WORTH", 0)
    module = Block()
    packed, plain = maskfx.compile(module, prepack=True), maskfx.compile(module)
    mask = torch.arange(12) < 5
    for _ in range(2):
        outputs = []
        for denoiser in (packed, plain):
            _, cache = denoiser.record(**block_inputs())
            step = maskfx.EditStep(block_inputs(1), mask, cache, any_step=True)
            outputs.append(denoiser.edit([step])[0])
        assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
        module.k.weight.mul_(3)
    assert len(packed._executor.graphs.packed)
