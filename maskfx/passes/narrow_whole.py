"""Narrows modules that stay whole: they run on rows."""

from __future__ import annotations

from typing import Any

from torch import fx

from maskfx.ir.lanes import Feature, Lane, node_shape
from maskfx.ops import run_whole
from maskfx.passes.context import Editor, PassContext, need_lane
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
        values: Any = node.args[1]
        rows = []
        for value in values:
            width = (Feature(node_shape(value)[-1]),)
            rows.append(full_rows(edit, value, Lane((*out.dims[:-1], width))))
        edit.replace(edit.emit(run_whole, node.args[0], rows))
        count += 1
    return count
