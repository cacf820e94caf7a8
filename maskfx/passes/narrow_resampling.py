"""Nearest-neighbour upsampling: each finer row repeats the coarser row it lies in."""

from __future__ import annotations

from torch import fx

from maskfx.lanes import Y
from maskfx.passes.context import Editor, PassContext, aten, need_lane, op_name
from maskfx.passes.rows import is_rows
from maskfx.program import Parents


def narrow_resampling(graph: fx.Graph, ctx: PassContext) -> int:
    """Repeat coarser rows for the active finer sites.

    Before  y = upsample_nearest2d(x, None, [2, 2])
    After   y = index_select(rows, 0, parents)
    Keeps   resampling that mixes sites (bilinear): no rule covers it.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in ("upsample_nearest2d", "_upsample_nearest_exact2d") or not is_rows(
            node
        ):
            continue
        edit = Editor(graph, ctx, node)
        source, target = (
            next(a.level for a in need_lane(n).atoms() if isinstance(a, Y))
            for n in (node.args[0], node)
        )
        rows = edit.rows(node.args[0])
        if source != target:
            exact = op_name(node) == "_upsample_nearest_exact2d"
            name = f"parents_{source}_{target}{'_exact' if exact else ''}"
            table = edit.input(name, Parents(source, target, exact))
            rows = edit.emit(aten.index_select.default, rows, 0, table)
        edit.replace(rows)
        count += 1
    return count
