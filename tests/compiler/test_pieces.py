"""Pieces compute what the whole graph computes, and late inputs are read late."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from maskfx.compiler.pieces import cut, sink_late
from maskfx.runtime.backends.eager import Runner, first_uses
from maskfx.runtime.backends.pieces import PieceRunner, at_inputs


class UNetLike(nn.Module):
    """Skip connections that late residuals are added to, read in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(6, 6) for _ in range(8))

    def forward(self, x: Tensor, late_0: Tensor, late_1: Tensor, late_2: Tensor) -> Any:
        skips = []
        for weight, late in zip(self.weights[:3], (late_0, late_1, late_2), strict=True):
            x = torch.tanh(x @ weight)
            skips.append(x + late)
        x = torch.tanh(x @ self.weights[3])
        for weight, skip in zip(self.weights[4:7], reversed(skips), strict=True):
            x = torch.tanh((x + skip) @ weight)
        return x, x.sum()


LATE = ("late_0", "late_1", "late_2")


def traced() -> tuple[fx.GraphModule, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = fx.symbolic_trace(UNetLike())
    return module, {name: torch.randn(5, 6) for name in ("x", *LATE)}


def reads(module: fx.GraphModule) -> list[tuple[int, str]]:
    """At which operator each input is read first."""
    found = enumerate(first_uses(module.graph))
    return [(number, name) for number, (_, names) in found for name in names]


def test_late_inputs_are_read_as_late_as_possible() -> None:
    module, inputs = traced()
    sunk = sink_late(module, LATE)
    assert reads(module) == [(0, "x"), (2, "late_0"), (5, "late_1"), (8, "late_2")]
    # each residual's sum stands right before the block that reads it
    assert reads(sunk) == [(0, "x"), (8, "late_2"), (12, "late_1"), (16, "late_0")]
    for one, other in zip(sunk(**inputs), module(**inputs), strict=True):
        assert torch.equal(one, other)


def test_without_late_inputs_the_order_stays() -> None:
    module, _ = traced()
    names = [node.name for node in sink_late(module, ()).graph.nodes]
    assert names == [node.name for node in module.graph.nodes]


@pytest.mark.parametrize("seed", range(8))
def test_pieces_cut_anywhere_compute_the_whole(seed: int) -> None:
    module, inputs = traced()
    draw = random.Random(seed)
    pieces = cut(module, lambda node: draw.random() < 0.3)
    assert len(pieces) > 1
    runner = PieceRunner(pieces, lambda piece: Runner(piece.module))
    for one, other in zip(runner(inputs.__getitem__), module(**inputs), strict=True):
        assert torch.equal(one, other)


def test_a_piece_waits_only_for_its_own_inputs() -> None:
    module, inputs = traced()
    sunk = sink_late(module, LATE)
    pieces = cut(sunk, at_inputs(sunk, LATE, least=0))
    assert [piece.inputs for piece in pieces] == [("x",), ("late_2",), ("late_1",), ("late_0",)]
    asked: list[str] = []

    def fetch(name: str) -> Tensor:
        asked.append(name)
        return inputs[name]

    PieceRunner(pieces, lambda piece: Runner(piece.module))(fetch)
    assert asked == ["x", "late_2", "late_1", "late_0"]


def test_a_value_is_freed_after_its_last_piece() -> None:
    module, inputs = traced()
    pieces = cut(module, lambda node: node.op == "call_function")
    held: list[int] = []
    kept: dict[str, Tensor] = {}

    def run_piece(piece: Any) -> Any:
        run = Runner(piece.module)

        def counted(fetch: Any) -> Any:
            before = {name: fetch(name) for name in piece.values}
            held.append(sum(t.numel() for t in before.values()))
            kept.update(before)
            return run(lambda name: before[name] if name in before else inputs[name])

        return counted

    PieceRunner(pieces, run_piece)(inputs.__getitem__)
    assert max(held) <= 2 * 30  # two operands, however many values came before


def test_short_pieces_go_on() -> None:
    module, _ = traced()
    sunk = sink_late(module, LATE)
    for least, count in ((0, 4), (2, 3), (9, 2)):
        counted = cut(sunk, at_inputs(mark_products(sunk), LATE, least))
        assert len(counted) == count, least


def mark_products(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.nodes:
        if "matmul" in str(node.target):
            node.target = torch.ops.aten.mm.default
    module.recompile()
    return module
