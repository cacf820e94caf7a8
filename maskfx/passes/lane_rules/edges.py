"""Edges: a row or column more that a join adds to a picture, such as a token behind each row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from maskfx.ir.geometry.lanes import Lane, X, Y, lane_of, node_shape
from maskfx.passes.context import argument, node_value, nodes_at, op_name

JOINS = frozenset({"cat", "concat", "concatenate"})


def edge_joined(nodes: Sequence[fx.Node], axis: int) -> int | None:
    """Return which of two joined values is one more row or column of the other, a picture."""
    lanes = [lane_of(node) for node in nodes]
    if len(nodes) != 2 or any(lane is None for lane in lanes):
        return None
    one = [isinstance(n.meta["val"].shape[axis], int) and node_shape(n)[axis] == 1 for n in nodes]
    pictures = [lane is not None and is_picture_axis(lane, axis) for lane in lanes]
    apart = one != pictures and sum(one) == sum(pictures) == 1
    return one.index(True) if apart else None


def joins_edge(node: fx.Node) -> bool:
    """Return True for a join of a picture and one more row or column."""
    if op_name(node) not in JOINS:
        return False
    axis = argument(node, 1, "dim", 0) % node_value(node).dim()
    return edge_joined(nodes_at(node, 0), axis) is not None


def is_picture_axis(lane: Lane, axis: int) -> bool:
    """Return True for the rows or the columns of a picture."""
    dim = lane.dims[axis]
    return len(dim) == 1 and isinstance(dim[0], (Y, X)) and not lane.is_half
