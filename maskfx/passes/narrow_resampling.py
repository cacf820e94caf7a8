"""Narrows nearest-neighbour upsampling: each finer row repeats the coarser row that contains it."""

from __future__ import annotations

from torch import fx

from maskfx.ir.lanes import Y
from maskfx.ir.pyramid import Pyramid, Window
from maskfx.ir.sources import Parents
from maskfx.passes.context import Editor, PassContext, aten, need_lane, op_name
from maskfx.passes.row_form import is_rows, pick_up

ROUNDING = {"upsample_nearest2d": "nearest", "_upsample_nearest_exact2d": "nearest-exact"}


def narrow_resampling(graph: fx.Graph, ctx: PassContext) -> int:
    """Repeat coarser rows for the active finer sites.

    Before  y = upsample_nearest2d(x, None, [2, 2])
    After   y = index_select(rows, 0, parents)
    or      y = gather(rows, halo, table)          (the row it repeats may be inactive)
    Keeps   resampling that mixes sites (bilinear): no rule covers it.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in ROUNDING or not is_rows(node):
            continue
        edit = Editor(graph, ctx, node)
        source, target = (
            next(a.level for a in need_lane(n).atoms() if isinstance(a, Y))
            for n in (node.args[0], node)
        )
        lane = need_lane(node.args[0])
        rows = edit.rows(node.args[0])
        rounding = ROUNDING[op_name(node)]
        if source != target and rounding == "nearest" and covers(ctx.pyramid, source, target):
            table = edit.input(f"parents_{source}_{target}", Parents(source, target))
            rows = edit.emit(aten.index_select.default, rows, 0, table)
        elif source != target:
            channels, one = lane.features(1), (1, 1)
            window = Window(source, target, one, one, (0, 0), rounding=rounding)
            rows = edit.reshape(rows, lane.row_shape(), [channels])
            rows = edit.reshape(pick_up(edit, rows, channels, window), [channels], lane.row_shape())
        edit.replace(rows)
        count += 1
    return count


def covers(pyramid: Pyramid, coarse: int, fine: int) -> bool:
    """Return True if a finer site's nearest coarser site is active whenever the finer one is."""
    up, down = pyramid.levels[fine], pyramid.levels[coarse]
    if up.parent == coarse:  # finer by an integer factor
        return up.divide == (1, 1) and up.grow == up.extra == (0, 0)
    halved = all(  # one site for every two finer ones, and one for a remainder
        down.grow[i] + down.divide[i] * down.extra[i] == down.divide[i] - 1 and down.divide[i] <= 2
        for i in (0, 1)
    )
    return down.parent == fine and down.times == (1, 1) and halved
