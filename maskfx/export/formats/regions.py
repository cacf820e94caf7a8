"""Inlines regions of an exported graph in which autocast or gradients are off, as they are here."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

WRAPPED = ("wrap_with_autocast", "wrap_with_set_grad_enabled")


def inline_regions(module: fx.GraphModule) -> None:
    """Replace each region by its operators.

    Before  y = wrap_with_autocast("cuda", None, False, None, body, x)[0]
    After   y = relu(x)
    Keeps   a region in which autocast is on.
    """
    graph, found = module.graph, True
    while found:  # regions may be in one another
        found = False
        for node in list(graph.nodes):
            if str(node.target) in WRAPPED and not turns_on(node):
                inline(module, node)
                found = True
    graph.eliminate_dead_code()
    module.recompile()


def turns_on(node: fx.Node) -> bool:
    return str(node.target) == WRAPPED[0] and node.args[2] is not False


def inline(module: fx.GraphModule, node: fx.Node) -> None:
    place = next(
        i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr"
    )
    held: Any = node.args[place]
    body = module.get_submodule(str(held.target))
    values: dict[fx.Node, Any] = {}
    given = iter(node.args[place + 1 :])
    with module.graph.inserting_before(node):
        for inner in body.graph.nodes:  # type: ignore[union-attr]
            if inner.op == "placeholder":
                values[inner] = next(given)
            elif inner.op == "output":
                results: Any = fx.map_arg(inner.args[0], values.__getitem__)
            else:
                if inner.op == "get_attr":  # a region within this one
                    name = f"{held.target}_{inner.target}"
                    setattr(module, name, getattr(body, str(inner.target)))
                values[inner] = module.graph.node_copy(inner, values.__getitem__)
                if inner.op == "get_attr":
                    values[inner].target = name
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(results)
    module.graph.erase_node(node)
