"""Rewrites pad_sequence of one sequence, which needs no padding."""

from __future__ import annotations

from torch import fx

from maskfx.passes.context import PassContext, argument, aten, op_name


def canonicalize_sequences(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite a padded list of one sequence to an unsqueeze.

    Before  y = pad_sequence([x], True)
    After   y = unsqueeze(x, 0)
    Keeps   a list of several sequences.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) != "pad_sequence" or len(node.args[0]) != 1:
            continue
        first = 0 if argument(node, 1, "batch_first", False) else 1
        with graph.inserting_before(node):
            new = graph.call_function(aten.unsqueeze.default, (node.args[0][0], first))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    return count
