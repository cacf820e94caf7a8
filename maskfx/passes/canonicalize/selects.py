"""Rewrites selections from an axis of size one, such as the only sample of a batch, to views."""

from __future__ import annotations

import operator

import torch
from torch import fx

from maskfx.passes.context import PassContext, argument, aten, op_name


def canonicalize_selects(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite what selects from an axis of size one, or writes to it, to squeeze and unsqueeze.

    Before  y = select(x, 0, 0); z = select_scatter(x, y.exp(), 0, 0)      (x is [1, n, d])
    After   y = squeeze(x, [0]); z = unsqueeze(y.exp(), 0)
    Keeps   axes of any other size.
    """
    count = 0
    for node in list(graph.nodes):
        name, source = op_name(node), node.args[0] if node.args else None
        if name not in ("select", "select_scatter", "unbind") or not isinstance(source, fx.Node):
            continue
        value = source.meta.get("val")
        place = {"select": 1, "unbind": 1, "select_scatter": 2}[name]
        if not isinstance(value, torch.Tensor):
            continue
        axis = argument(node, place, "dim", 0) % value.dim()
        if type(value.shape[axis]) is not int or value.shape[axis] != 1:
            continue
        if name == "select_scatter":
            count += written(graph, node, axis)
        elif name == "select":
            taken(graph, node, source, axis)
            count += 1
        else:
            for part in [user for user in node.users if user.target is operator.getitem]:
                taken(graph, part, source, axis)
                count += 1
    return count


def taken(graph: fx.Graph, node: fx.Node, source: fx.Node, axis: int) -> None:
    """Replace a selection by a squeeze, or by the value whose unsqueeze it selects from."""
    new = source
    if op_name(source) == "unsqueeze" and argument(source, 1, "dim") == axis:
        new = source.args[0]  # type: ignore[assignment]
    else:
        with graph.inserting_before(node):
            new = graph.call_function(aten.squeeze.dims, (source, [axis]))
        new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def written(graph: fx.Graph, node: fx.Node, axis: int) -> bool:
    """Replace a write of all there is by what is written; return False if the types differ."""
    part = argument(node, 1, "src")
    if part.meta["val"].dtype != node.meta["val"].dtype:
        return False
    with graph.inserting_before(node):
        new = graph.call_function(aten.unsqueeze.default, (part, axis))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return True
