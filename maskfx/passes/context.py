"""The context and the editing helpers that all passes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from maskfx import ops
from maskfx.errors import CompileError
from maskfx.ir.geometry.lanes import Dim, Lane, NotLaned, lane_of, set_lane
from maskfx.ir.geometry.other_sizes import SizeExpr
from maskfx.ir.geometry.pyramid import Pyramid, Window
from maskfx.ir.programs.head_sources import AttentionWays
from maskfx.ir.programs.program import Derived, Interface, SideGraph, Tap, derive
from maskfx.ir.programs.sources import Lines, Owner, RestSpans, Source, Spans

aten = torch.ops.aten


class Unsupported(Exception):
    """No rule narrows this node: it must run in full."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{node.name}: {reason}")
        self.node, self.reason = node, reason


class NoRows(Unsupported):
    """The node produces the result itself, so nothing is left to narrow."""


@dataclass(frozen=True)
class Choice:
    """Sites of the image that experts choose: the topk, the axis it runs along, how many of each.

    Args:
        node: the name of the topk.
        axis: the atoms of the sites that are chosen from.
        experts: the number of experts.
        count: the number of sites that each expert chooses.
    """

    node: str
    axis: Dim
    experts: int
    count: int


@dataclass(frozen=True)
class PassContext:
    """State shared by the passes of one compilation: frozen fields over growing containers.

    Args:
        interface: inputs, outputs and taps of the rewritten graph.
        symbols: by role, the symbolic or fixed size at capture.
        dense: by node name, why a node must run in full.
        sides: the side graphs, "request" and "dense".
        choices: by segment, the sites that experts choose.
        plans, stretches: see `maskfx.config.Settings`.
        attention: in a graph that is split over ranks, how these attend.
        gathered: by node name, why an attention gathers keys where ranks divide heads.
        attentions: by node name, the numbers of the exchanges of an attention.
        layouts: whether weights in another layout are computed; without, they have shapes alone,
            for graphs that are written and not run.
    """

    interface: Interface
    symbols: dict[str, SizeExpr]
    dense: dict[str, str] = field(default_factory=dict)
    sides: dict[str, SideGraph] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    plans: bool = False
    stretches: bool = False
    attention: AttentionWays = "gathered"
    gathered: dict[str, str] = field(default_factory=dict)
    attentions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: bool = True

    @property
    def pyramid(self) -> Pyramid:
        return self.interface.pyramid

    @property
    def batch_of_one(self) -> bool:
        """Whether one sample of a batch was captured, for each of which the graph runs."""
        return self.pyramid.batch == 1 and "batch" in self.symbols


def op_name(node: fx.Node) -> str:
    """Return the operator's name (`add` for aten.add.Tensor), or "" for other nodes."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).split("::")[-1]
    return getattr(target, "__name__", "") if node.op == "call_function" else ""


def argument(node: fx.Node, index: int, name: str, default: object = None) -> Any:
    """Return a node's argument, passed by position or by name."""
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)


def node_at(node: fx.Node, index: int) -> fx.Node:
    """Return an argument that is a value of the graph."""
    found = node.args[index]
    assert isinstance(found, fx.Node), node.format_node()
    return found


def nodes_at(node: fx.Node, index: int) -> list[fx.Node]:
    """Return an argument that lists values of the graph."""
    found = node.args[index]
    assert isinstance(found, (list, tuple)), node.format_node()
    nodes = [one for one in found if isinstance(one, fx.Node)]
    assert len(nodes) == len(found), node.format_node()
    return nodes


def need_lane(node: object) -> Lane:
    lane = lane_of(node)
    if lane is None:
        raise NotLaned(f"the axes of its input {node} are unknown")
    return lane


# Marks between full values and rows. `from_rows` marks a full value that exists only as rows;
# `to_rows` is the reverse. Adjacent pairs cancel; the remaining marks become inputs and outputs.


def to_rows(value: object) -> NoReturn:
    raise CompileError("to_rows is a mark of the compiler, it can't run")


def from_rows(rows: object) -> NoReturn:
    raise CompileError("from_rows is a mark of the compiler, it can't run")


def enter_rows(value: object) -> NoReturn:
    """Mark a cut: the same value on another row set."""
    raise CompileError("enter_rows is a mark of the compiler, it can't run")


ROWS = "row set"  # in a linear layer's metadata: the row set that it multiplies


class Editor:
    """Inserts new nodes before one node of a graph and replaces that node by its row form."""

    def __init__(self, graph: fx.Graph, ctx: PassContext, node: fx.Node) -> None:
        self.graph, self.ctx, self.node = graph, ctx, node

    def emit(
        self, target: Callable[..., object], *args: fx.node.Argument, **kwargs: fx.node.Argument
    ) -> fx.Node:
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        for key in ("nn_module_stack", "stack_trace"):
            if key in self.node.meta:
                new.meta[key] = self.node.meta[key]
        new.meta["origin"] = self.node.name
        return new

    def rows(self, value: fx.Node) -> fx.Node:
        """Return the row form of a full value that has sites."""
        if value.target is from_rows:
            return value.args[0]  # type: ignore[return-value]
        lane = need_lane(value)
        assert lane.kind == "rows", (value, lane)
        for user in value.users:
            if user.target is to_rows:
                return user
        after = value
        while after.op == "placeholder" and after.next.op == "placeholder":  # inputs stand together
            after = after.next
        with self.graph.inserting_after(after):
            rows = self.graph.call_function(to_rows, (value,))
        set_lane(rows, lane)
        return rows

    def linear(self, rows: fx.Node, weight: object, bias: object = None) -> fx.Node:
        """Multiply rows of the node's row set, and note this for low-rank terms (`Product`)."""
        new = self.emit(aten.linear.default, rows, weight, bias)  # type: ignore[arg-type]
        new.meta[ROWS] = need_lane(self.node).segments
        return new

    def replace(self, rows: fx.Node) -> None:
        """Replace the node by `rows`."""
        full = self.emit(from_rows, rows)
        set_lane(full, need_lane(self.node))
        full.meta["val"] = self.node.meta.get("val")
        self.node.replace_all_uses_with(full)
        self.graph.erase_node(self.node)

    def replace_plain(self, value: fx.Node) -> None:
        """Replace the node by `value`, which has no sites."""
        set_lane(value, lane_of(self.node))
        value.meta["val"] = self.node.meta.get("val")
        self.node.replace_all_uses_with(value)
        self.graph.erase_node(self.node)

    def input(self, name: str, source: Source) -> fx.Node:
        return graph_input(self.graph, self.ctx, name, source)

    def owner(self, segments: tuple[str, ...]) -> fx.Node:
        return self.input("owner_" + slug(segments), Owner(segments))

    def spans(self, segments: tuple[str, ...]) -> fx.Node:
        return self.input("spans_" + slug(segments), Spans(segments))

    def rest_spans(self, segments: tuple[str, ...]) -> fx.Node:
        return self.input("rest_" + slug(segments), RestSpans(segments))

    def lines(self, part: str, lane: Lane, axis: str, window: Window | None = None) -> fx.Node:
        """Return a table of the lines along an axis of a value's sites."""
        read = window if part.startswith("rest_") else None
        source = Lines(part, lane.segments, axis, read)
        return self.input(source.name, source)

    def reshape(self, rows: fx.Node, old: list[int], new: list[int]) -> fx.Node:
        """Regroup the features behind dimension 0."""
        if old == new:
            return rows
        if not old:
            rows, old = self.emit(aten.unsqueeze.default, rows, 1), [1]
            if new == [1]:
                return rows
        if not new:
            return self.emit(aten.squeeze.dims, rows, list(range(1, 1 + len(old))))
        if len(old) > 1:
            rows = self.emit(aten.flatten.using_ints, rows, 1, -1)
        if len(new) > 1:
            rows = self.emit(aten.unflatten.int, rows, 1, list(new))
        return rows

    def derived(self, origin: fx.Node, order: tuple[int, ...], shape: tuple[int, ...]) -> fx.Node:
        """Return a weight in another layout, stored as a buffer of the graph's module.

        One that is computed from weights is laid out in the graph.
        """
        if origin.op != "get_attr":
            turned = self.emit(aten.permute.default, origin, list(order))
            return self.emit(aten.reshape.default, turned, list(shape))
        name = f"{origin.target}__{'_'.join(map(str, order))}__{'_'.join(map(str, shape))}".replace(
            ".", "_"
        ).replace("-", "m")
        module = self.graph.owning_module
        assert module is not None
        if not hasattr(module, name):
            weight = get_attribute(module, str(origin.target))
            if not self.ctx.layouts:
                weight = torch.empty_like(weight, device="meta")
            module.register_buffer(name, derive(weight, order, shape), persistent=False)
            self.ctx.interface.derived.append(Derived(name, str(origin.target), order, shape))
        with self.graph.inserting_before(self.node):
            return self.graph.get_attr(name)

    def tap(
        self,
        rows: fx.Node,
        segments: tuple[str, ...],
        shape: Sequence[int],
        stats: int = 0,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Record these rows and return the tap's name; the same rows are recorded once."""
        key = f"tap_{stats}" if stats else "tap"
        name = rows.meta.get(key)
        if name is None:
            name = f"{self.node.name}_{len(self.ctx.interface.taps)}"
            rows.meta[key] = name
            dtype = dtype or self.node.meta["val"].dtype
            self.ctx.interface.taps[name] = Tap(name, segments, tuple(shape), dtype, stats)
        return str(name)


def get_attribute(module: object, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module


def graph_input(graph: fx.Graph, ctx: PassContext, name: str, source: Source) -> fx.Node:
    """Return the placeholder of this name, and add it behind the others if it is missing."""
    last = None
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        if node.target == name:
            known: fx.Node = node
            return known
        last = node
    with graph.inserting_after(last) if last is not None else graph.inserting_before():
        node = graph.placeholder(name)
    assert name not in ctx.interface.inputs, name
    ctx.interface.inputs[name] = source
    return node


def node_value(node: fx.Node) -> Any:
    """Return a node's value at capture; weights are looked up in the module."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = get_attribute(node.graph.owning_module, str(node.target))
        node.meta["val"] = value
    return value


def slug(segments: tuple[str, ...]) -> str:
    named: dict[str, str | int | None] = {":": "", "#": "_part", "@": "_region", "+": "_and_"}
    return "_".join(s.translate(str.maketrans(named)) for s in segments)


__all__ = [
    "ROWS",
    "Editor",
    "PassContext",
    "Unsupported",
    "argument",
    "aten",
    "from_rows",
    "get_attribute",
    "graph_input",
    "need_lane",
    "node_value",
    "op_name",
    "ops",
    "slug",
    "to_rows",
]
