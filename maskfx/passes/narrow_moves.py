"""Narrows what moves sites: pads, slices and rolls along the axes of the picture."""

from __future__ import annotations

from torch import fx

from maskfx.ir.lanes import Lane, X, Y, lane_of
from maskfx.ir.pyramid import Window
from maskfx.passes.context import Editor, PassContext, argument, need_lane, op_name
from maskfx.passes.geometry import padding_of
from maskfx.passes.lane_rules.windows import site_shifts
from maskfx.passes.operators import PADS
from maskfx.passes.row_form import is_rows, pick_up

MOVES = PADS | {"slice", "roll"}


def narrow_moves(graph: fx.Graph, ctx: PassContext) -> int:
    """Read each site of the result from where it was: a window of one site.

    Before  y = roll(x, [-1, -1], [2, 3]); z = slice(x, 2, 0, h, 2)      (x is [b, c, h, w])
    After   y = gather(rows, halo, neighbours); z = gather(rows, halo, other neighbours)
    Keeps   pads, slices and rolls of features or tokens.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in MOVES or not is_rows(node) or lane_of(node.args[0]) is None:
            continue
        edit = Editor(graph, ctx, node)
        source, target = need_lane(node.args[0]), need_lane(node)
        window = window_of(node, source, target)
        if window is None:
            continue
        shape, width = target.row_shape(), 1
        for size in shape:
            width *= size
        rows = edit.reshape(edit.rows(node.args[0]), source.row_shape(), [width])
        picked = pick_up(edit, rows, width, window)
        edit.replace(edit.reshape(picked, [width], shape))
        count += 1
    return count


def window_of(node: fx.Node, source: Lane, target: Lane) -> Window | None:
    """Return the window of one site by which a result is read; None if no site moves."""
    levels = [
        next((a.level for a in lane.atoms() if isinstance(a, Y)), None) for lane in (source, target)
    ]
    before, stride, edge, name = (0, 0), (1, 1), "", op_name(node)
    if levels[0] is None or levels[1] is None or levels[0] == levels[1]:
        return None
    if name == "roll":
        shifts = site_shifts(node, source)
        assert shifts is not None
        before, edge = shifts, "circular"
    elif name == "slice":
        axis = argument(node, 1, "dim", 0) % len(source.dims)
        start, step = argument(node, 2, "start", 0) or 0, argument(node, 4, "step", 1)
        down = any(isinstance(a, Y) for a in source.dims[axis])
        across = any(isinstance(a, X) for a in source.dims[axis])
        assert down != across, "a slice of sites is along one axis"
        before = (-start, 0) if down else (0, -start)
        stride = (step, 1) if down else (1, step)
    else:
        found, pads = padding_of(node)
        assert found is not None
        edge, before = found, (pads[2], pads[0])
    return Window(levels[0], levels[1], (1, 1), stride, before, edge=edge)
