"""Rewrites softmaxes that are written out to one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from maskfx.ir.geometry.lanes import shape_hint
from maskfx.passes.context import PassContext, argument, aten, node_at, node_value, op_name
from maskfx.passes.operators import SITE_SOFTMAXES
from maskfx.passes.spelling import Speller

PRODUCTS = frozenset({"matmul", "bmm"})


def canonicalize_softmax(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite exponentials over their sum to a softmax.

    Before  e = exp(sub(x, amax(x, -1, True))); y = div(e, sum(e, -1, True))
    After   y = softmax(x, -1)                  (what is subtracted from all doesn't count)
    and     e = exp(x); y = div(matmul(e, v), sum(e, -1, True))
    becomes y = matmul(softmax(x, -1), v)
    and     y = softmax(sub(x, amax(x, -1, True)), -1)
    becomes y = softmax(x, -1)
    Keeps   sums that something is added to, and those over several axes.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) in SITE_SOFTMAXES:
            scores = scores_of(node, int(argument(node, 1, "dim")) % rank_of(node))
            count += scores is not node.args[0]
            node.args = (scores, *node.args[1:])
            continue
        if op_name(node) != "div" or len(node.args) != 2 or node.kwargs:
            continue
        value, total = node.args
        found = summed(total)
        if found is None or not isinstance(value, fx.Node):
            continue
        exponentials, axis = found
        product = op_name(value) in PRODUCTS and value.args[0] is exponentials
        if value is not exponentials and not (product and axis == rank_of(exponentials) - 1):
            continue
        spell = Speller(graph, node)
        weights = spell.emit(aten.softmax.int, scores_of(exponentials, axis), axis)
        if product:
            weights = spell.emit(aten.matmul.default, weights, value.args[1])
        spell.replace(weights)
        count += 1
    return count


def rank_of(node: fx.Node) -> int:
    return int(node_value(node).dim())


def summed(total: object) -> tuple[fx.Node, int] | None:
    """Return the exponentials that are summed along one axis, and the axis; None for others."""
    if not isinstance(total, fx.Node) or op_name(total) != "sum":
        return None
    exponentials = node_at(total, 0)
    dims = argument(total, 1, "dim")
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    keeps = argument(total, 2, "keepdim", False) and total.kwargs.get("dtype") is None
    if op_name(exponentials) != "exp" or len(dims) != 1 or not keeps:
        return None
    return exponentials, dims[0] % rank_of(exponentials)


def scores_of(node: fx.Node, axis: int) -> Any:
    """Return what is exponentiated, before the same number is subtracted along the axis."""
    scores: Any = node.args[0]
    if op_name(scores) != "sub" or len(scores.args) != 2 or scores.kwargs:
        return scores
    value, least = scores.args
    if not isinstance(least, fx.Node) or not isinstance(node_value(least), torch.Tensor):
        return scores
    rank, shape = rank_of(scores), shape_hint(node_value(least))
    shared = [*[1] * (rank - len(shape)), *shape][axis] == 1
    if not isinstance(value, fx.Node) or node_value(value).dtype != node_value(scores).dtype:
        return scores
    same = shape_hint(node_value(value)) == shape_hint(node_value(scores))
    return value if shared and same else scores
