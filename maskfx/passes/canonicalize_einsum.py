"""Rewrites an einsum that only permutes to a permute."""

from __future__ import annotations

from torch import fx

from maskfx.passes.context import PassContext, aten, op_name


def canonicalize_einsum(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite a permuting einsum to a permute.

    Before  y = einsum("nhwpqc->nchpwq", [x])
    After   y = permute(x, [0, 5, 1, 3, 2, 4])
    Keeps   an einsum that multiplies or sums.
    """
    count = 0
    for node in list(graph.nodes):
        order = permutation(node) if op_name(node) == "einsum" else None
        if order is None:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(aten.permute.default, (node.args[1][0], order))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    return count


def permutation(node: fx.Node) -> list[int] | None:
    """Return the order of dimensions if the equation is a permutation, or None."""
    equation, operands = node.args[0], node.args[1]
    if (
        not isinstance(equation, str)
        or not isinstance(operands, (list, tuple))
        or len(operands) != 1
    ):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation or sorted(left) != sorted(right) or len(set(left)) != len(left):
        return None
    return [left.index(letter) for letter in right]
