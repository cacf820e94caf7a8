"""Lane rules for joins and cuts: of features, and of tokens segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.types import IntLikeType

from maskfx.ir.geometry.cuts import piece_of
from maskfx.ir.geometry.lanes import (
    SITES,
    Batch,
    Feature,
    Lane,
    NotLaned,
    Tokens,
    at_level,
    fixed_count,
    fixed_segment,
    int_hint,
    lane_of,
    node_shape,
    same_dim,
    set_lane,
    shape_hint,
)
from maskfx.ir.geometry.pyramid import Level
from maskfx.passes.context import argument, node_value, nodes_at
from maskfx.passes.lane_rules.cuts import note_cut
from maskfx.passes.lane_rules.edges import JOINS, edge_joined, is_picture_axis
from maskfx.passes.lane_rules.marker import Marker, Rules, is_repeated, same_part
from maskfx.passes.lane_rules.token_pads import fill_up, has_site, surrounded
from maskfx.passes.lane_rules.windows import axis_number, placed, reached
from maskfx.passes.mark_stages import STEP, stage_of
from maskfx.passes.symbolic_sizes import front_in, is_same_size, is_size_of

rule = Rules()


@rule(*JOINS)
def cat(m: Marker, node: fx.Node) -> Lane:
    nodes = [n for n in nodes_at(node, 0) if 0 not in shape_hint(node_value(n))]
    out = node_shape(node)
    axis = argument(node, 1, "dim", 0) % len(out)
    if m.single:
        fill_up(m, node, nodes, axis)
    lanes = [m.need(n) for n in nodes]
    edge = edge_joined(nodes, axis)
    if edge is not None:
        lane = m.need(nodes[1 - edge])
        m.unify(nodes, out, free=axis, to=node)
        i, level = axis_number(lane, axis), lane.dims[axis][0].level
        grown = Level(level, grow=placed((0, 0), i, 1), offset=placed((0, 0), i, edge - 1))
        level = m.ctx.pyramid.derive(grown)
        if stage_of(nodes[edge]) != STEP:  # it has the other axis of the larger picture
            set_lane(nodes[edge], at_level(m.need(nodes[edge]), level))
        return at_level(lane, level)
    repeat_at_parts(m, node, nodes, axis)
    lanes = [m.need(n) for n in nodes]
    dims = m.unify(nodes, out, free=axis, to=node)
    parts = [lane_of(n).dims[axis] for n in nodes]  # type: ignore[union-attr]
    sizes = [node_shape(n)[axis] for n in nodes]
    if all(all(isinstance(a, Feature) for a in p) for p in parts):
        dims[axis] = (Feature(sum(sizes)),)
        return Lane(tuple(dims))
    segments: list[str] = []
    wholes = [n.meta["val"].shape[axis] for n in nodes]
    for lane, part, size, whole in zip(lanes, parts, sizes, wholes, strict=True):
        if all(isinstance(a, Feature) for a in part):
            if isinstance(whole, torch.SymInt):
                raise NotLaned(f"it joins {whole} tokens, a size of no known meaning")
            segments.append(fixed_segment(size))
        elif all(isinstance(a, SITES) for a in part) and lane.segments and same_part(part, lane):
            segments.extend(lane.segments)
        else:
            raise NotLaned(f"it joins {lane} along dimension {axis}")
    dims[axis] = (Tokens(tuple(segments)),)
    return Lane(tuple(dims))


def repeat_at_parts(m: Marker, node: fx.Node, nodes: Sequence[fx.Node], axis: int) -> None:
    """Mark values that are repeated along an axis of tokens as rows of the part they stand at."""
    repeated = [n for n in nodes if m.need(n).is_feature_dim(axis) and is_repeated(n, axis)]
    if not repeated or not any(has_site(m.need(n).dims[axis]) for n in nodes):
        return
    known = m.read_dim(node.meta["val"].shape[axis], axis == 0)
    segments = known[0].segments if known and isinstance(known[0], Tokens) else ()
    sizes = [m.ctx.pyramid.segment_size(s) for s in segments]
    starts = {(sum(sizes[:i]), sizes[i]): segments[i] for i in range(len(segments))}
    at = 0
    for other in nodes:
        size = node_shape(other)[axis]
        part = starts.get((at, size))
        if other in repeated and part is not None and piece_of(part) is not None:
            dims = m.need(other).dims
            set_lane(other, Lane((*dims[:axis], (Tokens((part,)),), *dims[axis + 1 :])))
        at += size


@rule("stack")
def stack(m: Marker, node: fx.Node) -> Lane:
    nodes: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    out = node_shape(node)
    axis = argument(node, 1, "dim", 0) % len(out)
    dims = m.unify(nodes, out[:axis] + out[axis + 1 :], to=node)
    return Lane(
        tuple([*dims[:axis], (Feature(len(nodes)),) if len(nodes) > 1 else (), *dims[axis:]])
    )


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def split(m: Marker, node: fx.Node) -> tuple[Lane, ...]:
    lane = m.need(node.args[0])
    axis = argument(node, 2, "dim", 0) % len(lane.dims)
    lanes: list[Lane] = []
    start: IntLikeType = 0
    for part in node.meta["val"]:
        stop = start + part.shape[axis]
        lanes.append(cut(m, lane, axis, start, stop))
        start = stop
    return tuple(lanes)


@rule("unbind")
def unbind(m: Marker, node: fx.Node) -> tuple[Lane, ...]:
    lane = m.need(node.args[0])
    axis = argument(node, 1, "dim", 0) % len(lane.dims)
    if not lane.is_feature_dim(axis) and not m.is_batch_of_one(lane.dims[axis]):
        raise NotLaned(f"it splits {lane} along dimension {axis}")
    out = Lane(lane.dims[:axis] + lane.dims[axis + 1 :])
    return tuple(out for _ in node.meta["val"])


@rule("select")
def select(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    axis = argument(node, 1, "dim") % len(lane.dims)
    plain = lane.is_feature_dim(axis) or m.is_batch_of_one(lane.dims[axis])
    if not plain and not selects_fixed(m, node, lane, axis):
        raise NotLaned(f"it selects from dimension {axis} of {lane}")
    return Lane(lane.dims[:axis] + lane.dims[axis + 1 :])


def selects_fixed(m: Marker, node: fx.Node, lane: Lane, axis: int) -> bool:
    """Return True if it selects one of a fixed number of tokens, such as that of a class."""
    if not is_few(lane, axis) or not isinstance(lane.dims[axis][0], Tokens):
        return False
    place, whole = argument(node, 2, "index"), node_value(node.args[0]).shape[axis]  # type: ignore[arg-type]
    at = int_hint(hinted(place))
    segments = lane.segments if at >= 0 else lane.segments[::-1]
    for segment in segments:
        fixed = fixed_count(segment) is not None
        if not fixed and isinstance(place, int) and isinstance(whole, torch.SymInt):
            return False  # for another size of the picture, it selects another kind of token
        size = m.ctx.pyramid.segment_size(segment)
        if at in range(-size, size):
            return fixed
        at += -size if at >= 0 else size
    return False


@rule("slice")
def slice_(m: Marker, node: fx.Node) -> Lane:
    lane = m.need(node.args[0])
    axis = argument(node, 1, "dim", 0) % len(lane.dims)
    before, after = node_shape(node.args[0])[axis], node_shape(node)[axis]  # type: ignore[arg-type]
    if is_picture_axis(lane, axis):
        whole, size = (n.meta["val"].shape[axis] for n in (node.args[0], node))  # type: ignore[union-attr]
        return lane if is_same_size(m.ctx, whole, size) else site_slice(m, node, lane, axis)
    if before == after:
        return lane
    start = hinted(argument(node, 2, "start", 0) or 0)
    start = start + node.args[0].meta["val"].shape[axis] if int_hint(start) < 0 else start  # type: ignore[union-attr]
    if argument(node, 4, "step", 1) != 1 and not lane.is_feature_dim(axis):
        raise NotLaned(f"it selects every other part of dimension {axis} of {lane}")
    size = node.meta["val"].shape[axis]
    part = cut(m, lane, axis, start, start + size)
    if lane.is_feature_dim(axis) and isinstance(size, torch.SymInt) and stage_of(node) != STEP:
        read = m.read_dim(size, False)  # a table cut to the size of the picture
        if read is not None and has_site(read):
            return Lane((*part.dims[:axis], read, *part.dims[axis + 1 :]))
    return part


def written_sites(m: Marker, node: fx.Node, axis: int, start: int) -> Lane:
    """Return the lane of a picture of which every n-th row or column is written."""
    lane, source = m.need(node.args[0]), m.need(node.args[1])
    step, whole = argument(node, 5, "step", 1), node_shape(node)[axis]
    fits = node_shape(node.args[1])[axis] == -(-(whole - start) // step)  # type: ignore[arg-type]
    alike = at_level(source, 0).dims == at_level(lane, 0).dims
    if not fits or not alike or not isinstance(argument(node, 3, "start", 0) or 0, int):
        raise NotLaned(f"it writes {source} into {lane}")
    written = at_level(source, sliced_level(m, lane, axis, start, step, 0))
    if source.dims != written.dims:
        raise NotLaned(f"it writes {source} into {lane} from {start} on, which moves its sites")
    return lane


def site_slice(m: Marker, node: fx.Node, lane: Lane, axis: int) -> Lane:
    """Return the lane of every n-th row or column of a picture from a fixed one on."""
    start, step = argument(node, 2, "start", 0) or 0, argument(node, 4, "step", 1)
    whole, size = (n.meta["val"].shape[axis] for n in (node.args[0], node))  # type: ignore[union-attr]
    i, level = axis_number(lane, axis), lane.dims[axis][0].level  # type: ignore[union-attr]
    if isinstance(start, int) and start < 0:
        raise NotLaned(f"it cuts dimension {axis} of {lane} at {start}")
    if isinstance(whole, torch.SymInt) and not isinstance(size, torch.SymInt):
        raise NotLaned(f"it keeps {size} of dimension {axis} of {lane}")
    at = placed(m.ctx.pyramid.hints[level], i, int_hint(size))
    found = kept_level(m, node, lane, axis, start) if step == 1 else None
    if found is None and not isinstance(start, int):
        raise NotLaned(f"it cuts dimension {axis} of {lane} at {start}")
    if found is None:
        cut = cut_off(hinted(argument(node, 3, "end")), whole)
        if cut is None:
            raise NotLaned(f"it cuts dimension {axis} of {lane} at a part of its size")
        found = sliced_level(m, lane, axis, start, step, cut)
    if m.ctx.pyramid.hints[found] != at:
        raise NotLaned(f"it cuts dimension {axis} of {lane}")
    return at_level(lane, found)


def kept_level(m: Marker, node: fx.Node, lane: Lane, axis: int, start: object) -> int | None:
    """Return the known level that a slice keeps, such as the one before a padding; or None."""
    i, level = axis_number(lane, axis), lane.dims[axis][0].level  # type: ignore[union-attr]
    whole, size = (n.meta["val"].shape[axis] for n in (node.args[0], node))  # type: ignore[union-attr]
    own = m.ctx.pyramid.levels[level]
    before = replace(
        own,
        grow=placed(own.grow, i, 0),
        offset=placed(own.offset, i, 0),
        fill=placed(own.fill, i, 1),
        fill_front=placed(own.fill_front, i, 0),
    )
    filled = own.parent is not None and own.fill[i] > 1
    front = own.fill_front[i]
    begins = start == -own.offset[i]
    if front:
        begins = front_in(m.ctx, hinted(start), size, own, i, (front,)) is not None
    if filled and begins and is_size_of(m.ctx, size, before, (i,)):
        return own.parent if before == Level(own.parent) else m.ctx.pyramid.derive(before)
    if not isinstance(start, int):
        return None
    if start == 0 and is_same_size(m.ctx, whole, size, admitted=True):
        return level
    left = whole - size
    if isinstance(left, int) or left.node.maybe_as_int() is not None:
        return None
    m.differ = True
    found = reached(m, node, lane, Level(level, offset=placed((0, 0), i, start)))
    return None if found == level and start else found


def sliced_level(m: Marker, lane: Lane, axis: int, start: int, step: int, cut: int) -> int:
    """Return the level of every n-th row or column from `start` on, without the last `cut`."""
    i, level = axis_number(lane, axis), lane.dims[axis][0].level  # type: ignore[union-attr]
    return m.ctx.pyramid.derive(
        Level(
            parent=level,
            grow=placed((0, 0), i, step - 1 - start - cut),
            divide=placed((1, 1), i, step),
            offset=placed((0, 0), i, start),
        )
    )


def cut_off(end: IntLikeType | None, whole: IntLikeType) -> int | None:
    """Return how many of a dimension's last places a slice leaves; None if sizes differ in it."""
    if end is None or isinstance(end, int) and end >= int_hint(whole):
        return 0
    if int_hint(end) < 0:
        return -end if isinstance(end, int) else None
    left = whole - end
    found = left if isinstance(left, int) else left.node.maybe_as_int()
    return max(found, 0) if found is not None else 0 if int_hint(end) > int_hint(whole) else None


def hinted(value: object) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value


def cut(m: Marker, lane: Lane, axis: int, begin: IntLikeType, end: IntLikeType) -> Lane:
    """Return the lane of the part from begin to end of one dimension."""
    dims, start, stop = list(lane.dims), int_hint(begin), int_hint(end)
    if lane.is_feature_dim(axis):
        dims[axis] = (Feature(stop - start),) if stop - start != 1 else ()
        return Lane(tuple(dims))
    if len(dims[axis]) == 1 and isinstance(dims[axis][0], Tokens):
        inside, at = [], 0
        segments = dims[axis][0].segments  # type: ignore[union-attr]
        for number, segment in enumerate(segments):
            size = m.ctx.pyramid.segment_size(segment)
            kept = min(stop, at + size) - max(start, at)
            if kept == size:
                inside.append(segment)
            elif kept > 0:
                if fixed_count(segment) is None:
                    for place, hint in ((begin, start), (end, stop)):
                        within = at < hint < at + size
                        m.learned |= within and note_cut(m.ctx, m.numbers, segments, number, place)
                    raise NotLaned(f"it cuts through {segment} of {lane}")
                inside.append(fixed_segment(kept))
            at += size
        if not inside:
            raise NotLaned(f"it keeps nothing of dimension {axis} of {lane}")
        if is_few(lane, axis) and all(fixed_count(segment) is not None for segment in inside):
            dims[axis] = (Feature(stop - start),) if stop - start != 1 else ()
            return Lane(tuple(dims))
        dims[axis] = m.ctx.pyramid.token_atoms(inside)
        return Lane(tuple(dims))
    raise NotLaned(f"it cuts dimension {axis} of {lane}")


def is_few(lane: Lane, axis: int) -> bool:
    """Return True if a fixed number of the tokens of this axis is a value of each sample."""
    return axis != 0 and lane.dims[0][:1] == (Batch(),) and same_part(lane.dims[axis], lane)


@rule("slice_scatter")
def slice_scatter(m: Marker, node: fx.Node) -> Lane:
    lane, source = m.need(node.args[0]), m.need(node.args[1])
    axis = argument(node, 2, "dim", 0) % len(lane.dims)
    size = node_shape(node.args[1])[axis]  # type: ignore[arg-type]
    whole = node_shape(node)[axis]
    if size == whole:
        return lane
    begin = hinted(argument(node, 3, "start", 0) or 0)
    begin = begin + node.meta["val"].shape[axis] if int_hint(begin) < 0 else begin
    start = int_hint(begin)
    if has_site(source.dims[axis]) and lane.is_feature_dim(axis) and not lane.has_sites:
        lane = surrounded(m, node, axis, start)
        set_lane(node.args[0], lane)  # type: ignore[arg-type]
    if is_picture_axis(lane, axis) and is_picture_axis(source, axis):
        return written_sites(m, node, axis, start)
    if argument(node, 5, "step", 1) != 1 and not lane.is_feature_dim(axis):
        raise NotLaned(f"it writes every other part of {lane}")
    part = cut(m, lane, axis, begin, begin + node.args[1].meta["val"].shape[axis])  # type: ignore[union-attr]
    if any(not same_dim(a, b) for a, b in zip(part.dims, source.dims, strict=True)):
        raise NotLaned(f"it writes {source} into {lane}")
    if not lane.is_feature_dim(axis) and not begins_segment(m, lane, {start, start + size}):
        raise NotLaned(f"it writes into a part of the tokens of {lane}")
    return lane


def begins_segment(m: Marker, lane: Lane, places: set[int]) -> bool:
    """Return True if a segment begins or ends at each of these places."""
    ends = [0]
    for segment in lane.segments:
        ends.append(ends[-1] + m.ctx.pyramid.segment_size(segment))
    return places <= set(ends)
