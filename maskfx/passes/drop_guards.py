"""Removes asserts and guards of the export; the capture checks a call's sizes."""

from __future__ import annotations

from torch import fx

from maskfx.passes.context import PassContext


def drop_guards(graph: fx.Graph, ctx: PassContext) -> int:
    """Remove asserts and guards.

    Before  _assert_tensor_metadata(x); y = relu(x)
    After   y = relu(x)
    Keeps   anything whose value is used.
    """
    doomed = [
        n
        for n in reversed(graph.nodes)
        if not n.users and n.op in ("call_function", "call_module") and is_guard(n)
    ]
    for node in doomed:
        graph.erase_node(node)
    return len(doomed)


def is_guard(node: fx.Node) -> bool:
    text = str(node.target)
    return any(word in text for word in ("assert", "_guards_fn", "sym_constrain_range"))
