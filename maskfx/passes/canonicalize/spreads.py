"""Rewrites values of a request that are repeated for each site of the picture to broadcasts."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.operators import POINTWISE, VIEWS
from maskfx.passes.spelling import Speller
from maskfx.passes.symbolic_sizes import is_same_size

CUTS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split", "slice", "select"})
AXES = {"slice": 1, "select": 1}  # which argument is the axis; that of cuts into parts is the third


def canonicalize_spreads(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite what meets a repeated value to what meets the value itself.

    Before  y = mul(x, view(repeat_interleave(s, n, 0), [b * n, 1, c]))     (x is [b * n, m, c])
    After   y = reshape(mul(reshape(x, [b, n, m, c]), unsqueeze(s, 1)), [b * n, m, c])
    Keeps   repeats of a fixed number, and what no elementwise operator meets.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) != "repeat_interleave" or argument(node, 2, "dim") != 0:
            continue
        times = argument(node, 1, "repeats")
        if isinstance(times, fx.Node) and isinstance(times.meta.get("val"), torch.SymInt):
            count += Spread(graph, ctx, node, times).sink()
    return count


@dataclass
class Spread:
    """One value that is repeated along its first axis, and what is computed from it.

    Args:
        graph, ctx: The graph and the compilation.
        repeat: The operator that repeats it.
        times: How often.
        known: For each value that is a repeated one, the same value before it is repeated.
    """

    graph: fx.Graph
    ctx: PassContext
    repeat: fx.Node
    times: fx.Node
    known: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def sink(self) -> int:
        """Replace the elementwise operators that the repeated value meets; return their number."""
        self.known[self.repeat] = argument(self.repeat, 0, "self")
        found, after = 0, False
        for node in list(self.graph.nodes):
            after = after or node is self.repeat
            met = not self.known.keys().isdisjoint(node.all_input_nodes)
            if after and node is not self.repeat and met:
                found += self.follow(node)
        for made in reversed(self.known.values()):
            if not made.users and made.op == "call_function":
                self.graph.erase_node(made)
        return found

    def follow(self, node: fx.Node) -> bool:
        """Note a value that is repeated itself, or replace one that isn't."""
        name, spell = op_name(node), Speller(self.graph, node)
        if name in POINTWISE:
            return self.meet(node, spell)
        if not isinstance(node.args[0], fx.Node) or node.args[0] not in self.known:
            return False
        source = self.known[node.args[0]]
        if name in VIEWS:
            shape = node.meta["val"].shape
            rest = all(isinstance(n, int) for n in shape[1:])
            if len(shape) > 1 and self.is_repeated(shape[0]) and rest:
                self.known[node] = spell.emit(
                    aten.reshape.default, source, [spell.size(source, 0), *shape[1:]]
                )
        elif node.target is operator.getitem:
            self.known[node] = spell.emit(operator.getitem, source, node.args[1])
        elif name == "linear" or name in CUTS and self.axis_of(node, name) > 0:
            self.known[node] = spell.emit(node.target, source, *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
        return False

    def is_repeated(self, size: IntLikeType) -> bool:
        """Return True for the number of repeated values."""
        return is_same_size(self.ctx, size, self.repeat.meta["val"].shape[0])

    def axis_of(self, node: fx.Node, name: str) -> int:
        axis: int = argument(node, AXES.get(name, 2), "dim", 0)
        rank: int = node_value(node.args[0]).dim()  # type: ignore[arg-type]
        return axis % rank

    def meet(self, node: fx.Node, spell: Speller) -> bool:
        """Compute elementwise with the value itself; repeat the result only if all of it is."""
        operands = [n for n in node.all_input_nodes if isinstance(node_value(n), torch.Tensor)]
        rank = node.meta["val"].dim()
        whole = [n for n in operands if n not in self.known and self.is_whole(n, rank)]
        fits = all(self.is_whole(n, rank) or self.is_apart(n, rank) for n in operands)
        if not fits or any(node_value(n).dim() != rank for n in operands if n in self.known):
            return False
        if not whole:
            self.known[node] = replayed(spell, node, self.known)
            return False
        requests = spell.size(next(self.known[n] for n in operands if n in self.known), 0)
        new: dict[fx.Node, fx.Node] = {}
        for value in operands:
            if value in self.known:
                new[value] = spell.emit(aten.unsqueeze.default, self.known[value], 1)
            elif value in whole:
                new[value] = spell.emit(
                    aten.reshape.default, value, [requests, self.times, *rest_of(spell, value)]
                )
            elif node_value(value).dim() == rank:
                new[value] = spell.emit(aten.unsqueeze.default, value, 1)
        wide = replayed(spell, node, new)
        shape = [spell.size(whole[0], 0), *(spell.size(wide, i) for i in range(2, rank + 1))]
        spell.replace(spell.emit(aten.reshape.default, wide, shape))
        return True

    def is_whole(self, value: fx.Node, rank: int) -> bool:
        """Return True if the value has an entry for each of the repeated ones."""
        shape = node_value(value).shape
        return len(shape) == rank and self.is_repeated(shape[0])

    def is_apart(self, value: fx.Node, rank: int) -> bool:
        """Return True if the value is the same for all of the repeated ones."""
        shape = node_value(value).shape
        return len(shape) < rank or isinstance(shape[0], int) and shape[0] == 1


def replayed(spell: Speller, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Write an operator once more, with other values in place of these ones."""
    args = fx.map_arg(node.args, lambda n: new.get(n, n))
    kwargs = fx.map_arg(dict(node.kwargs), lambda n: new.get(n, n))
    return spell.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]


def rest_of(spell: Speller, value: fx.Node) -> Sequence[object]:
    """Return the sizes behind the first axis."""
    return [spell.size(value, i) for i in range(1, node_value(value).dim())]
