"""Tables among values that change from step to step: their axes adopt what they are combined with.

A table over tokens, such as a mask that picks one of two scales for each, may be combined with
values of requests before it meets the tokens. Which axis of it the tokens are shows only there, and
the next round of marking knows it from the beginning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from maskfx.ir.geometry.lanes import Dim, Tokens, shape_hint
from maskfx.passes.context import argument, node_at, node_value, op_name
from maskfx.passes.mark_stages import STEP, stage_of
from maskfx.passes.operators import POINTWISE

Place = tuple[fx.Node, int]  # a value, and an axis of it
CUTS = {"slice": 1, "select": 1, "unbind": 1, "split": 2, "split_with_sizes": 2, "chunk": 2}


def tables_at(
    nodes: Sequence[fx.Node],
    axis: int,
    dims: Sequence[Dim | None],
    same_size: Callable[[int, Dim], bool],
) -> dict[Place, Dim]:
    """Return the axes of tables that lie along the tokens which values computed from them meet.

    Args:
        nodes: the values that are combined.
        axis: where, counted from the last axis: -1.
        dims: what meets there.
        same_size: returns True for the size of a dimension.
    """
    found: dict[Place, Dim] = {}
    for dim in dims:
        if dim and all(isinstance(atom, Tokens) for atom in dim):
            for place in (place for node in nodes for place in tables_of(node, axis)):
                if same_size(shape_hint(node_value(place[0]))[place[1]], dim):
                    found[place] = dim
    return found


def tables_of(node: fx.Node, axis: int) -> list[Place]:
    """Return the tables that an axis of a value stems from; [] if not from tables alone."""
    ahead, seen, found = [(node, axis)], set[Place](), list[Place]()
    while ahead:
        value, at = ahead.pop()
        shape = shape_hint(node_value(value)) if is_tensor(value) else []
        at += len(shape) if at < 0 else 0
        if (value, at) in seen or not 0 <= at < len(shape) or shape[at] == 1:
            continue
        seen.add((value, at))
        if stage_of(value) != STEP:
            found.append((value, at))
            continue
        sources = sources_of(value, at, len(shape))
        if sources is None:
            return []
        ahead += sources
    return found


def sources_of(node: fx.Node, axis: int, rank: int) -> list[Place] | None:
    """Return where an axis of a pointwise result, or of a part of a value, comes from, or None."""
    name = op_name(node)
    if name in POINTWISE:
        return [(source, axis - rank) for source in node.all_input_nodes]
    cut = node_at(node, 0) if node.target is operator.getitem else node
    name = op_name(cut)
    if name not in CUTS:
        return None
    source = node_at(cut, 0)
    whole = node_value(source).dim()
    dim = int(argument(cut, CUTS[name], "dim", 0)) % whole
    own = axis + (rank < whole and dim <= axis)
    return None if own == dim else [(source, own)]


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node_value(node), torch.Tensor)
