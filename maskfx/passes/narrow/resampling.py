"""Narrows resampling: each row repeats a row of the other level, or mixes some of them."""

from __future__ import annotations

from math import ceil, prod

from torch import fx

from maskfx.ir.geometry.lanes import Y
from maskfx.ir.geometry.pyramid import Pyramid, Window
from maskfx.ir.programs.sources import Parents
from maskfx.passes.context import (
    Editor,
    PassContext,
    Unsupported,
    argument,
    aten,
    need_lane,
    op_name,
)
from maskfx.passes.operators import RESAMPLINGS
from maskfx.passes.row_form import is_rows, mixed, pick_up


def narrow_resampling(graph: fx.Graph, ctx: PassContext) -> int:
    """Repeat coarser rows for the active finer sites.

    Before  y = upsample_nearest2d(x, None, [2, 2])
    After   y = index_select(rows, 0, parents)
    or      y = gather(rows, halo, table)          (the row it repeats may be inactive)
    and     y = upsample_bilinear2d(x, None, False, [2, 2])
    becomes y = sum(gather(rows, halo, table) * weights, 1)
    Keeps   resampling of values without sites.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in RESAMPLINGS or not is_rows(node):
            continue
        edit = Editor(graph, ctx, node)
        if not need_lane(node.args[0]).has_sites:
            raise Unsupported(node, f"it resizes {need_lane(node.args[0])} to the picture's size")
        source, target = (
            next(a.level for a in need_lane(n).atoms() if isinstance(a, Y))
            for n in (node.args[0], node)
        )
        lane = need_lane(node.args[0])
        rows = edit.rows(node.args[0])
        rounding = RESAMPLINGS[op_name(node)]
        if rounding not in ("nearest", "nearest-exact"):
            rows = mix(edit, node, rows, source, target)
        elif source != target and rounding == "nearest" and covers(ctx.pyramid, source, target):
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


def mix(edit: Editor, node: fx.Node, rows: fx.Node, source: int, target: int) -> fx.Node:
    """Return the weighted sums of the rows that each row of the target level mixes."""
    lane, hints = need_lane(node.args[0]), edit.ctx.pyramid.hints
    window = mixing_window(node, source, target, hints[source], hints[target])
    channels, places = lane.features(1), prod(window.kernel)
    rows = edit.reshape(rows, lane.row_shape(), [channels])
    wide = edit.emit(
        aten.unflatten.int, pick_up(edit, rows, channels, window), 1, [places, channels]
    )
    return edit.reshape(mixed(edit, wide, window), [channels], lane.row_shape())


def mixing_window(
    node: fx.Node, source: int, target: int, have: tuple[int, int], size: tuple[int, int]
) -> Window:
    """Return the window of a resampling; what it mixes follows from the ratio of the sizes."""
    rounding, scales = RESAMPLINGS[op_name(node)], None
    if rounding != "area":
        rounding += "-aligned" if argument(node, 2, "align_corners") else ""
        scales = argument(node, 3, "scale_factors")
    scale = tuple(1 / float(s) for s in scales) if scales else ()
    ratios = scale or tuple(h / s for h, s in zip(have, size, strict=True))
    return Window(
        source,
        target,
        (places_of(rounding, ratios[0]), places_of(rounding, ratios[1])),
        (1, 1),
        (0, 0),
        rounding=rounding,
        scale=scale,
    )


def places_of(rounding: str, ratio: float) -> int:
    """Return the number of sites that one site mixes along an axis, at most."""
    if rounding == "area":
        return ceil(ratio) + 1
    reach = 1 if rounding.startswith("bilinear") else 2
    return 2 * ceil(reach * max(ratio, 1.0)) + 1 if "antialiased" in rounding else 2 * reach


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
