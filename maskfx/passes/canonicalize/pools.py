"""Rewrites pools over a whole picture, and reductions with two results, to reductions."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx
from torch._ops import OpOverload

from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.spelling import Speller

PAIRS = {"var_mean": aten.var.correction, "std_mean": aten.std.correction}
EXTREMES = {"max": aten.amax.default, "min": aten.amin.default}


def canonicalize_pools(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite adaptive pools to one value, maxima along an axis and var_mean to reductions.

    Before  y = adaptive_avg_pool2d(x, [1, 1]); z = max(x, 1, True)[0]
    After   y = mean(x, [-2, -1], True); z = amax(x, [1], True)
    and     v, m = var_mean(x, [2, 3]); n = mean(mean(x, [2]), [2])
    becomes v = var(x, [2, 3]); m = mean(x, [2, 3]); n = mean(x, [2, 3])
    Keeps   pools to more values, maxima whose indices are used.
    """
    count = 0
    for node in list(graph.nodes):
        name, source = op_name(node), node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if name in ("adaptive_avg_pool2d", "adaptive_avg_pool1d") and to_one(node):
            spell = Speller(graph, node)
            spell.replace(spell.emit(aten.mean.dim, source, pooled_dims(name), True))
        elif name in ("adaptive_max_pool2d", "adaptive_max_pool1d") and to_one(node):
            if not without_indices(graph, node, aten.amax.default, pooled_dims(name), True):
                continue
        elif name in EXTREMES and isinstance(argument(node, 1, "dim"), int):
            dims, keep = [argument(node, 1, "dim")], bool(argument(node, 2, "keepdim", False))
            if not without_indices(graph, node, EXTREMES[name], dims, keep):
                continue
        elif name in ("mean", "sum") and op_name(source) == name and len(source.users) == 1:
            if not at_once(graph, node, source):
                continue
        elif name in PAIRS and isinstance(argument(node, 1, "dim"), (list, tuple)):
            apart(graph, node, PAIRS[name])
        else:
            continue
        count += 1
    return count


def at_once(graph: fx.Graph, node: fx.Node, inner: fx.Node) -> bool:
    """Replace a mean or sum along some axes after others; return False if they don't join."""
    source, steps = inner.args[0], (inner, node)
    keeps = {bool(argument(one, 2, "keepdim", False)) for one in steps}
    listed = all(isinstance(argument(one, 1, "dim"), (list, tuple)) for one in steps)
    cast = any(argument(one, 3, "dtype") is not None for one in steps)
    if not isinstance(source, fx.Node) or len(keeps) > 1 or not listed or cast:
        return False
    [keep], rank = keeps, node_value(source).dim()
    first, second = (argument(one, 1, "dim") for one in steps)
    gone = {d % rank for d in first}
    left = [d for d in range(rank) if keep or d not in gone]
    gone |= {left[d % len(left)] for d in second}
    target = aten.mean.dim if op_name(node) == "mean" else aten.sum.dim_IntList
    spell = Speller(graph, node)
    spell.replace(spell.emit(target, source, sorted(gone), keep))
    graph.erase_node(inner)
    return True


def apart(graph: fx.Graph, node: fx.Node, first: OpOverload) -> None:
    """Replace the spread and the mean that one operator returns by two operators."""
    dims, keep = argument(node, 1, "dim"), bool(node.kwargs.get("keepdim", False))
    correction = node.kwargs.get("correction", 1)
    if "unbiased" in str(node.target._schema):  # type: ignore[union-attr]
        correction = int(bool(argument(node, 2, "unbiased", True)))
        keep = bool(argument(node, 3, "keepdim", False))
    for user in list(node.users):
        spell = Speller(graph, user)
        if user.args[1] == 0:
            named = {"correction": correction, "keepdim": keep}
            spell.replace(spell.emit(first, node.args[0], dims, **named))
        else:
            spell.replace(spell.emit(aten.mean.dim, node.args[0], dims, keep))
    graph.erase_node(node)


def to_one(node: fx.Node) -> bool:
    size: int | Sequence[int] = argument(node, 1, "output_size")
    return all(n == 1 for n in (size if isinstance(size, (list, tuple)) else [size]))


def pooled_dims(name: str) -> list[int]:
    return [-2, -1] if name.endswith("2d") else [-1]


def without_indices(
    graph: fx.Graph, node: fx.Node, target: OpOverload, dims: list[int], keep: bool
) -> bool:
    """Replace the values of a (values, indices) pair; return False if the indices are used."""
    users = list(node.users)
    if not isinstance(node_value(node), (tuple, list)):
        return False
    if any(u.target is not operator.getitem or u.args[1] != 0 and u.users for u in users):
        return False
    for user in users:
        if user.args[1] == 0:
            spell = Speller(graph, user)
            spell.replace(spell.emit(target, node.args[0], dims, keep))
        else:
            graph.erase_node(user)
    graph.erase_node(node)
    return True
