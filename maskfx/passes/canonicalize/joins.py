"""Rewrites stacks of matrices to joins, and drops what is empty in a join."""

from __future__ import annotations

import torch
from torch import fx

from maskfx.passes.context import PassContext, argument, aten, nodes_at, op_name

STACKS = {"vstack": 0, "hstack": 1}
JOINS = frozenset({"cat", "concat", "concatenate", *STACKS})


def canonicalize_joins(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite a stack of matrices to a join, without its empty parts; of one part, to the part.

    Before  y = vstack([x, new_zeros(x, [0, 8])])
    After   y = x
    Keeps   stacks of vectors, joins without an empty part.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if name not in JOINS:
            continue
        parts = nodes_at(node, 0)
        if not all(isinstance(n.meta.get("val"), torch.Tensor) for n in parts):
            continue
        rank = node.meta["val"].dim()
        if name in STACKS and any(n.meta["val"].dim() != rank or rank < 2 for n in parts):
            continue
        kept = [
            n for n in parts if not any(isinstance(s, int) and s == 0 for s in n.meta["val"].shape)
        ]
        if not kept or name not in STACKS and len(kept) == len(parts):
            continue
        if any(n.meta["val"].dtype != node.meta["val"].dtype for n in kept):
            continue
        axis = STACKS.get(name, argument(node, 1, "dim", 0))
        new = kept[0]
        if len(kept) > 1:
            with graph.inserting_before(node):
                new = graph.call_function(aten.cat.default, (kept, axis))
            new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    return count
