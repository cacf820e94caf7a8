"""Narrows modules that stay whole: they run on rows."""

from __future__ import annotations

from torch import fx

from maskfx.ir.geometry.lanes import Feature, Lane, node_shape
from maskfx.ops import run_whole
from maskfx.passes.context import Editor, PassContext, need_lane, nodes_at
from maskfx.passes.row_form import full_rows, is_rows


def narrow_whole(graph: fx.Graph, ctx: PassContext) -> int:
    """Run a module that computes each token by itself on rows.

    Before  y = run_whole(experts, [x])          (x is [b, h * w, d])
    After   y = run_whole(experts, [rows])
    Keeps   modules that run on values without sites.
    """
    count = 0
    for node in list(graph.nodes):
        if node.target is not run_whole or not is_rows(node):
            continue
        edit, out = Editor(graph, ctx, node), need_lane(node)
        rows = []
        for value in nodes_at(node, 1):
            width = (Feature(node_shape(value)[-1]),)
            rows.append(full_rows(edit, value, Lane((*out.dims[:-1], width))))
        edit.replace(edit.emit(run_whole, node.args[0], rows))
        count += 1
    return count
