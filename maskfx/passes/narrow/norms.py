"""Narrows norms: over features unchanged, over sites with the statistics of the rest."""

from __future__ import annotations

from torch import fx

from maskfx.ir.geometry.lanes import Lane
from maskfx.ir.programs.sources import Rest, RestStats
from maskfx.ops import wide
from maskfx.passes.context import Editor, PassContext, argument, aten, need_lane, op_name, ops
from maskfx.passes.lane_rules.frames import is_by_frame
from maskfx.passes.operators import NORMS, SCATTERS, SOFTMAXES
from maskfx.passes.row_form import along_axis, is_rows


def narrow_norms(graph: fx.Graph, ctx: PassContext) -> int:
    """Run norms on rows.

    Before  y = group_norm(x, groups, w, b)
    After   y = scale_shift(rows, group_scale(rows, rest, spans, groups, w, b), owner)
    Keeps   norms of values without sites.
    """
    count = 0
    for node in list(graph.nodes):
        name = op_name(node)
        if node.op != "call_function" or not is_rows(node):
            continue
        edit = Editor(graph, ctx, node)
        if name in NORMS:
            rows = edit.rows(node.args[0])
            edit.replace(edit.emit(node.target, rows, *node.args[1:], **node.kwargs))
        elif name in SOFTMAXES and not runs_over_sites(node):
            axis = need_lane(node.args[0]).row_dim(argument(node, 1, "dim"))
            rows = edit.rows(node.args[0])
            edit.replace(edit.emit(node.target, rows, axis, *node.args[2:], **node.kwargs))
        elif name in SCATTERS:
            scatter(edit, node)
        elif name == "group_norm":
            group_norm(edit, node)
        elif name == "batch_norm":
            batch_norm(edit, node)
        else:
            continue
        count += 1
    return count


def runs_over_sites(node: fx.Node) -> bool:
    """Return True for a softmax over sites, which is a reduction of them."""
    return not need_lane(node).is_feature_dim(argument(node, 1, "dim"))


def scatter(edit: Editor, node: fx.Node) -> None:
    """Write to features of each row."""
    out = need_lane(node)
    axis = argument(node, 1, "dim") % len(out.dims)

    def widened(value: fx.Node) -> fx.Node:
        rows, part = along_axis(edit, value, out, axis)
        alone = part.features(axis) == 1
        return edit.emit(aten.unsqueeze.default, rows, out.row_dim(axis)) if alone else rows

    args = fx.map_arg(node.args, widened)
    found = edit.emit(node.target, args[0], out.row_dim(axis), *args[2:], **node.kwargs)  # type: ignore[arg-type]
    gone = out.features(axis) == 1
    edit.replace(edit.emit(aten.squeeze.dims, found, [out.row_dim(axis)]) if gone else found)


def group_norm(edit: Editor, node: fx.Node) -> None:
    lane = need_lane(node.args[0])
    groups = argument(node, 1, "num_groups")
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    shape = lane.row_shape()
    flat = edit.reshape(rows, shape, [lane.features(1)]) if shape != [lane.features(1)] else rows
    if is_by_frame(lane):
        out = edit.emit(ops.scale_shift, flat, *frame_scales(edit, node, flat, lane))
        edit.replace(edit.reshape(out, [lane.features(1)], shape))
        return
    tap = edit.tap(flat, lane.segments, [lane.features(1)], groups)
    rest = edit.input(f"stats_{tap}", RestStats(tap, lane.segments))
    scales = edit.emit(
        ops.group_scale,
        flat,
        rest,
        edit.spans(lane.segments),
        groups,
        argument(node, 2, "weight"),
        argument(node, 3, "bias"),
        argument(node, 4, "eps", 1e-5),
    )
    out = edit.emit(ops.scale_shift, flat, scales, edit.owner(lane.segments))
    edit.replace(edit.reshape(out, [lane.features(1)], shape))


def frame_scales(edit: Editor, node: fx.Node, rows: fx.Node, lane: Lane) -> tuple[fx.Node, fx.Node]:
    """Return scale and shift of each frame, and the frame of each row."""
    groups = argument(node, 1, "num_groups")
    moments = edit.emit(ops.site_moments, rows, groups)
    tap = edit.tap(moments, lane.segments, [groups, 2], dtype=wide(node.meta["val"].dtype))
    rest = edit.input(f"rest_{tap}", Rest(tap, lane.segments))
    owner, others = (edit.lines(part, lane, "picture") for part in ("owner", "rest_owner"))
    frames = edit.emit(aten.sym_size.int, edit.lines("spans", lane, "picture"), 0)
    scales = edit.emit(
        ops.line_scale,
        moments,
        rest,
        owner,
        others,
        frames,
        lane.features(1),
        argument(node, 2, "weight"),
        argument(node, 3, "bias"),
        argument(node, 4, "eps", 1e-5),
    )
    return scales, owner


def batch_norm(edit: Editor, node: fx.Node) -> None:
    x, weight, bias, mean, var = node.args[:5]
    rows = edit.rows(x)  # type: ignore[arg-type]
    scale = edit.emit(
        aten.rsqrt.default, edit.emit(aten.add.Scalar, var, argument(node, 7, "eps", 1e-5))
    )
    if weight is not None:
        scale = edit.emit(aten.mul.Tensor, scale, weight)
    out = edit.emit(aten.mul.Tensor, edit.emit(aten.sub.Tensor, rows, mean), scale)
    edit.replace(out if bias is None else edit.emit(aten.add.Tensor, out, bias))
