"""Rewrites pools over a whole picture, or a few parts of it, and reductions with two results."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from maskfx.passes.canonicalize.resizes import MOST
from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.spelling import Speller

PAIRS = {"var_mean": aten.var.correction, "std_mean": aten.std.correction}


def canonicalize_pools(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite adaptive pools to one value and var_mean to reductions.

    Before  y = adaptive_avg_pool2d(x, [1, 1]); z = adaptive_max_pool2d(x, [1, 1])[0]
    After   y = mean(x, [-2, -1], True); z = amax(x, [-2, -1], True)
    and     v, m = var_mean(x, [2, 3]); n = mean(mean(x, [2]), [2])
    becomes v = var(x, [2, 3]); m = mean(x, [2, 3]); n = mean(x, [2, 3])
    and     y = adaptive_avg_pool2d(x, [2, 2])      (x is a picture of any size, h * w)
    becomes y = unflatten(matmul(flatten(x, 2), weights), 2, [2, 2])       (weights: [h * w, 4])
    Keeps   pools to many values, or of one size, and those whose indices are used.
    """
    count = 0
    for node in list(graph.nodes):
        name, source = op_name(node), node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        if name in ("adaptive_avg_pool2d", "adaptive_avg_pool1d") and to_one(node):
            spell = Speller(graph, node)
            spell.replace(spell.emit(aten.mean.dim, source, pooled_dims(name), True))
        elif name == "adaptive_avg_pool2d" and to_few(node):
            spell = Speller(graph, node)
            spell.replace(by_parts(spell, source, argument(node, 1, "output_size")))
        elif name in ("adaptive_max_pool2d", "adaptive_max_pool1d") and to_one(node):
            if not without_indices(graph, node, pooled_dims(name)):
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


def to_few(node: fx.Node) -> bool:
    """Return True if a picture of any size is pooled to a few values."""
    size, shape = argument(node, 1, "output_size"), node_value(node.args[0]).shape  # type: ignore[arg-type]
    few = all(isinstance(n, int) for n in size) and math.prod(size) <= MOST
    return few and len(shape) == 4 and any(isinstance(n, torch.SymInt) for n in shape[2:])


def by_parts(spell: Speller, source: fx.Node, size: Sequence[int]) -> fx.Node:
    """Return the means of parts of a picture, as products with the weights of its sites."""
    value = node_value(source)
    kind = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    along = []
    for axis, parts in zip((2, 3), size, strict=True):
        each = spell.emit(aten.eye.default, spell.size(source, axis), **kind)
        weights = spell.emit(aten.unsqueeze.default, each, 0)
        pooled = spell.emit(aten.adaptive_avg_pool1d.default, weights, [parts])
        along.append(spell.emit(aten.squeeze.dims, pooled, [0]))
    rows = spell.emit(aten.reshape.default, along[0], [-1, 1, size[0], 1])
    columns = spell.emit(aten.reshape.default, along[1], [1, -1, 1, size[1]])
    both = spell.emit(aten.mul.Tensor, rows, columns)
    table = spell.emit(aten.flatten.using_ints, both, 2, 3)
    table = spell.emit(aten.flatten.using_ints, table, 0, 1)
    flat = spell.emit(aten.flatten.using_ints, source, 2, 3)
    mixed = spell.emit(aten.matmul.default, flat, table)
    return spell.emit(aten.unflatten.int, mixed, 2, list(size))


def pooled_dims(name: str) -> list[int]:
    return [-2, -1] if name.endswith("2d") else [-1]


def without_indices(graph: fx.Graph, node: fx.Node, dims: list[int]) -> bool:
    """Replace the maxima of a (values, indices) pair; return False if the indices are used."""
    users = list(node.users)
    if not isinstance(node_value(node), (tuple, list)):
        return False
    if any(u.target is not operator.getitem or u.args[1] != 0 and u.users for u in users):
        return False
    for user in users:
        if user.args[1] == 0:
            spell = Speller(graph, user)
            spell.replace(spell.emit(aten.amax.default, node.args[0], dims, True))
        else:
            graph.erase_node(user)
    graph.erase_node(node)
    return True
