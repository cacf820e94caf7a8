"""Helpers that several passes share: bringing operands to the rows of a result."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from maskfx.ir.geometry.lanes import (
    Batch,
    Feature,
    Frames,
    Lane,
    NotLaned,
    grid_level,
    grid_segment,
    lane_of,
    node_shape,
)
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.sources import Halo, Neighbours, Weights
from maskfx.passes.context import (
    Editor,
    Unsupported,
    aten,
    need_lane,
    node_value,
    ops,
)


def is_rows(node: fx.Node) -> bool:
    """Return True if the node holds one full value with sites."""
    lane = lane_of(node)
    return (
        lane is not None
        and lane.has_sites
        and node.op == "call_function"
        and getattr(node.target, "__name__", "") not in ("to_rows", "from_rows")
        and "val" in node.meta
    )


def spread_to(edit: Editor, value: fx.Node, out: Lane) -> fx.Node:
    """Return an operand as rows of `out`, or as a value that broadcasts over their features."""
    lane = need_lane(value)
    if not lane.has_sites and not lane.has_batch and not node_shape(value):
        return value
    shape = aligned(lane, out)
    if lane.kind == "rows":
        return spread_features(edit, rows_at(edit, value, out), lane.row_shape(), shape, out)
    if lane.kind == "sample":
        first = next(d for d in lane.dims if d)  # axes of size one may stand before the batch
        if not isinstance(first[0], Batch) or sum(isinstance(a, Batch) for a in lane.atoms()) > 1:
            raise Unsupported(edit.node, f"the batch of {value} isn't its first axis: {lane}")
        if (axis := frames_axis(lane, out)) is not None:
            return spread_frames(edit, value, axis, shape, out)
        flat = (
            edit.emit(aten.reshape.default, value, [-1, *shape])
            if not lane.dims[0] or node_rest(value) != shape
            else value
        )
        return edit.emit(aten.index_select.default, flat, 0, edit.owner(out.segments))
    return edit.emit(aten.reshape.default, value, shape) if node_shape(value) != shape else value


def frames_axis(lane: Lane, out: Lane) -> int | None:
    """Return the dimension of a value without sites along which a frame's value lies, or None."""
    below = out.dims[len(out.dims) - len(lane.dims) :]
    for axis, (own, dim) in enumerate(zip(lane.dims, below, strict=True)):
        framed = any(isinstance(a, Frames) for a in dim)
        if framed and any(isinstance(a, Feature) for a in own):
            return axis
    return None


def spread_frames(edit: Editor, value: fx.Node, axis: int, shape: list[int], out: Lane) -> fx.Node:
    """Return a value of each frame as rows of `out`."""
    lane = need_lane(value)
    first = next(i for i, dim in enumerate(lane.dims) if Batch() in dim)
    if axis != first:  # the frames come behind the batch
        others = [i for i in range(len(lane.dims)) if i not in (first, axis)]
        value = edit.emit(aten.permute.default, value, [first, axis, *others])
    flat = edit.emit(aten.reshape.default, value, [-1, *shape])
    return edit.emit(aten.index_select.default, flat, 0, edit.lines("owner", out, "picture"))


def rows_at(edit: Editor, value: fx.Node, out: Lane) -> fx.Node:
    """Return the rows of a value at the sites of another lane."""
    lane, rows = need_lane(value), edit.rows(value)
    same = segments_of(edit, lane) == out.segments
    return rows if same else read_at(edit, rows, lane, out)


def read_at(edit: Editor, rows: fx.Node, lane: Lane, out: Lane) -> fx.Node:
    """Read rows at the sites of another level of the same size, whose active sites are others."""
    pyramid, shape = edit.ctx.pyramid, lane.row_shape()
    pair = [grid_level(s) for part in (lane, out) for s in part.segments]
    known = [level for level in pair if level is not None]
    alike = len(pair) == len(known) == 2 and pyramid.hints[known[0]] == pyramid.hints[known[1]]
    if not alike or pyramid.levels[known[0]].region != pyramid.levels[known[1]].region:
        raise Unsupported(edit.node, f"it has rows {lane.segments}, not {out.segments}")
    rows = edit.reshape(rows, shape, [prod(shape)])
    window = Window(known[0], known[1], (1, 1), (1, 1), (0, 0))
    return edit.reshape(pick_up(edit, rows, prod(shape), window), [prod(shape)], shape)


def segments_of(edit: Editor, lane: Lane) -> tuple[str, ...]:
    try:
        return lane.segments
    except NotLaned as error:
        raise Unsupported(edit.node, str(error)) from error


def node_rest(value: fx.Node) -> list[int]:
    return node_shape(value)[1:]


def aligned(lane: Lane, out: Lane) -> list[int]:
    """Return the operand's feature size at each of the result's feature dimensions, or 1."""
    offset = len(out.dims) - len(lane.dims)
    return [lane.features(d - offset) if d >= offset else 1 for d in out.row_dims()]


def spread_features(
    edit: Editor, rows: fx.Node, have: list[int], want: list[int], out: Lane
) -> fx.Node:
    if prod(have) != prod(want):
        raise Unsupported(edit.node, f"features {have} don't line up with {want}")
    if have == want or not want:
        return rows
    if not have:
        rows = edit.emit(aten.unsqueeze.default, rows, 1)
        have = [1]
    if len(have) > 1:
        rows = edit.emit(aten.flatten.using_ints, rows, 1, -1)
    if len(want) > 1:
        rows = edit.emit(aten.unflatten.int, rows, 1, want)
    return rows


def full_rows(edit: Editor, value: fx.Node, out: Lane) -> fx.Node:
    """Return an operand as rows of `out` with all of `out`'s features (for joins)."""
    rows: fx.Node = spread_to(edit, value, out)
    lane = need_lane(value)
    shape = out.row_shape()
    if lane.kind == "const":
        owner = edit.owner(out.segments)
        count = edit.emit(aten.sym_size.int, owner, 0)
        return edit.emit(aten.expand.default, rows, [count, *shape])
    if aligned(lane, out) != shape:
        return edit.emit(aten.expand.default, rows, [-1, *shape])
    return rows


def along_axis(edit: Editor, value: fx.Node, out: Lane, axis: int) -> tuple[fx.Node, Lane]:
    """Return a value as rows of `out` with its own size along an axis of features, and its lane."""
    size = node_shape(value)[axis]
    part = Lane((*out.dims[:axis], (Feature(size),) if size != 1 else (), *out.dims[axis + 1 :]))
    return full_rows(edit, value, part), part


def fixed_rows(edit: Editor, value: fx.Node, axis: int) -> tuple[fx.Node, list[int]]:
    """Return a value without sites as rows along its token axis, and its feature sizes."""
    lane = need_lane(value)
    axis %= len(lane.dims)
    if not lane.dims[0] or lane.dims[0][0] != Batch() or not lane.is_feature_dim(axis):
        raise Unsupported(edit.node, f"{value} can't be laid out as tokens: {lane}")
    shape = node_shape(value)
    heads = [a.size for a in lane.dims[0] if isinstance(a, Feature)]
    rest = [i for i in range(1, len(shape)) if i != axis]
    if heads:
        value = edit.emit(aten.unflatten.int, value, 0, [-1, *heads])
        order = [0, len(heads) + axis, *range(1, 1 + len(heads)), *[len(heads) + i for i in rest]]
    else:
        order = [0, axis, *rest]
    if order != sorted(order):
        value = edit.emit(aten.permute.default, value, order)
    sizes = [*heads, *[shape[i] for i in rest if shape[i] != 1]]
    return edit.emit(aten.reshape.default, value, [-1, *sizes]), sizes


def pick_up(edit: Editor, rows: fx.Node, channels: int, window: Window) -> fx.Node:
    """Gather for each target row the (n, channels) rows that its window reads."""
    table = edit.input(f"neighbours_{window.name}", Neighbours(window))
    tap = edit.tap(rows, (grid_segment(window.source),), [channels])
    halo = edit.input(f"halo_{tap}_{window.name}", Halo(tap, window))
    return edit.emit(ops.gather, rows, halo, table)


def mixed(edit: Editor, wide: fx.Node, window: Window) -> fx.Node:
    """Return the weighted sums of what a window reads: (n, places, channels) to (n, channels)."""
    weights = edit.input(f"weights_{window.name}", Weights(window))
    each = edit.emit(aten.mul.Tensor, wide, edit.emit(aten.unsqueeze.default, weights, 2))
    total, dtype = edit.emit(aten.sum.dim_IntList, each, [1]), edit.node.meta["val"].dtype
    return total if dtype == torch.float32 else edit.emit(aten.to.dtype, total, dtype)


__all__ = [
    "aligned",
    "along_axis",
    "fixed_rows",
    "full_rows",
    "is_rows",
    "mixed",
    "node_value",
    "pick_up",
    "rows_at",
    "spread_to",
]
