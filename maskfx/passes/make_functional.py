"""In-place operators as plain ones."""

from __future__ import annotations

import torch
from torch import fx

from maskfx.passes.context import PassContext, op_name


def make_functional(graph: fx.Graph, ctx: PassContext) -> int:
    """Replace an in-place operator by its plain twin and let later uses see the new value.

    Before  y = add_(x, 1); z = relu(x)
    After   y = add(x, 1);  z = relu(y)
    Keeps   an in-place write into a view whose base is used later: it has no plain twin here.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if not name.endswith("_") or name.endswith("__") or not node.args:
            continue
        written = node.args[0]
        plain = getattr(torch.ops.aten, name[:-1], None)
        overload = getattr(node.target, "_overloadname", "default")
        if plain is None or not isinstance(written, fx.Node) or is_view_of_used(written, node):
            continue
        node.target = getattr(plain, overload)
        later = set()
        seen = False
        for other in graph.nodes:
            seen = seen or other is node
            if seen and other is not node:
                later.add(other)
        for user in list(written.users):
            if user in later:
                user.replace_input_with(written, node)
        count += 1
    return count


def is_view_of_used(written: fx.Node, node: fx.Node) -> bool:
    views = ("view", "reshape", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze", "expand")
    if op_name(written) not in views:
        return False
    base = written.args[0]
    return isinstance(base, fx.Node) and any(u is not written and u > node for u in base.users)
