"""Rewrites attention written as two products and a softmax to one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from maskfx.ir.lanes import shape_hint
from maskfx.passes.context import PassContext, argument, aten, op_name

CASTS = frozenset({"to", "_to_copy", "float", "half", "double", "type_as"})
PRODUCTS = frozenset({"bmm", "matmul"})
SOFTMAXES = frozenset({"softmax", "_softmax"})


def canonicalize_attention(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite attention that is written step by step to one operator.

    Before  y = bmm(softmax(baddbmm(_, q, transpose(k, 1, 2), beta=0, alpha=s), -1), v)
    After   y = scaled_dot_product_attention(q, k, v, scale=s)
    Keeps   weights that are used elsewhere too, masks, products that broadcast.
    """
    count = 0
    for node in list(graph.nodes):
        found = read(node) if op_name(node) in PRODUCTS else None
        if found is None:
            continue
        query, key, scale = found
        with graph.inserting_before(node):
            turned = graph.call_function(aten.transpose.int, (key, -2, -1))
            new = graph.call_function(
                aten.scaled_dot_product_attention.default,
                (query, turned, node.args[1]),
                {"scale": scale},
            )
        turned.meta = {k: v for k, v in node.meta.items() if k != "val"}
        turned.meta["val"] = key.meta["val"].transpose(-2, -1)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        new.name = node.name
        count += 1
    return count


def read(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Return the queries, the transposed keys and the scale of an attention ending in `node`."""
    weights, value = node.args[:2]
    softmax = before(weights, CASTS)
    if op_name(softmax) not in SOFTMAXES or not runs_last(softmax):
        return None
    scale, scores = scaled(before(softmax.args[0], CASTS))
    operands: list[Any] = list(scores.args)
    if op_name(scores) == "baddbmm" and argument(scores, 3, "beta", 1) == 0:
        scale, operands = times(scale, argument(scores, 4, "alpha", 1)), operands[1:3]
    elif op_name(scores) not in PRODUCTS:
        return None
    query, key = operands
    if scale is None or not used_once(weights, scores) or not line_up(query, key, value):
        return None
    return query, key, scale


def before(node: Any, names: frozenset[str]) -> fx.Node:
    """Return the node's nearest source that isn't an operator of these names."""
    while op_name(node) in names:
        node = node.args[0]
    found: fx.Node = node
    return found


def scaled(node: fx.Node) -> tuple[float | None, fx.Node]:
    """Split a product of scores and numbers into its scale and the scores."""
    scale: float | None = 1.0
    while op_name(node) in ("mul", "div") and not isinstance(node.args[1], fx.Node):
        factor = node.args[1]
        if op_name(node) == "div":
            factor = None if node.kwargs.get("rounding_mode") else 1 / factor  # type: ignore[operator]
        scale, node = times(scale, factor), node.args[0]  # type: ignore[assignment]
    return scale, node


def times(scale: float | None, factor: object) -> float | None:
    """Multiply; return None if a factor isn't a plain number."""
    return scale * factor if scale is not None and isinstance(factor, int | float) else None


def runs_last(node: fx.Node) -> bool:
    return argument(node, 1, "dim") in (-1, node.meta["val"].dim() - 1)


def used_once(node: Any, first: fx.Node) -> bool:
    """Return True if each value from `first` to `node` has one user and is floating-point."""
    while len(node.users) == 1 and node.meta["val"].is_floating_point():
        if node is first:
            return True
        node = node.args[0]
    return False


def line_up(query: Any, key: Any, value: Any) -> bool:
    """Return True if the operands have one dtype and their products don't broadcast."""
    found = [n.meta.get("val") for n in (query, key, value)]
    if not all(isinstance(v, torch.Tensor) and v.dim() > 2 for v in found):
        return False
    outer = [shape_hint(v)[:-2] for v in found]
    return outer[0] == outer[1] == outer[2] and len({v.dtype for v in found}) == 1
