"""Narrows what moves sites: pads, slices, rolls and writes along the axes of the picture."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import fx

from maskfx.ir.geometry.lanes import Lane, X, Y, lane_of
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.sources import Weights
from maskfx.passes.context import (
    Editor,
    PassContext,
    argument,
    aten,
    need_lane,
    node_at,
    nodes_at,
    op_name,
)
from maskfx.passes.geometry import edge_of, ends_of, value_of
from maskfx.passes.lane_rules.edges import JOINS, edge_joined
from maskfx.passes.lane_rules.moved import listed
from maskfx.passes.lane_rules.windows import frames_turned, site_shifts
from maskfx.passes.operators import PADS
from maskfx.passes.row_form import full_rows, is_rows, pick_up

MOVES = PADS | {"slice", "roll", "flip", "slice_scatter"}


def narrow_moves(graph: fx.Graph, ctx: PassContext) -> int:
    """Read each site of the result from where it was: a window of one site.

    Before  y = roll(x, [-1, -1], [2, 3]); z = slice(x, 2, 0, h, 2)      (x is [b, c, h, w])
    After   y = gather(rows, halo, neighbours); z = gather(rows, halo, other neighbours)
    and     y = slice_scatter(x, z, 2, 0, h, 2)
    becomes y = where(weights > 0, gather(other rows, halo, neighbours), rows)
    and     y = cat([x, z], 3)                                        (z is [b, c, h, 1])
    becomes y = where(weights > 0, gather(rows, halo, neighbours), rows of z)
    and     y = pad(x, [1, 1, 1, 1], value=2)
    becomes y = where(weights > 0, gather(rows, halo, neighbours), full(2))
    Keeps   pads, joins, slices and writes of features or tokens.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) in JOINS and is_rows(node):
            count += join_edge(Editor(graph, ctx, node), node)
            continue
        if op_name(node) not in MOVES or not is_rows(node) or lane_of(node.args[0]) is None:
            continue
        edit = Editor(graph, ctx, node)
        written = op_name(node) == "slice_scatter"
        moved = node_at(node, 1 if written else 0)
        source, target = need_lane(moved), need_lane(node)
        window = window_of(ctx, node, source, target)
        if window is None:
            moves = FEATURES.get(op_name(node))
            if moves is not None:
                moves(edit, node)
                count += 1
            continue
        shape = target.row_shape()
        width = prod(shape)
        rows = edit.reshape(edit.rows(moved), source.row_shape(), [width])
        picked = pick_up(edit, rows, width, window)
        if written or op_name(node) in PADS and value_of(node):
            here = inside(edit, window)
            kept = (
                edit.reshape(full_rows(edit, node.args[0], target), shape, [width])
                if written
                else edit.emit(aten.full_like.default, picked, value_of(node))
            )
            picked = edit.emit(aten.where.self, here, picked, kept)
        edit.replace(edit.reshape(picked, [width], shape))
        count += 1
    return count


def join_edge(edit: Editor, node: fx.Node) -> bool:
    """Narrow a join of a picture and one more row or column; return whether it is one."""
    out, nodes = need_lane(node), nodes_at(node, 0)
    axis = argument(node, 1, "dim", 0) % len(out.dims)
    edge = edge_joined(nodes, axis)
    if edge is None:
        return False
    picture, source = nodes[1 - edge], need_lane(nodes[1 - edge])
    levels = [next(a.level for a in lane.atoms() if isinstance(a, Y)) for lane in (source, out)]
    down = isinstance(out.dims[axis][0], Y)
    before = (1 - edge, 0) if down else (0, 1 - edge)
    window = Window(levels[0], levels[1], (1, 1), (1, 1), before)
    shape, width = out.row_shape(), prod(out.row_shape())
    rows = edit.reshape(edit.rows(picture), source.row_shape(), [width])
    added = edit.reshape(full_rows(edit, nodes[edge], out), shape, [width])
    found = edit.emit(
        aten.where.self, inside(edit, window), pick_up(edit, rows, width, window), added
    )
    edit.replace(edit.reshape(found, [width], shape))
    return True


def inside(edit: Editor, window: Window) -> fx.Node:
    """Return for each row whether its window of one site reads a site."""
    counted = replace(window, counts="inside")
    weights = edit.input(f"weights_{counted.name}", Weights(counted))
    return edit.emit(aten.gt.Scalar, weights, 0)


def roll_features(edit: Editor, node: fx.Node) -> None:
    lane = need_lane(node)
    shifts, dims = listed(argument(node, 1, "shifts")), listed(argument(node, 2, "dims"))
    moved = [
        (s, lane.row_dim(d)) for s, d in zip(shifts, dims, strict=True) if lane.features(d) > 1
    ]
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    if moved:
        rows = edit.emit(aten.roll.default, rows, [s for s, _ in moved], [d for _, d in moved])
    edit.replace(rows)


def flip_features(edit: Editor, node: fx.Node) -> None:
    lane = need_lane(node)
    dims = [d for d in listed(argument(node, 1, "dims")) if lane.features(d) > 1]
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    if dims:
        rows = edit.emit(aten.flip.default, rows, [lane.row_dim(d) for d in dims])
    edit.replace(rows)


FEATURES = {"roll": roll_features, "flip": flip_features}  # what moves no sites


def window_of(ctx: PassContext, node: fx.Node, source: Lane, target: Lane) -> Window | None:
    """Return the window of one site by which a result is read; None if no site moves."""
    levels = [
        next((a.level for a in lane.atoms() if isinstance(a, Y)), None) for lane in (source, target)
    ]
    before, stride, edge, name = (0, 0), (1, 1), "", op_name(node)
    shifts = site_shifts(ctx, node, source) if name == "roll" else None
    if levels[0] is None or levels[1] is None or levels[0] == levels[1] and shifts is None:
        return None
    part = front = (0, 0)
    early = 0
    if shifts is not None:
        (down, down_part), (across, across_part) = shifts
        before, part, edge = (down, across), (down_part, across_part), "circular"
        early = frames_turned(ctx, node, source)
    elif name in ("slice", "slice_scatter"):
        first = 1 if name == "slice" else 2
        axis = argument(node, first, "dim", 0) % len(source.dims)
        start, step = (
            argument(node, first + 1, "start", 0) or 0,
            argument(node, first + 3, "step", 1),
        )
        down = any(isinstance(a, Y) for a in source.dims[axis])
        across = any(isinstance(a, X) for a in source.dims[axis])
        assert down != across, "a slice of sites is along one axis"
        if isinstance(start, fx.Node):  # where a filled picture began before it was filled
            front, start = fronts(ctx, levels[0], (int(down), int(across))), 0
        start = -start if name == "slice" else start
        before = (start, 0) if down else (0, start)
        steps = (step, 1) if down else (1, step)
        if name == "slice_scatter":
            kind = {"inserted": steps, "counts": "inside"}
            return Window(levels[0], levels[1], (1, 1), (1, 1), before, **kind)  # type: ignore[arg-type]
        stride = steps
    else:
        edge = edge_of(node)
        before, front = starts_of(ctx, node, source), fronts(ctx, levels[1], (1, 1))
    more = {"edge": edge, "part": part, "front": front, "early": early}
    return Window(levels[0], levels[1], (1, 1), stride, before, **more)  # type: ignore[arg-type]


def fronts(ctx: PassContext, level: int, axes: tuple[int, int]) -> tuple[int, int]:
    """Return the `fill_front` of a filled level along these axes, 0 along the others."""
    down, across = ctx.pyramid.levels[level].fill_front
    return down * axes[0], across * axes[1]


def starts_of(ctx: PassContext, node: fx.Node, lane: Lane) -> tuple[int, int]:
    """Return how many rows and columns a padding adds before the picture."""
    ends, starts = ends_of(ctx, node), [0, 0]
    for i in range(len(ends) // 2):
        for atom in lane.dims[len(lane.dims) - 1 - i]:
            if isinstance(atom, (Y, X)):
                before = ends[2 * i]
                starts[isinstance(atom, X)] = before if isinstance(before, int) else 0
    return starts[0], starts[1]
