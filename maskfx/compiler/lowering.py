"""Copies a program's graph with the operators of maskfx replaced, and what the rules for it use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from maskfx.errors import CompileError
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import (
    CallSpans,
    LinePairs,
    Lines,
    Owner,
    Pairs,
    Requests,
    RestOwner,
    RestSpans,
    Source,
    Spans,
)
from maskfx.passes.context import slug

aten = torch.ops.aten
Node = fx.Node


class Lowering:
    """Copies a program's graph with the operators of maskfx replaced.

    Attributes:
        graph: the new graph.
        inputs: its inputs in order.
        values: the new graph's node for each node of the old one.
    """

    def __init__(self, program: Program) -> None:
        self.interface = program.interface
        self.graph = fx.Graph()
        self.inputs: dict[str, Source] = {}
        self.values: dict[Node, Node] = {}
        self._places: dict[Source, Node] = {}
        self._known: dict[Hashable, Node] = {}
        kinds = {tap.dtype for tap in self.interface.taps.values()}
        self.wide = torch.float64 if torch.float64 in kinds else torch.float32
        for node in program.module.graph.nodes:
            self._copy(node)

    def _copy(self, node: Node) -> None:
        if node.op == "placeholder":
            source = self.interface.inputs[str(node.target)]
            if not isinstance(source, Spans | RestSpans | CallSpans | Pairs | LinePairs):
                self.values[node] = self.input(str(node.target), source)
                self.values[node].meta = dict(node.meta)
            return
        if node.op == "call_function" and node.target in RULES:
            arguments = normalized(node)
            self.values[node] = RULES[node.target](self, arguments)
            if "val" in node.meta:
                self.values[node].meta.setdefault("val", node.meta["val"])
            return
        if node.target is aten.sym_size.int and node.args[0] not in self.values:
            requests = self.input("requests", Requests())  # spans have a row for each
            self.values[node] = self.call(aten.sym_size.int, requests, node.args[1])
            self.values[node].meta.setdefault("val", node.meta.get("val"))
            return
        self.values[node] = self.graph.node_copy(node, lambda n: self.values[n])

    def drop_unread(self, kept: Sequence[Node]) -> None:
        """Remove what neither the results nor these values depend on, and unread inputs."""
        self.graph.eliminate_dead_code(lambda n: n in kept or n.op in ("placeholder", "output"))
        for node in self.graph.find_nodes(op="placeholder"):
            if not node.users:
                self.graph.erase_node(node)
                del self.inputs[str(node.target)]
        order = [str(node.target) for node in self.graph.find_nodes(op="placeholder")]
        self.inputs = {name: self.inputs[name] for name in order}
        self.graph.lint()

    # What rules use.

    def input(self, name: str, source: Source) -> Node:
        """Return the input with this source, and add it behind the others if it is missing."""
        if source not in self._places:
            last = next(reversed(self._places.values()), None)
            with self.graph.inserting_after(last) if last else self.graph.inserting_before():
                self._places[source] = self.graph.placeholder(name)
            self.inputs[name] = source
        return self._places[source]

    def source(self, old: Node) -> Source:
        """Return the source of an input of the old graph."""
        return self.interface.inputs[str(old.target)]

    def call(self, target: OpOverload, *args: fx.node.Argument) -> Node:
        """Call an operator; the same call has one node."""
        key = (target, *(tuple(a) if isinstance(a, list) else a for a in args))
        if key not in self._known:
            self._known[key] = self.graph.call_function(target, args)
        return self._known[key]

    def new(self, old: Node) -> Node:
        return self.values[old]

    def owner(self, spans: Node) -> Node:
        """Return the request of each row that these spans divide."""
        match self.source(spans):
            case Spans(segments):
                return self.input(f"owner_{slug(segments)}", Owner(segments))
            case RestSpans(segments):
                return self.input(f"rest_owner_{slug(segments)}", RestOwner(segments))
            case Lines(part) as source:
                return self.lines(replace(source, part=part.replace("spans", "sorted_owner")))
        raise CompileError(f"lower: {spans} is an input without rows")

    def lines(self, source: Lines) -> Node:
        """Return a table of lines."""
        return self.input(source.name, source)

    def members(self, owner: Node, like: Node | None = None, numbers: Node | None = None) -> Node:
        """Return (requests, rows): 1 where a row belongs to the request, else 0.

        Args:
            owner: the request of each row.
            like: a value of the result's dtype; by default sums over sites are made with it.
            numbers: the numbers of the requests, or of what `owner` holds in their place.
        """
        numbers = self.input("requests", Requests()) if numbers is None else numbers
        pairs = self.call(
            aten.eq.Tensor,
            self.call(aten.unsqueeze.default, numbers, 1),
            self.call(aten.unsqueeze.default, owner, 0),
        )
        if like is not None:
            return self.call(aten.type_as.default, pairs, like)
        return self.call(aten.to.dtype, pairs, self.wide)


Operands = dict[str, Any]  # of an operator by name: nodes, and values as they are
Rule = Callable[[Lowering, Operands], Node]
RULES: dict[object, Rule] = {}


def rule(target: object) -> Callable[[Rule], Rule]:
    def noted(function: Rule) -> Rule:
        RULES[target] = function
        return function

    return noted


def normalized(node: Node) -> Operands:
    """Return the arguments of an operator by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
