"""Rewrites norms over all sites to group norms."""

from __future__ import annotations

from torch import fx

from maskfx.passes.context import PassContext, argument, aten, node_value, op_name
from maskfx.passes.spelling import Speller


def canonicalize_norms(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite instance norms, and layer norms over a whole sample, to group norms.

    Before  y = instance_norm(x, w, b, None, None, True, 0.1, 1e-5, True)     (x is [b, c, h, w])
    After   y = group_norm(x, c, w, b, 1e-5)
    and     y = layer_norm(x, [c, h, w])        (h and w are the picture's size)
    becomes y = group_norm(x, 1)
    Keeps   instance norms with running statistics, layer norms over features or with weights.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if name == "instance_norm" and argument(node, 5, "use_input_stats"):
            weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
            groups, eps = node_value(node).shape[1], argument(node, 7, "eps")
        elif name == "layer_norm" and covers_sample(node):
            weight = bias = None
            groups, eps = 1, argument(node, 4, "eps", 1e-5)
        else:
            continue
        spell = Speller(graph, node)
        spell.replace(spell.emit(aten.group_norm.default, node.args[0], groups, weight, bias, eps))
        count += 1
    return count


def covers_sample(node: fx.Node) -> bool:
    """Return True if a norm has no weights and spans all axes but the first, some of them free."""
    shape: list[int] = argument(node, 1, "normalized_shape")
    value = node_value(node)
    plain = argument(node, 2, "weight") is None and argument(node, 3, "bias") is None
    free = any(not isinstance(n, int) for n in value.shape[1:])
    return plain and free and value.dim() > 2 and len(shape) == value.dim() - 1
