"""Rewrites parts of the batch that are computed differently to a choice between two results."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from maskfx.ir.geometry.other_sizes import SizeExpr
from maskfx.ir.nodes import ancestors
from maskfx.passes.canonicalize.rolls import JOINS, SPLITS, Piece, piece_of
from maskfx.passes.canonicalize.writes import equal, expression
from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.operators import NORMS, POINTWISE, VIEWS
from maskfx.passes.spelling import Speller

# operators on what their first argument has along its other axes, or on samples one by one
OF_FIRST = VIEWS | NORMS | {"linear", "conv2d", "group_norm", "transpose", "permute", "expand"}
OF_FIRST |= {"dropout", "clone", "contiguous"}
OF_ALL = POINTWISE | {"matmul", "bmm", "scaled_dot_product_attention"}
ALONG = {  # operators along axes, by the place of these among the arguments
    **dict.fromkeys(("slice", "unbind", "select", "mean", "sum", "softmax", "_softmax"), 1),
    **dict.fromkeys(JOINS, 1),
    **dict.fromkeys(SPLITS, 2),
}


def canonicalize_batches(graph: fx.Graph, ctx: PassContext) -> int:
    """Compute all samples in each way, and choose one result by the sample's place in the batch.

    Before  a, b = chunk(x, 2); y = cat([f(a), g(b)])           (f and g compute each sample alone)
    After   y = where(arange(size(x, 0)) < size(a, 0), f(x), g(x))
    and     a, b = chunk(f(cat([x, y])), 2)                          (of x and y as many samples)
    becomes a = f(x); b = f(y)
    and     y = f(cat([x, zeros(1)])); a = y[:-1]; b = y[-1:]
    becomes a = f(x); b = f(zeros(1))
    The frames of samples, beside each other along the first axis, are chosen in the same way.
    Keeps   parts that leave out or repeat samples, and what mixes samples.
    """
    batch = ctx.symbols.get("batch")
    if batch is None or isinstance(batch, int):
        return 0
    count = taken_apart(graph, batch)
    for node in list(graph.nodes):
        if op_name(node) not in JOINS or len(node.args[0]) < 2 or argument(node, 1, "dim", 0):
            continue
        total = expression(node_value(node).shape[0])
        if not is_multiple(total, batch):
            continue
        spell = Speller(graph, node)
        new = AllSamples(spell, total).joined(node)
        if new is None:
            spell.drop()
            continue
        spell.replace(new)
        count += 1
    if count:
        graph.eliminate_dead_code()
        for node in reversed(list(graph.nodes)):  # attention counts as random, so it was kept
            if node.op == "call_function" and not node.users:
                graph.erase_node(node)
    return count


def is_multiple(total: SizeExpr, batch: SizeExpr) -> bool:
    """Return True for the number of samples, or of what each has as many of, such as frames."""
    return not isinstance(total, int) and batch not in (total / batch).free_symbols


def is_batch(node: fx.Node, batch: SizeExpr) -> bool:
    """Return True if the first axis of a value has the size of the batch."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    return equal(expression(value.shape[0]), batch)


@dataclass(frozen=True)
class SamplePart:
    """A value of all samples, of which the graph has a part, from one place to another.

    The samples lie along `axis`.
    """

    whole: fx.Node
    start: SizeExpr
    stop: SizeExpr
    axis: int = 0

    @property
    def size(self) -> SizeExpr:
        return self.stop - self.start


@dataclass
class AllSamples:
    """Computes for all samples what a graph computes for a part of them.

    Args:
        spell: writes operators before the join of the parts.
        batch: the number of samples, or of the frames of all samples.
    """

    spell: Speller
    batch: SizeExpr
    _known: dict[fx.Node, SamplePart | None] = field(default_factory=dict)

    def joined(self, node: fx.Node) -> fx.Node | None:
        """Return the choice among the results of the parts that a join joins."""
        for value in in_order(node):
            self.of(value)
        parts = self.following(node)
        if not parts or not equal(parts[0].start, 0) or not equal(parts[-1].stop, self.batch):
            return None
        chosen = parts[-1].whole
        for part in reversed(parts[:-1]):
            before = self.before(part.stop, node_value(node).dim())
            if before is None:
                return None
            chosen = self.spell.emit(aten.where.self, before, part.whole, chosen)
        return chosen if len(parts) > 1 else None

    def following(self, node: fx.Node) -> list[SamplePart]:
        """Return the parts that a join joins, those of one value as one; [] if there are gaps."""
        parts = list[SamplePart]()
        for value in node.args[0]:  # type: ignore[union-attr]
            part = self.of(value)
            if part is None or part.axis or parts and not equal(parts[-1].stop, part.start):
                return []
            if parts and parts[-1].whole is part.whole:
                part = replace(part, start=parts.pop().start)
            parts.append(part)
        return parts

    def before(self, stop: SizeExpr, rank: int) -> fx.Node | None:
        """Return which samples come before a place."""
        number, whole = self.spell.number(stop), self.spell.number(self.batch)
        if number is None or whole is None:
            return None
        device = self.spell.node.meta["val"].device
        places = self.spell.emit(aten.arange.default, whole, device=device, pin_memory=False)
        below = self.spell.emit(aten.lt.Scalar, places, number)
        return self.spell.emit(aten.reshape.default, below, [-1, *[1] * (rank - 1)])

    def of(self, node: object) -> SamplePart | None:
        """Return a value for all samples, and the part of them that the graph has it for."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._known:
            self._known[node] = self._cut(node) or self._computed(node)
        return self._known[node]

    def _cut(self, node: fx.Node) -> SamplePart | None:
        """Return what a part was cut out of, or what several parts of it are joined to."""
        piece = piece_of(node, 0) if has_axes(node) else None
        if piece is not None and is_batch(piece[0], self.batch):
            return SamplePart(*piece)
        if op_name(node) not in JOINS or argument(node, 1, "dim", 0) != 0:
            return None
        parts = self.following(node)
        return parts[0] if len(parts) == 1 else None

    def _computed(self, node: fx.Node) -> SamplePart | None:
        """Return an operator on each sample alone, on all samples."""
        if node.op != "call_function":
            return None
        parts = {value: found for value in node.all_input_nodes if (found := self.of(value))}
        if not parts:
            return None
        one = next(iter(parts.values()))
        if any(
            (p.start, p.stop, p.axis) != (one.start, one.stop, one.axis) for p in parts.values()
        ):
            return None
        axis = one.axis if node.target is operator.getitem else axis_after(node, set(parts), one)
        if axis is None:
            return None

        def own(value: fx.Node) -> Any:
            number = value.meta.get("val")
            if isinstance(number, torch.SymInt) and equal(expression(number), one.size):
                return self.spell.number(self.batch)
            return parts[value].whole if value in parts else value

        args, kwargs = fx.map_arg(node.args, own), fx.map_arg(node.kwargs, own)
        new = self.spell.emit(node.target, *args, **kwargs)  # type: ignore[arg-type]
        return replace(one, whole=new, axis=axis)


def taken_apart(graph: fx.Graph, batch: SizeExpr) -> int:
    """Compute apart what joins of batches are computed to, where it is taken apart again."""
    cuts: dict[fx.Node, dict[fx.Node, Piece]] = {}
    for node in graph.nodes:
        piece = piece_of(node, 0) if node.op == "call_function" and has_axes(node) else None
        if piece is not None and not is_batch(piece[0], batch):
            cuts.setdefault(piece[0], {})[node] = piece
    count = 0
    for source, pieces in cuts.items():
        spell = Speller(graph, next(iter(pieces)))
        finder = EachBatch(spell, batch, expression(node_value(source).shape[0]))
        apart = [finder.of(value) for value in in_order(source)][-1]
        ends = [] if apart is None or apart[1] else ends_of(apart[0])
        numbers = [number_of(start, stop, ends) for _, start, stop in pieces.values()]
        if apart is None or None in numbers:
            spell.drop()
            continue
        for node, number in zip(list(pieces), numbers, strict=True):
            assert number is not None
            node.replace_all_uses_with(apart[0][number])
        count += 1
    return count


def in_order(node: fx.Node) -> list[fx.Node]:
    """Return a node and all that it is made from, in the order of the graph."""
    needed = ancestors([node])
    return [one for one in node.graph.nodes if one in needed]


def ends_of(parts: Sequence[fx.Node]) -> list[SizeExpr]:
    """Return where each of several joined values ends along the first axis."""
    return list(accumulate(expression(node_value(part).shape[0]) for part in parts))


def number_of(start: SizeExpr, stop: SizeExpr, ends: Sequence[SizeExpr]) -> int | None:
    """Return which of several joined values a part of their join is."""
    places = pairwise((0, *ends))
    found = (i for i, (a, b) in enumerate(places) if equal(start, a) and equal(stop, b))
    return next(found, None)


@dataclass
class EachBatch:
    """Computes for each of several joined batches what a graph computes for all of them.

    Beside batches, a fixed number of values may be joined, such as one for all samples.

    Args:
        spell: writes operators before the first part that is taken out.
        batch: the number of samples.
        total: the number of samples of all.
    """

    spell: Speller
    batch: SizeExpr
    total: SizeExpr
    _known: dict[fx.Node, tuple[list[fx.Node], int] | None] = field(default_factory=dict)

    def of(self, node: fx.Node) -> tuple[list[fx.Node], int] | None:
        """Return a value of each batch, and the axis of the samples."""
        if node not in self._known:
            self._known[node] = self._joined(node) or self._computed(node)
        return self._known[node]

    def _joined(self, node: fx.Node) -> tuple[list[fx.Node], int] | None:
        if op_name(node) not in JOINS or argument(node, 1, "dim", 0) != 0:
            return None
        parts: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        whole = equal(expression(node_value(node).shape[0]), self.total)
        batches = [is_batch(part, self.batch) for part in parts]
        fixed = [type(node_value(part).shape[0]) is int for part in parts]
        apart = any(batches) and all(a or b for a, b in zip(batches, fixed, strict=True))
        return (parts, 0) if whole and apart else None

    def _computed(self, node: fx.Node) -> tuple[list[fx.Node], int] | None:
        if node.op != "call_function":
            return None
        parts = {value: found for value in node.all_input_nodes if (found := self.of(value))}
        shapes = {(len(found), axis) for found, axis in parts.values()}
        if len(shapes) != 1:
            return None
        [(many, axis)] = shapes
        part = SamplePart(node, 0 * self.total, self.total, axis)
        after = axis if node.target is operator.getitem else axis_after(node, set(parts), part)
        if after is None:
            return None

        def own(number: int, value: fx.Node) -> Any:
            size = value.meta.get("val")
            if isinstance(size, torch.SymInt) and equal(expression(size), self.total):
                return self.spell.size(one[number], along)
            return parts[value][0][number] if value in parts else value

        one, along = next(iter(parts.values()))
        results = []
        for number in range(many):
            args = fx.map_arg(node.args, partial(own, number))
            kwargs = fx.map_arg(node.kwargs, partial(own, number))
            results.append(self.spell.emit(node.target, *args, **kwargs))  # type: ignore[arg-type]
        return results, after


def axis_after(node: fx.Node, parts: set[fx.Node], part: SamplePart) -> int | None:
    """Return the axis of the samples after an operator on each of them alone; None for others."""
    name, axis = op_name(node), part.axis
    others = [value for value in node.all_input_nodes if value not in parts and has_axes(value)]
    if any(depends(value) or lies_along(value, 0, part.size) for value in others):
        return None
    first = node_value(node.all_input_nodes[0])
    if name in ALONG:
        given, rank = argument(node, ALONG[name], "dim", 0), node_value(next(iter(parts))).dim()
        dims = [d % rank for d in (given if isinstance(given, list | tuple) else [given])]
        if axis in dims:
            return None
        keeps = argument(node, 2, "keepdim", False) if name in ("mean", "sum") else True
        axis -= sum(d < axis for d in dims) if name in ("unbind", "select") or not keeps else 0
    elif name == "permute":
        axis = [d % first.dim() for d in argument(node, 1, "dims")].index(axis)
    elif name == "transpose":
        pair = [argument(node, *at) % first.dim() for at in ((1, "dim0"), (2, "dim1"))]
        axis = pair[1 - pair.index(axis)] if axis in pair else axis
    elif name in OF_FIRST:
        if axis or parts != {node.all_input_nodes[0]}:
            return None
        sizes = part.size, expression(first.shape[0])
        if name in (*VIEWS, "expand") and not any(lies_along(node, 0, size) for size in sizes):
            return None
    else:
        ranks = {node_value(value).dim() for value in [node, *parts]}
        outer = name in POINTWISE or axis < min(ranks) - 2
        if name not in OF_ALL or len(ranks) > 1 or not outer:
            return None
    return axis


def has_axes(node: fx.Node) -> bool:
    value = node_value(node)
    return isinstance(value, torch.Tensor) and value.dim() > 0


def lies_along(node: fx.Node, axis: int, size: SizeExpr) -> bool:
    """Return True if an axis of a value, or of each of several, has this size."""
    value = node_value(node)
    values = value if isinstance(value, list | tuple) else [value]
    return all(
        isinstance(one, torch.Tensor)
        and one.dim() > axis
        and equal(expression(one.shape[axis]), size)
        for one in values
    )


def depends(value: fx.Node) -> bool:
    """Return True for a value that isn't a weight or made of sizes alone."""
    return any(
        node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        for node in ancestors([value], sizes=False)
    )
