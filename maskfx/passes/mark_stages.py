"""Marks which values change with the step, and which belong to the request alone."""

from __future__ import annotations

from torch import fx

from maskfx.ir.nodes import is_symbol_arithmetic
from maskfx.passes.context import PassContext, op_name

CONST, REQUEST, STEP = 0, 1, 2
TYPED_LIKE = frozenset({"new_empty", "new_full", "new_ones", "new_zeros"})


def mark_stages(graph: fx.Graph, ctx: PassContext) -> int:
    """Mark every node: CONST has no inputs, REQUEST stays the same for all steps, STEP changes.

    Sizes don't count as data: a value made from the image's size alone isn't a STEP value, nor is
    one that uses only the dtype of an argument.
    """
    for node in graph.nodes:
        if node.op == "placeholder":
            leaf = node.meta.get("leaf")
            stage = STEP if leaf is not None and leaf.step else REQUEST
        elif node.op == "get_attr":
            stage = CONST
        elif is_symbol_arithmetic(node):
            stage = REQUEST
        else:
            stage = max((stage_of(n) for n in node.all_input_nodes), default=CONST)
            if op_name(node) in TYPED_LIKE and node.args[0].op == "placeholder":
                stage = REQUEST
        node.meta["stage"] = stage
    return 0


def stage_of(node: fx.Node) -> int:
    return int(node.meta.get("stage", STEP))
