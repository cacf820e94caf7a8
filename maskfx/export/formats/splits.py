"""Spells splits into parts of given sizes as slices.

The translation of such a split makes a sequence of tensors, which ONNX doesn't have for bfloat16.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Number = int | fx.Node  # a size: known, or a node that computes it


def spell_splits(graph: fx.Graph) -> None:
    """Replace each part of a split by a slice.

    Before  parts = split_with_sizes(x, [2, n], 1); a = parts[0]; b = parts[1]
    After   a = slice(x, 1, 0, 2); b = slice(x, 1, 2, 2 + n)
    Keeps   a split whose parts are passed on together.
    """
    for node in graph.find_nodes(op="call_function", target=aten.split_with_sizes.default):
        if all(user.target is operator.getitem for user in node.users):
            spell_split(graph, node)


def spell_split(graph: fx.Graph, node: fx.Node) -> None:
    value, sizes, axis = *node.args, *([0] if len(node.args) < 3 else [])
    bounds: list[Number] = [0]
    with graph.inserting_before(node):
        for size in sizes:  # type: ignore[union-attr]
            bounds.append(added(graph, bounds[-1], size))
    for part in list(node.users):
        number: Any = part.args[1]
        with graph.inserting_before(part):
            place = (value, axis, bounds[number], bounds[number + 1])
            made = graph.call_function(aten.slice.Tensor, place)
        made.meta = dict(part.meta)
        part.replace_all_uses_with(made)
        graph.erase_node(part)
    graph.erase_node(node)


def added(graph: fx.Graph, one: Number, other: Number) -> Number:
    """Return the sum of two sizes."""
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    if one == 0:
        return other
    made = graph.call_function(operator.add, (one, other))
    numbers = (n.meta["val"] if isinstance(n, fx.Node) else n for n in (one, other))
    made.meta["val"] = operator.add(*numbers)
    return made
