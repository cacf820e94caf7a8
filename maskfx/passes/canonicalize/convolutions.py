"""Rewrites convolutions of one window each to linear layers."""

from __future__ import annotations

from math import prod

from torch import fx

from maskfx.passes.context import PassContext, argument, aten, node_at, node_value, op_name
from maskfx.passes.spelling import Speller

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


def canonicalize_convolutions(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite a convolution whose window is as large as its input to a linear layer.

    Before  y = conv2d(x, w, b)                    (x has 2x2 places, as the window of w)
    After   y = unsqueeze(unsqueeze(linear(flatten(x, 1), flatten(w, 1), b), -1), -1)
    Keeps   inputs that are larger or of symbolic sizes, windows of one place, padding, groups.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in CONVOLUTIONS or not is_one_window(node):
            continue
        spell, bias = Speller(graph, node), argument(node, 2, "bias")
        rows, weight = (spell.emit(aten.flatten.using_ints, node_at(node, i), 1) for i in (0, 1))
        found = spell.emit(aten.linear.default, rows, weight, bias)
        for _ in node_value(node).shape[2:]:
            found = spell.emit(aten.unsqueeze.default, found, -1)
        spell.replace(found)
        count += 1
    return count


def is_one_window(node: fx.Node) -> bool:
    """Return True if the window of a convolution covers a batch of inputs exactly."""
    value, window = (node_value(node_at(node, i)).shape for i in (0, 1))
    if len(value) != len(window) or not all(isinstance(size, int) for size in value[2:]):
        return False
    padding, groups = argument(node, 4, "padding", 0), argument(node, 6, "groups", 1)
    padded = any(padding) if isinstance(padding, list | tuple) else padding not in (0, "valid")
    alike = tuple(value[2:]) == tuple(window[2:]) and prod(window[2:]) > 1
    return alike and not padded and groups == 1
