"""Narrows joins and cuts: of features unchanged, of tokens as ranges of rows."""

from __future__ import annotations

import operator

from torch import fx

from maskfx.ir.geometry.lanes import (
    Lane,
    fixed_count,
    int_hint,
    lane_of,
    lanes_of,
    node_shape,
    set_lane,
    shape_hint,
)
from maskfx.passes.context import (
    Editor,
    PassContext,
    Unsupported,
    argument,
    aten,
    from_rows,
    need_lane,
    node_at,
    op_name,
)
from maskfx.passes.geometry import value_of
from maskfx.passes.narrow.attention import count_rows
from maskfx.passes.operators import PADS
from maskfx.passes.row_form import along_axis, fixed_rows, full_rows, is_rows

CUTS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split", "unbind"})


def narrow_joins(graph: fx.Graph, ctx: PassContext) -> int:
    """Join and cut rows.

    Before  y = cat([text, image], 1); z = slice(y, 1, length)
    After   y = cat([text_rows, image_rows]); z = slice(y, 0, count of text rows)
    Keeps   joins of values without sites.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if node.op != "call_function" or node.graph is None:
            continue
        if name in CUTS and has_row_parts(node):
            cut_many(graph, ctx, node)
        elif name in ("slice", "select") and keeps_few(node):
            few(Editor(graph, ctx, node), node)
        elif not is_rows(node):
            continue
        elif name in ("cat", "concat", "concatenate"):
            join(Editor(graph, ctx, node), node)
        elif name == "stack":
            stack(Editor(graph, ctx, node), node)
        elif name == "slice":
            cut_one(Editor(graph, ctx, node), node)
        elif name == "slice_scatter":
            write_part(Editor(graph, ctx, node), node)
        elif name == "select":
            edit = Editor(graph, ctx, node)
            lane, axis = need_lane(node.args[0]), argument(node, 1, "dim")
            rows = edit.rows(node.args[0])
            if lane.features(axis) > 1:
                rows = edit.emit(
                    aten.select.int, rows, lane.row_dim(axis), argument(node, 2, "index")
                )
            edit.replace(rows)
        elif name in PADS:
            widens = need_lane(node.args[0]).segments != need_lane(node).segments
            (pad_tokens if widens else pad)(Editor(graph, ctx, node), node)
        else:
            continue
        count += 1
    return count


def has_row_parts(node: fx.Node) -> bool:
    lanes = lanes_of(node)
    source = node.args[0]
    lane = lane_of(source)
    return lanes is not None and lane is not None and lane.kind == "rows"


def keeps_few(node: fx.Node) -> bool:
    """Return True if the node keeps a fixed number of tokens, which are a value of each sample."""
    source, lane = lane_of(node.args[0]), lane_of(node)
    few = source is not None and source.has_sites and lane is not None and not lane.has_sites
    return few and "val" in node.meta


def few(edit: Editor, node: fx.Node) -> None:
    """Cut tokens of a fixed number out of the rows."""
    lane = need_lane(node.args[0])
    axis = argument(node, 1, "dim", 0) % len(lane.dims)
    start, count = start_of(node, axis, 2), 1
    if op_name(node) == "slice":
        count = node_shape(node)[axis]
    found = samples_of(edit, edit.rows(node.args[0]), lane, axis, (start, start + count))  # type: ignore[arg-type]
    edit.replace_plain(edit.emit(aten.reshape.default, found, [-1, *node_shape(node)[1:]]))


def start_of(node: fx.Node, axis: int, place: int) -> int:
    """Return where a slice begins, or which token a selection takes, counted from the first."""
    given = argument(node, place, "index" if op_name(node) == "select" else "start", 0) or 0
    start = int_hint(given.meta["val"] if isinstance(given, fx.Node) else given)
    return start + node_shape(node.args[0])[axis] if start < 0 else start  # type: ignore[arg-type]


def join(edit: Editor, node: fx.Node) -> None:
    out = need_lane(node)
    nodes: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    axis = argument(node, 1, "dim", 0) % len(out.dims)
    if out.is_feature_dim(axis):
        rows = []
        for value in nodes:
            row, part = along_axis(edit, value, out, axis)
            if part.features(axis) == 1:
                row = edit.emit(aten.unsqueeze.default, row, out.row_dim(axis))
            rows.append(row)
        edit.replace(edit.emit(aten.cat.default, rows, out.row_dim(axis)))
        return
    rows = [token_piece(edit, n, axis, out) for n in nodes if node_shape(n)[axis] != 0]
    edit.replace(edit.emit(aten.cat.default, rows, 0) if len(rows) > 1 else rows[0])


def token_piece(edit: Editor, value: fx.Node, axis: int, out: Lane) -> fx.Node:
    """Return the rows of a value that becomes a part of a token axis."""
    lane = need_lane(value)
    if lane.kind == "rows":
        return edit.reshape(edit.rows(value), lane.row_shape(), out.row_shape())
    if lane.kind == "const":
        raise Unsupported(edit.node, f"it joins {value}, which has no batch, to tokens")
    fixed, sizes = fixed_rows(edit, value, axis)
    return edit.reshape(fixed, sizes, out.row_shape())


def stack(edit: Editor, node: fx.Node) -> None:
    out = need_lane(node)
    axis = argument(node, 1, "dim", 0) % len(out.dims)
    nodes: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    part = Lane((*out.dims[:axis], (), *out.dims[axis + 1 :]))
    rows = [full_rows(edit, widened(edit, v, axis), part) for v in nodes]
    if len(nodes) == 1:
        edit.replace(rows[0])
        return
    edit.replace(edit.emit(aten.stack.default, rows, out.row_dim(axis)))


def widened(edit: Editor, value: fx.Node, axis: int) -> fx.Node:
    """Insert a dimension of size one: from here on only the value's lane matters."""
    lane = need_lane(value)
    if lane.kind == "rows":
        wide = edit.emit(from_rows, edit.rows(value))
        set_lane(wide, Lane((*lane.dims[:axis], (), *lane.dims[axis:])))
        shape = node_shape(value)
        wide.meta["val"] = value.meta["val"].unsqueeze(axis)
        assert len(shape) + 1 == wide.meta["val"].dim()
        return wide
    new = edit.emit(aten.unsqueeze.default, value, axis)
    set_lane(new, Lane((*lane.dims[:axis], (), *lane.dims[axis:])))
    new.meta["val"] = value.meta["val"].unsqueeze(axis)
    return new


def cut_one(edit: Editor, node: fx.Node) -> None:
    lane, out = need_lane(node.args[0]), need_lane(node)
    axis = argument(node, 1, "dim", 0) % len(lane.dims)
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    if node_shape(node.args[0])[axis] == node_shape(node)[axis]:  # type: ignore[arg-type]
        edit.replace(rows)
    elif lane.is_feature_dim(axis):
        place = lane.row_dim(axis)
        rows = edit.emit(aten.slice.Tensor, rows, place, *node.args[2:], **node.kwargs)
        if out.features(axis) == 1:
            rows = edit.emit(aten.squeeze.dims, rows, [place])
        edit.replace(rows)
    else:
        start = start_of(node, axis, 2)
        edit.replace(row_range(edit, rows, lane, (start, start + node_shape(node)[axis])))


def write_part(edit: Editor, node: fx.Node) -> None:
    """Replace a part of the rows."""
    lane, source = need_lane(node.args[0]), need_lane(node.args[1])
    axis = argument(node, 2, "dim", 0) % len(lane.dims)
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    if node_shape(node.args[1])[axis] == node_shape(node)[axis]:  # type: ignore[arg-type]
        edit.replace(full_rows(edit, node.args[1], lane))  # type: ignore[arg-type]
    elif lane.is_feature_dim(axis):
        part = Lane((*lane.dims[:axis], source.dims[axis], *lane.dims[axis + 1 :]))
        new = full_rows(edit, node.args[1], part)  # type: ignore[arg-type]
        if part.features(axis) == 1:
            new = edit.emit(aten.unsqueeze.default, new, lane.row_dim(axis))
        target = aten.slice_scatter.default
        edit.replace(edit.emit(target, rows, new, lane.row_dim(axis), *node.args[3:]))
    else:
        start = start_of(node, axis, 3)
        stop, whole = start + node_shape(node.args[1])[axis], node_shape(node)[axis]  # type: ignore[arg-type]
        pieces = [token_piece(edit, node.args[1], axis, lane)]  # type: ignore[arg-type]
        if start:
            pieces.insert(0, row_range(edit, rows, lane, (0, start)))
        if stop < whole:
            pieces.append(row_range(edit, rows, lane, (stop, whole)))
        edit.replace(edit.emit(aten.cat.default, pieces, 0))


Part = tuple[int, int]  # start and stop of a part of a token axis, in the sizes at capture


def row_range(edit: Editor, rows: fx.Node, lane: Lane, part: Part) -> fx.Node:
    """Return the rows of a part of the tokens."""
    pieces, whole = list[fx.Node](), list[int]()
    kept = kept_segments(edit.ctx, lane, part)
    for number, inside in kept:
        if inside is None:
            whole.append(number)
            continue
        pieces += [rows_between(edit, rows, lane, whole)] if whole else []
        whole.clear()
        cut = cut_fixed(edit, rows_between(edit, rows, lane, [number]), lane, number, inside)
        pieces.append(edit.emit(aten.flatten.using_ints, cut, 0, 1))
    pieces += [rows_between(edit, rows, lane, whole)] if whole else []
    return pieces[0] if len(pieces) == 1 else edit.emit(aten.cat.default, pieces, 0)


def samples_of(edit: Editor, rows: fx.Node, lane: Lane, axis: int, part: Part) -> fx.Node:
    """Return a fixed number of tokens as a value of each sample, with its axes in order."""
    pieces = []
    for number, inside in kept_segments(edit.ctx, lane, part):
        own = rows_between(edit, rows, lane, [number])
        pieces.append(cut_fixed(edit, own, lane, number, inside))
    found = pieces[0] if len(pieces) == 1 else edit.emit(aten.cat.default, pieces, 1)
    place, rank = lane.row_dim(axis), 1 + len(lane.row_dims())
    order = [0, *range(2, place + 1), 1, *range(place + 1, rank + 1)]
    return found if order == sorted(order) else edit.emit(aten.permute.default, found, order)


def kept_segments(ctx: PassContext, lane: Lane, part: Part) -> list[tuple[int, Part | None]]:
    """Return the numbers of the segments that lie in a part, and which tokens if not all of one."""
    found: list[tuple[int, Part | None]] = []
    at = 0
    for number, segment in enumerate(lane.segments):
        size = ctx.pyramid.segment_size(segment)
        first, last = max(part[0] - at, 0), min(part[1] - at, size)
        if first < last:
            found.append((number, None if last - first == size else (first, last)))
        at += size
    return found


def rows_between(edit: Editor, rows: fx.Node, lane: Lane, numbers: list[int]) -> fx.Node:
    """Return the rows of segments that follow each other."""
    whole = lane.segments
    if len(numbers) == len(whole):
        return rows
    start = count_rows(edit, whole[: numbers[0]])
    stop = count_rows(edit, whole[: numbers[-1] + 1])
    return edit.emit(aten.slice.Tensor, rows, 0, start, stop)


def cut_fixed(edit: Editor, rows: fx.Node, lane: Lane, number: int, inside: Part | None) -> fx.Node:
    """Return (requests, tokens, ...) of the rows of a fixed segment, or of some of its tokens."""
    count = fixed_count(lane.segments[number])
    assert count is not None, lane
    apart = edit.emit(aten.unflatten.int, rows, 0, [-1, count])
    return apart if inside is None else edit.emit(aten.slice.Tensor, apart, 1, *inside)


def cut_many(graph: fx.Graph, ctx: PassContext, node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    lane = need_lane(source)
    position = 1 if op_name(node) == "unbind" else 2
    axis = argument(node, position, "dim", 0) % len(lane.dims)
    edit = Editor(graph, ctx, node)
    rows = edit.rows(source)
    lanes = lanes_of(node)
    assert lanes is not None
    parts: list[fx.Node] = []
    if op_name(node) == "unbind":
        if len(lanes) == 1:
            parts = [rows]
        else:
            taken = edit.emit(aten.unbind.int, rows, lane.row_dim(axis))
            parts = [edit.emit(operator.getitem, taken, i) for i in range(len(lanes))]
    elif lane.is_feature_dim(axis):
        sizes = [int(v.shape[axis]) for v in node.meta["val"]]
        if len(sizes) == 1:
            parts = [rows]
        else:
            taken = edit.emit(aten.split_with_sizes.default, rows, sizes, lane.row_dim(axis))
            parts = [edit.emit(operator.getitem, taken, i) for i in range(len(sizes))]
            parts = [
                edit.emit(aten.squeeze.dims, p, [lane.row_dim(axis)]) if s == 1 else p
                for p, s in zip(parts, sizes, strict=True)
            ]
    else:
        parts, start = [], 0
        for value, part in zip(node.meta["val"], lanes, strict=True):
            shape = shape_hint(value)
            stop = start + shape[axis]
            if part is not None and part.has_sites:
                parts.append(row_range(edit, rows, lane, (start, stop)))
            else:
                few_rows = samples_of(edit, rows, lane, axis, (start, stop))
                parts.append(edit.emit(aten.reshape.default, few_rows, [-1, *shape[1:]]))
            start = stop
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise Unsupported(user, f"it uses all parts of {node.name} at once")
        own, found = Editor(graph, ctx, user), parts[int(str(user.args[1]))]
        (own.replace if need_lane(user).has_sites else own.replace_plain)(found)
    graph.erase_node(node)


def pad_tokens(edit: Editor, node: fx.Node) -> None:
    """Add rows of a constant before and behind tokens."""
    lane, out = need_lane(node.args[0]), need_lane(node)
    rows, own = edit.rows(node_at(node, 0)), len(lane.segments)
    first = next(i for i in range(3) if out.segments[i : i + own] == lane.segments)
    pieces = [rows]
    for segments, place in ((out.segments[:first], 0), (out.segments[first + own :], 1)):
        if segments:
            sizes = [count_rows(edit, segments), *lane.row_shape()]
            made = edit.emit(aten.new_full.default, rows, sizes, value_of(node) or 0)
            pieces.insert(place * len(pieces), made)
    edit.replace(edit.emit(aten.cat.default, pieces, 0))


def pad(edit: Editor, node: fx.Node) -> None:
    lane, pads = need_lane(node.args[0]), [int(str(p)) for p in node.args[1]]  # type: ignore[union-attr]
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    out: list[int] = []
    value = argument(node, 3, "value") if op_name(node) == "pad" else argument(node, 2, "value")
    if op_name(node) == "pad" and argument(node, 2, "mode", "constant") != "constant":
        raise Unsupported(node, f"it pads by {argument(node, 2, 'mode')}")
    for dim in reversed(lane.row_dims()):
        at = 2 * (len(lane.dims) - 1 - dim)
        out += pads[at : at + 2] if at < len(pads) else [0, 0]
    if any(p for i, p in enumerate(pads) if (len(lane.dims) - 1 - i // 2) not in lane.row_dims()):
        raise Unsupported(node, "it pads an axis of size one")
    padded = edit.emit(aten.constant_pad_nd.default, rows, out, value or 0)
    gone = [lane.row_dim(dim) for dim in lane.row_dims() if node_shape(node)[dim] == 1]
    edit.replace(edit.emit(aten.squeeze.dims, padded, gone) if gone else padded)
