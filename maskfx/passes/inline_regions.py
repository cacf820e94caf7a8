"""Inlines the regions that the export wraps (autocast off, no_grad)."""

from __future__ import annotations

from torch import fx

from maskfx.passes.context import PassContext, get_attribute, node_at


def inline_regions(graph: fx.Graph, ctx: PassContext) -> int:
    """Inline the body of wrap_with_autocast and wrap_with_set_grad_enabled.

    Before  y = wrap_with_set_grad_enabled(False, body, x)[0]
    After   y = relu(x)
    Keeps   other higher-order operators.
    """
    count = 0
    for node in list(graph.nodes):
        text = str(node.target)
        if node.op != "call_function" or "wrap_with" not in text:
            continue
        at = next(
            i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr"
        )
        body_node = node_at(node, at)
        body = get_attribute(graph.owning_module, str(body_node.target))
        if (
            "autocast" in text
            and node.args[1:2] not in ((False,), (None,))
            and True in node.args[:at]
        ):
            continue
        inputs = iter(node.args[at + 1 :])
        env: dict[fx.Node, fx.Node] = {}
        result: fx.node.Argument = None
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(inputs)
            elif inner.op == "output":
                result = fx.map_arg(inner.args[0], env.__getitem__)
            else:
                with graph.inserting_before(node):
                    if inner.op == "get_attr":
                        inner_value = get_attribute(body, str(inner.target))
                        name = f"{body_node.target}_{inner.target}".replace(".", "_")
                        setattr(graph.owning_module, name, inner_value)
                        env[inner] = graph.get_attr(name)
                    else:
                        env[inner] = graph.node_copy(inner, env.__getitem__)
                env[inner].meta = dict(inner.meta)
        for user in list(node.users):
            if isinstance(result, (tuple, list)) and "getitem" in str(user.target):
                user.replace_all_uses_with(result[user.args[1]])
                graph.erase_node(user)
        if node.users:
            node.replace_all_uses_with(result)
        graph.erase_node(node)
        count += 1
    return count
