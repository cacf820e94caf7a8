"""Facts about a graph and their checkers: a fact is checked, not assumed."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch import fx

from maskfx.errors import CompileError
from maskfx.ir.geometry.lanes import lane_of
from maskfx.ir.nodes import is_write
from maskfx.passes.context import from_rows, op_name, to_rows
from maskfx.passes.drop_guards import is_guard
from maskfx.passes.operators import WINDOWS


class Fact(enum.Enum):
    """A property of a graph that a pass may rely on."""

    NO_GUARDS = enum.auto()
    FLAT = enum.auto()
    NO_IDENTITIES = enum.auto()
    STAGES_MARKED = enum.auto()
    LANES_MARKED = enum.auto()
    SIDES_LIFTED = enum.auto()
    ATTENTION_NARROWED = enum.auto()
    LINEAR_NARROWED = enum.auto()
    CONVOLUTIONS_NARROWED = enum.auto()
    POINTWISE_NARROWED = enum.auto()
    ROWS_FLOW = enum.auto()


Checker = Callable[[fx.Graph, str], None]


def _fail(fact: Fact, after: str, node: fx.Node, what: str) -> None:
    raise CompileError(f"{fact.name} no longer holds after {after}: {node.name} {what}")


def _no_guards(graph: fx.Graph, after: str) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and not node.users and is_guard(node):
            _fail(Fact.NO_GUARDS, after, node, "is a guard")


def _flat(graph: fx.Graph, after: str) -> None:
    for node in graph.nodes:
        if "wrap_with_set_grad" in str(node.target):
            _fail(Fact.FLAT, after, node, "wraps a region")
        if is_write(node):
            _fail(Fact.FLAT, after, node, "writes into its input")


def _no_identities(graph: fx.Graph, after: str) -> None:
    for node in graph.nodes:
        if op_name(node) in ("alias", "detach") and not any(u.op == "output" for u in node.users):
            _fail(Fact.NO_IDENTITIES, after, node, "returns its input")


def _stages(graph: fx.Graph, after: str) -> None:
    for node in graph.nodes:
        if node.op == "placeholder" and "val" in node.meta and "stage" not in node.meta:
            _fail(Fact.STAGES_MARKED, after, node, "has no stage")


def _lanes(graph: fx.Graph, after: str) -> None:
    """Check that every lane has the rank of its value."""
    for node in graph.nodes:
        lane, value = lane_of(node), node.meta.get("val")
        if lane is None or not lane.dims or not isinstance(value, torch.Tensor):
            continue
        if len(lane.dims) != value.dim():
            _fail(Fact.LANES_MARKED, after, node, f"is {lane} but has {value.dim()} dimensions")


def _lifted(graph: fx.Graph, after: str) -> None:
    for node in graph.nodes:
        if node.op == "call_module":
            _fail(Fact.SIDES_LIFTED, after, node, "calls a module")


def _narrowed(fact: Fact, *names: str) -> Checker:
    def check(graph: fx.Graph, after: str) -> None:
        for node in graph.nodes:
            if op_name(node) in names and "val" in node.meta and node.target is not from_rows:
                lane = lane_of(node)
                if lane is not None and lane.has_sites:
                    _fail(fact, after, node, f"still works on {lane}")

    return check


def _rows_flow(graph: fx.Graph, after: str) -> None:
    for node in graph.nodes:
        if node.target in (to_rows, from_rows):
            _fail(Fact.ROWS_FLOW, after, node, "is a mark")


CHECKERS: dict[Fact, Checker] = {
    Fact.NO_GUARDS: _no_guards,
    Fact.FLAT: _flat,
    Fact.NO_IDENTITIES: _no_identities,
    Fact.STAGES_MARKED: _stages,
    Fact.LANES_MARKED: _lanes,
    Fact.SIDES_LIFTED: _lifted,
    Fact.ATTENTION_NARROWED: _narrowed(Fact.ATTENTION_NARROWED, "scaled_dot_product_attention"),
    Fact.LINEAR_NARROWED: _narrowed(Fact.LINEAR_NARROWED, "linear"),
    Fact.CONVOLUTIONS_NARROWED: _narrowed(Fact.CONVOLUTIONS_NARROWED, *WINDOWS, "conv_transpose2d"),
    Fact.POINTWISE_NARROWED: _narrowed(Fact.POINTWISE_NARROWED, "add", "mul", "silu", "gelu"),
    Fact.ROWS_FLOW: _rows_flow,
}
