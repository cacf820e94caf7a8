"""Narrows elementwise operators to rows."""

from __future__ import annotations

from torch import fx

from maskfx.ir.geometry.lanes import lane_of
from maskfx.passes.context import Editor, PassContext, need_lane, op_name
from maskfx.passes.operators import POINTWISE
from maskfx.passes.row_form import full_rows, is_rows, spread_to


def narrow_pointwise(graph: fx.Graph, ctx: PassContext) -> int:
    """Run elementwise operators on rows; a value of the request is broadcast to its rows.

    Before  y = add(x, shift)           (x is [b, c, h, w], shift is [b, c, 1, 1])
    After   y = add(rows, index_select(shift, 0, owner))
    Keeps   operators on values without sites.
    """
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or op_name(node) not in POINTWISE or not is_rows(node):
            continue
        edit = Editor(graph, ctx, node)
        out = need_lane(node)

        def operand(value: fx.Node, edit: Editor = edit, out: object = out) -> fx.Node:
            return spread_to(edit, value, out) if lane_of(value) is not None else value  # type: ignore[arg-type]

        args = fx.map_arg(node.args, operand)
        kwargs = fx.map_arg(dict(node.kwargs), operand)
        if not any(lane_of(n) and need_lane(n).kind == "rows" for n in node.all_input_nodes):
            first = full_rows(edit, node.all_input_nodes[0], out)
            args = (first, *args[1:])
        edit.replace(edit.emit(node.target, *args, **kwargs))
        count += 1
    return count
