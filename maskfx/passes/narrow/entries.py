"""Narrows cuts: a table selects the rows behind a cut from the rows before it and loaded rows."""

from __future__ import annotations

from torch import fx

from maskfx.ir.programs.sources import Enter, Loaded
from maskfx.passes.context import Editor, PassContext, enter_rows, need_lane, ops, slug


def narrow_entries(graph: fx.Graph, ctx: PassContext) -> int:
    """Select the rows behind a cut by a table.

    Before  z = enter_rows(y)
    After   z = enter(rows, loaded, table)
    Keeps   nothing.
    """
    count = 0
    for node in list(graph.nodes):
        if node.target is not enter_rows:
            continue
        edit = Editor(graph, ctx, node)
        source, lane = node.args[0], need_lane(node)
        before, after = need_lane(source).segments, lane.segments
        rows = edit.rows(source)
        tap = edit.tap(rows, before, lane.row_shape())
        loaded = edit.input(f"loaded_{tap}_{slug(after)}", Loaded(tap, before, after))
        table = edit.input(f"enter_{slug(before)}_{slug(after)}", Enter(before, after))
        edit.replace(edit.emit(ops.enter, rows, loaded, table))
        count += 1
    return count
