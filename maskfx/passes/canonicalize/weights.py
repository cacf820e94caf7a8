"""Takes weights of attention apart that are sums or multiples of others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from maskfx import ops
from maskfx.ir.geometry.lanes import shape_hint
from maskfx.passes.canonicalize.attention import (
    COPIES,
    MOVES,
    PRODUCTS,
    SOFTMAXES,
    WRITTEN,
    has_symbol,
    is_wide,
    padded,
)
from maskfx.passes.context import PassContext, aten, node_at, node_value, op_name
from maskfx.passes.spelling import Speller

OVERLOADS = {name: getattr(aten, name).Tensor for name in ("mul", "div", "add", "sub")}
FURTHEST = 24  # operators between scores and weights


def canonicalize_weights(graph: fx.Graph, ctx: PassContext) -> int:
    """Multiply values by each of the weights that are added, before they are added.

    Before  y = matmul(sub(a, mul(b, s)), v)           (a and b are softmaxes of scores)
    After   y = sub(matmul(a, v), mul(matmul(b, v), s))
    Keeps   weights that no softmax made, factors of single keys, and products of two weights.
    """
    count = 0
    left = [node for node in graph.nodes if op_name(node) in PRODUCTS]
    while left:
        made = taken_apart(graph, left.pop())
        count += made is not None
        left += made or []
    return count


def taken_apart(graph: fx.Graph, node: fx.Node) -> list[fx.Node] | None:
    """Replace a product by several; return these, or None if it stays."""
    rank = node.meta["val"].dim()
    for place, key in ((0, -1), (1, -2)):
        weights = node_at(node, place)
        values = node_at(node, 1 - place)
        if rank < 3 or any(node_value(n).dim() != rank for n in (weights, values)):
            continue
        operands = list(operands_of(weights, rank + key))
        if not any(softened(n) for n, is_weight in operands if is_weight):
            continue
        spell, made = Speller(graph, node), list[fx.Node]()
        found = []
        for operand, is_weight in operands:
            if not is_weight:
                found.append(operand)
                continue
            pair = (operand, values) if place == 0 else (values, operand)
            made.append(spell.emit(aten.matmul.default, *pair))
            found.append(made[-1])
        spell.replace(spell.emit(OVERLOADS[op_name(weights)], *found))
        return made
    return None


def operands_of(weights: fx.Node, key: int) -> Iterator[tuple[object, bool]]:
    """Yield the operands of weights that may be taken apart, and whether each is a weight too."""
    name = op_name(weights)
    if name not in OVERLOADS or len(weights.args) != 2 or weights.kwargs:
        return
    rank = node_value(weights).dim()
    if not all(has_symbol(weights, axis) for axis in (rank - 2, rank - 1)):
        return
    wide = [is_wide(n, weights) for n in weights.args]
    if name in ("add", "sub"):
        if all(wide) and all(map(softened, weights.args)):
            yield from ((n, True) for n in weights.args)
        return
    if name == "div" and not wide[0] or all(wide) or not any(wide):
        return
    other = weights.args[wide.index(False)]
    value = node_value(other) if isinstance(other, fx.Node) else None
    shape = shape_hint(value) if isinstance(value, torch.Tensor) else []
    if padded(shape, rank)[key] == 1:  # all keys share it
        yield from zip(weights.args, wide, strict=True)


def softened(node: object) -> bool:
    """Return True for weights that a softmax of scores is among the steps to."""
    soft = False
    for _ in range(FURTHEST):
        if not isinstance(node, fx.Node):
            return False
        name = op_name(node)
        if name in WRITTEN:
            return soft
        soft = soft or name in SOFTMAXES
        plain = name in COPIES | MOVES | SOFTMAXES | {"masked_fill", "where"} or name in ops.STEPS
        if not plain:
            return False
        wide = [n for n in node.args if is_wide(n, node)]
        node = wide[0] if wide else node.args[0]
    return False
