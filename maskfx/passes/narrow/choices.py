"""Narrows what experts choose: each active row follows the recorded choice."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from maskfx.ir.geometry.lanes import Lane, Tokens, lane_of, lanes_of, node_shape
from maskfx.ir.programs.program import Tap
from maskfx.ir.programs.sources import Kept
from maskfx.passes.context import (
    Choice,
    Editor,
    PassContext,
    Unsupported,
    argument,
    aten,
    need_lane,
    node_at,
    nodes_at,
    op_name,
    ops,
)
from maskfx.passes.row_form import full_rows, is_rows

ADDS = frozenset({"scatter_add", "index_add", "scatter_reduce"})
PRODUCTS = frozenset({"matmul", "bmm", "_grouped_mm"})


@dataclass(frozen=True)
class Chosen:
    """The rows of a choice: of each the row that was chosen, its expert, each expert's end."""

    rows: fx.Node
    experts: fx.Node
    ends: fx.Node


def narrow_choices(graph: fx.Graph, ctx: PassContext) -> int:
    """Compute for each expert those active rows that it chose when the step was recorded.

    Before  i = topk(scores, 8)[1]; y = index(x, [i])     (of each expert, over all sites)
    After   rows = chosen(choose(scores, kept, 8)); y = index_select(x, 0, rows)
    and     y = topk(scores, 2)                           (of each site, over features)
    becomes y = topk(rows, 2)
    Keeps   topk of values without sites.
    """
    count = 0
    found: dict[str, Chosen] = {}
    by_name = {choice.node: segment for segment, choice in ctx.choices.items()}
    parts: dict[str, list[fx.Node]] = {}
    for node in list(graph.nodes):
        name = op_name(node)
        if node.op != "call_function":
            continue
        if name == "topk" and node.name in by_name and lanes_of(node) is not None:
            segment = by_name[node.name]
            found[segment] = choose(graph, ctx, node, ctx.choices[segment])
        elif name == "topk" and of_features(node):
            topk(graph, ctx, node)
        elif "choice" in node.meta and node.meta["choice"] in found:
            narrow(Editor(graph, ctx, node), node, found[node.meta["choice"]], parts)
        elif is_rows(node) and name in ("gather", "index_select", "index"):
            pick(Editor(graph, ctx, node), node)
        else:
            continue
        count += 1
    return count


def of_features(node: fx.Node) -> bool:
    lane = lane_of(node.args[0])
    return lane is not None and lane.kind == "rows" and lanes_of(node) is not None


def choose(graph: fx.Graph, ctx: PassContext, node: fx.Node, choice: Choice) -> Chosen:
    """Emit the rows that experts chose, and record which they were."""
    edit, lane = Editor(graph, ctx, node), need_lane(node.args[0])
    scores = edit.rows(node.args[0])  # type: ignore[arg-type]
    segments = lane.segments
    spans, rest = edit.spans(segments), edit.rest_spans(segments)
    chosen = edit.emit(ops.choose, scores, scores, spans, rest, choice.count)
    name = f"{node.name}_{len(ctx.interface.taps)}"
    chosen.meta["tap"] = name
    dtype = node.meta["val"][0].dtype
    ctx.interface.taps[name] = Tap(name, segments, (choice.experts,), dtype)
    kept = edit.input(f"kept_{name}", Kept(name, segments))
    chosen.args = (scores, kept, spans, rest, choice.count)
    sites = 1
    for atom in choice.axis:
        sites *= ctx.pyramid.size(atom)
    listed = edit.emit(ops.chosen, chosen, choice.experts * choice.count / sites)
    rows, experts, ends = (edit.emit(operator.getitem, listed, i) for i in range(3))
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == 0 and user.users:
            values = edit.emit(aten.index.Tensor, scores, [rows, experts])
            Editor(graph, ctx, user).replace(values)
    return Chosen(rows, experts, ends)


def topk(graph: fx.Graph, ctx: PassContext, node: fx.Node) -> None:
    """Pick the largest features of each row."""
    edit, lane = Editor(graph, ctx, node), need_lane(node.args[0])
    count, axis = argument(node, 1, "k"), argument(node, 2, "dim", -1)
    if lane.features(axis % len(lane.dims)) == 1:
        raise Unsupported(node, "it picks of one feature")
    place = lane.row_dim(axis)
    more = argument(node, 3, "largest", True), argument(node, 4, "sorted", True)
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    both = edit.emit(aten.topk.default, rows, count, place, *more)
    for user in list(node.users):
        part = edit.emit(operator.getitem, both, user.args[1])
        if count == 1:
            part = edit.emit(aten.squeeze.dims, part, [place])
        Editor(graph, ctx, user).replace(part)
    graph.erase_node(node)


def narrow(edit: Editor, node: fx.Node, chosen: Chosen, parts: dict[str, list[fx.Node]]) -> None:
    """Narrow one operator that picks chosen rows, computes with them or adds them up."""
    name = op_name(node)
    if name in ("gather", "index", "index_select"):
        rows, lane = edit.rows(node.args[0]), need_lane(node.args[0])  # type: ignore[arg-type]
        if name == "gather" and len(lane.row_shape()) > len(need_lane(node).row_shape()):
            if len(lane.row_shape()) != 1:
                raise Unsupported(node, "it picks of several features of the experts")
            edit.replace(edit.emit(aten.index.Tensor, rows, [chosen.rows, chosen.experts]))
            return
        edit.replace(edit.emit(aten.index_select.default, rows, 0, chosen.rows))
    elif name in ADDS:
        base, source = node.args[0], node.args[3]
        out = need_lane(node)
        rows = full_rows(edit, base, out)  # type: ignore[arg-type]
        added = edit.rows(source)  # type: ignore[arg-type]
        added = edit.reshape(added, need_lane(source).row_shape(), out.row_shape())
        edit.replace(edit.emit(aten.index_add.default, rows, 0, chosen.rows, added))
    elif name in PRODUCTS:
        rows = edit.rows(node.args[0])  # type: ignore[arg-type]
        edit.replace(edit.emit(ops.expert_product, rows, node.args[1], chosen.ends))
    elif name in ("cat", "concat", "concatenate", "stack"):
        joined = [edit.rows(n) for n in nodes_at(node, 0) if 0 not in node_shape(n)]
        edit.replace(edit.emit(aten.cat.default, joined, 0))
    elif name == "select":
        split = by_expert(edit, node_at(node, 0), chosen, parts)
        edit.replace(split[argument(node, 2, "index")])
    else:
        split = by_expert(edit, node_at(node, 0), chosen, parts)
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise Unsupported(user, f"it uses all parts of {node.name} at once")
            Editor(edit.graph, edit.ctx, user).replace(split[int(str(user.args[1]))])
        edit.graph.erase_node(node)


def by_expert(
    edit: Editor, value: fx.Node, chosen: Chosen, parts: dict[str, list[fx.Node]]
) -> list[fx.Node]:
    """Return the rows of each expert."""
    if value.name not in parts:
        split = edit.emit(ops.by_expert, edit.rows(value), chosen.ends)
        lane = need_lane(value)
        choice = next(a.segments[0] for a in lane.atoms() if isinstance(a, Tokens))
        experts = edit.ctx.choices[choice].experts
        parts[value.name] = [edit.emit(operator.getitem, split, i) for i in range(experts)]
    return parts[value.name]


def pick(edit: Editor, node: fx.Node) -> None:
    """Pick text tokens of each request, or features of each row."""
    lane, name = need_lane(node.args[0]), op_name(node)
    if name == "gather":
        axis, numbers = argument(node, 1, "dim"), node.args[2]
        out = need_lane(node)
        axis %= len(out.dims)
        source = Lane((*out.dims[:axis], lane.dims[axis], *out.dims[axis + 1 :]))
        rows = full_rows(edit, node.args[0], source)  # type: ignore[arg-type]
        index = full_rows(edit, numbers, out)  # type: ignore[arg-type]
        if 1 in (source.features(axis), out.features(axis)):
            raise Unsupported(node, "it picks of one feature, or one of them")
        edit.replace(edit.emit(aten.gather.default, rows, out.row_dim(axis), index))
        return
    numbers = node.args[1][0] if name == "index" else node.args[2]  # type: ignore[index]
    rows = edit.rows(node.args[0])  # type: ignore[arg-type]
    if name == "index_select" and lane.is_feature_dim(argument(node, 1, "dim")):
        axis = argument(node, 1, "dim") % len(lane.dims)
        place = lane.row_dim(axis)
        picked = edit.emit(aten.index_select.default, rows, place, numbers)
        if need_lane(node).features(axis) == 1:
            picked = edit.emit(aten.squeeze.dims, picked, [place])
        edit.replace(picked)
        return
    order = need_lane(numbers)
    own, out_spans = edit.spans(lane.segments), edit.spans(order.segments)
    index = edit.rows(numbers)  # type: ignore[arg-type]
    edit.replace(edit.emit(ops.pick_tokens, rows, index, own, out_spans))
