"""Narrows attention over sites: active rows as queries, cached keys and values of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from torch import fx

from maskfx.ir.geometry.lanes import (
    SITES,
    Batch,
    Feature,
    Frames,
    Lane,
    Tokens,
    each_segment,
    fixed_segment,
    grid_level,
    is_image,
    lane_of,
    node_shape,
    site_order,
)
from maskfx.ir.geometry.lines import is_apart
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.sources import CallSpans, Given, Halo, LinePairs, Lines, Pairs, Rest
from maskfx.passes.context import (
    Editor,
    PassContext,
    Unsupported,
    argument,
    aten,
    need_lane,
    op_name,
    ops,
    slug,
)
from maskfx.passes.lane_rules.frames import attends_by_frame
from maskfx.passes.lane_rules.mixing import is_within_rows, line_axis
from maskfx.passes.narrow.keys import few_rows, heads_last, heads_of_keys, node_heads, token_rows
from maskfx.passes.row_form import rows_at

ATTENTIONS = frozenset({"scaled_dot_product_attention", "pair_sum"})


def narrow_attention(graph: fx.Graph, ctx: PassContext) -> int:
    """Attend from active rows to active rows and to the cached keys and values of the rest.

    Before  y = scaled_dot_product_attention(q, k, v)
    After   y = attend(q, k, v, rest_k, rest_v, spans, spans, rest_spans)   (all rows-first)
    or      y = scaled_dot_product_attention(q, k, v)   (each row attends to its own features)
    and     y = pair_sum(q, k, v, "sigmoid")
    becomes y = site_pair_sum(q, k, v, rest_k, rest_v, spans, spans, rest_spans, "sigmoid")
    and     y = scaled_dot_product_attention(q, k, v)   (each sample attends to its batch)
    becomes y = attend(q, k, v, ...)   (to the samples of the same call)
    Keeps   other attention of values without sites.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) not in ATTENTIONS:
            continue
        if mixes_samples(node):
            within_calls(Editor(graph, ctx, node), node)
            count += 1
            continue
        if not attends_rows(node):
            continue
        edit = Editor(graph, ctx, node)
        lanes = [need_lane(n) for n in node.args[:3]]
        if is_within_rows(*lanes):
            within(edit, node)
        elif op_name(node) == "pair_sum":
            weigh(edit, node)
        elif line_axis(*lanes):
            along_lines(edit, node, line_axis(*lanes))
        elif attends_by_frame(*lanes):
            by_frame(edit, node)
        else:
            attend(edit, node)
        count += 1
    return count


def attends_rows(node: fx.Node) -> bool:
    """Return True if queries or keys are full values with sites."""
    lanes = [lane_of(n) for n in node.args[:2]]
    return "val" in node.meta and any(lane is not None and lane.has_sites for lane in lanes)


def mixes_samples(node: fx.Node) -> bool:
    """Return True if each sample attends to all samples of its call."""
    lane = lane_of(node)
    return lane is not None and lane.dims[-2:-1] == ((Batch(),),)


def within_calls(edit: Editor, node: fx.Node) -> None:
    """Let samples attend to those of their own call, in a batch of several calls."""
    each = (fixed_segment(1),)  # a row for each sample
    rows, shape = [], node_shape(node)
    for value in node.args[:3]:
        rank, depth = len(node_shape(value)), node_shape(value)[-1]  # type: ignore[arg-type]
        order = [rank - 2, *range(rank - 2), rank - 1]
        turned = edit.emit(aten.permute.default, value, order)
        heads = prod(node_shape(value)[:-2])  # type: ignore[arg-type]
        rows.append(edit.emit(aten.reshape.default, turned, [-1, heads, depth]))
    none = [edit.emit(aten.slice.Tensor, value, 0, 0, 0) for value in rows[1:]]
    spans = edit.spans(each), edit.input("call_spans", CallSpans()), edit.rest_spans(())
    scale = attention_scale(edit, node)
    out = edit.emit(ops.attend, *rows, *none, *spans, None, 1, False, scale)
    apart = edit.emit(aten.reshape.default, out, [-1, *shape[:-2], shape[-1]])
    order = [*range(1, len(shape) - 1), 0, len(shape) - 1]
    edit.replace_plain(edit.emit(aten.permute.default, apart, order))


def within(edit: Editor, node: fx.Node) -> None:
    """Let each row attend to its own features: a row holds a window of sites, for example."""
    lane, parts = need_lane(node), []
    shapes = [node_shape(n)[-2:] for n in node.args[:3]]  # type: ignore[arg-type]
    for value, shape in zip(node.args[:3], shapes, strict=True):
        rows, own = edit.rows(value), need_lane(value).row_shape()  # type: ignore[arg-type]
        heads = prod(own) // prod(shape)
        parts.append(edit.reshape(rows, own, [heads, *shape]))
    mask = attention_mask(node)
    if mask is not None:
        have = need_lane(mask)
        shape = [prod(map(have.features, range(len(have.dims) - 2))), *node_shape(mask)[-2:]]
        if have.has_sites:
            mask = edit.reshape(rows_at(edit, mask, lane), have.row_shape(), shape)
        else:
            mask = edit.emit(aten.reshape.default, mask, shape)
    if op_name(node) == "pair_sum":
        out = edit.emit(ops.pair_sum, *parts, node.args[3])
    else:
        named = {"scale": attention_scale(edit, node)}
        out = edit.emit(aten.scaled_dot_product_attention.default, *parts, mask, **named)
    width = [prod(lane.row_shape()) // (shapes[0][0] * shapes[2][1]), shapes[0][0], shapes[2][1]]
    edit.replace(edit.reshape(out, width, lane.row_shape()))


def along_lines(edit: Editor, node: fx.Node, axis: str) -> None:
    """Attend from the rows of each line to those of the same line; columns are sorted before."""
    sources: list[fx.Node] = list(node.args[:3])  # type: ignore[arg-type]
    rows, rest, spans = [], [], []
    queries, keys = (need_lane(n) for n in sources[:2])
    window = through_frames(queries, keys) if axis == "frames" else None
    for place, value in enumerate(sources):
        lane, depth = need_lane(value), node_shape(value)[-1]
        own = heads_last(edit, edit.rows(value), lane.row_shape(), depth)
        if place:
            tap = edit.tap(own, lane.segments, [node_heads(lane), depth])
            if window is None:
                kept = edit.input(f"rest_{tap}", Rest(tap, lane.segments))
            else:  # places that aren't masked in any frame are not read
                kept = edit.input(f"halo_{tap}_{window.name}", Halo(tap, window))
            rest.append(by_line(edit, kept, lane, axis, "rest_order", window))
        rows.append(by_line(edit, own, lane, axis, "order"))
    for lane, part in ((queries, "spans"), (keys, "spans"), (keys, "rest_spans")):
        spans.append(edit.lines(part, lane, axis, window))
    bias, layout = line_bias(edit, attention_mask(node), queries, spans)
    out = edit.emit(ops.attend, *rows, *rest, *spans, bias, *layout, attention_scale(edit, node))
    out = by_line(edit, out, queries, axis, "back")
    shape = [node_heads(queries), node_shape(sources[2])[-1]]
    edit.replace(edit.reshape(out, shape, need_lane(node).row_shape()))


def line_bias(
    edit: Editor, mask: fx.Node | None, queries: Lane, spans: list[fx.Node]
) -> tuple[fx.Node | None, tuple[int, bool]]:
    """Return the attention mask of all lines as one flat list, its number of heads, and True."""
    if mask is None:
        return None, (1, False)
    given = given_mask(edit, mask)
    heads = mask_heads(edit.node, node_shape(mask)[:-2], queries)
    lines = [edit.ctx.interface.inputs[str(table.target)] for table in spans]
    own, keys, rest = (line for line in lines if isinstance(line, Lines))
    name = f"line_pairs_{mask.target}_{heads}_{own.name}_to_{keys.name}_{rest.name}"
    return edit.input(name, LinePairs(given, own, keys, rest, heads)), (heads, True)


def given_mask(edit: Editor, mask: fx.Node) -> Given:
    """Return a mask that a request gives; its axes are queries and keys, and have no lanes."""
    given = edit.ctx.interface.inputs.get(str(mask.target)) if mask.op == "placeholder" else None
    if not isinstance(given, Given):
        raise Unsupported(edit.node, "its mask is computed in every step")
    return Given(given.origin, given.index, Lane(()))


def through_frames(queries: Lane, keys: Lane) -> Window:
    """Return the window by which each site of the queries reads its place in all frames."""
    frames = frames_of(keys)
    source, target = (next(map(grid_level, lane.segments)) for lane in (keys, queries))
    assert source is not None
    assert target is not None
    here = Window(source, target, (1, 1), (1, 1), (0, 0))
    return replace(here, depth=2 * frames - 1, early=frames - 1)


def by_line(
    edit: Editor,
    rows: fx.Node,
    lane: Lane,
    axis: str,
    part: str,
    window: Window | None = None,
) -> fx.Node:
    """Sort rows by line, or back; along picture rows, and in frames, they are sorted."""
    if not is_apart(axis):
        return rows
    return edit.emit(aten.index_select.default, rows, 0, edit.lines(part, lane, axis, window))


def by_frame(edit: Editor, node: fx.Node) -> None:
    """Attend from the rows of each frame to the tokens of that frame, such as its text."""
    query: fx.Node = node.args[0]  # type: ignore[assignment]
    lane, frames = need_lane(query), frames_of(need_lane(query))
    rows = heads_last(edit, edit.rows(query), lane.row_shape(), node_shape(query)[-1])
    operands, rest = [], []
    for value in node.args[1:3]:
        tokens, segments = token_rows(edit, value)  # type: ignore[arg-type]
        if len(segments) != 1:
            raise Unsupported(node, f"each frame attends to {segments}")
        each = Lane(((Tokens((each_segment(frames, segments[0]),)),),))
        width = [node_heads(need_lane(value)) // frames, node_shape(value)[-1]]  # type: ignore[arg-type]
        apart = edit.emit(aten.reshape.default, tokens, [-1, *width])
        turned = edit.lines("order", each, "picture")
        operands.append(edit.emit(aten.index_select.default, apart, 0, turned))
        rest.append(edit.emit(aten.slice.Tensor, operands[-1], 0, 0, 0))
    spans = [edit.lines(*part, "picture") for part in (("spans", lane), ("spans", each))]
    none = edit.lines("rest_spans", each, "picture")
    scale = attention_scale(edit, node)
    out = edit.emit(ops.attend, rows, *operands, *rest, *spans, none, None, 1, False, scale)
    shape = [node_heads(lane), node_shape(node.args[2])[-1]]  # type: ignore[arg-type]
    edit.replace(edit.reshape(out, shape, need_lane(node).row_shape()))


def frames_of(lane: Lane) -> int:
    return next(a.size for a in lane.atoms() if isinstance(a, Frames))


def attention_mask(node: fx.Node) -> fx.Node | None:
    return None if op_name(node) == "pair_sum" else argument(node, 3, "attn_mask")


def weigh(edit: Editor, node: fx.Node) -> None:
    """Sum the values of all keys, times a function of their scores."""
    queries, own, pairs, key_segments = operands(edit, node)
    images = tuple(s for s in key_segments if is_image(s))
    spans = edit.spans(own), edit.spans(key_segments), edit.rest_spans(images)
    out = edit.emit(ops.site_pair_sum, queries, *pairs, *spans, node.args[3])
    put_back(edit, node, out)


def attend(edit: Editor, node: fx.Node) -> None:
    queries, own, pairs, key_segments = operands(edit, node)
    images = tuple(s for s in key_segments if is_image(s))
    lane = need_lane(node.args[0])
    bias, layout = attention_bias(edit, argument(node, 3, "attn_mask"), lane, key_segments)
    out = edit.emit(
        ops.attend,
        queries,
        *pairs,
        edit.spans(own),
        edit.spans(key_segments),
        edit.rest_spans(images),
        bias,
        *layout,
        attention_scale(edit, node),
    )
    put_back(edit, node, out)


def operands(
    edit: Editor, node: fx.Node
) -> tuple[fx.Node, tuple[str, ...], list[fx.Node], tuple[str, ...]]:
    """Return the rows of the queries, and of keys and values with those of the rest."""
    q, k, v = (n for n in node.args[:3])
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    lane = need_lane(q)
    keys, key_segments = token_rows(edit, k)
    if lane.has_sites:
        queries = heads_last(edit, edit.rows(q), lane.row_shape(), node_shape(q)[-1])
        own = lane.segments
    else:
        queries, own = few_rows(edit, q, node_heads(need_lane(k)))
    values, _ = token_rows(edit, v)
    images = tuple(s for s in key_segments if is_image(s))
    rest = []
    heads = heads_of_keys(need_lane(k)) if need_lane(k).has_sites else 0
    for rows, source in ((keys, k), (values, v)):
        if images:
            tap = edit.tap(rows, key_segments, [heads, node_shape(source)[-1]])
            rest.append(edit.input(f"rest_{tap}", Rest(tap, images)))
        else:
            rest.append(edit.emit(aten.slice.Tensor, rows, 0, 0, 0))
    return queries, own, [keys, values, *rest], key_segments


def put_back(edit: Editor, node: fx.Node, out: fx.Node) -> None:
    """Replace the node by its rows, or by the results of a fixed number of queries."""
    q, v = node.args[0], node.args[2]
    assert isinstance(q, fx.Node)
    assert isinstance(v, fx.Node)
    lane = need_lane(q)
    if lane.has_sites:
        shape = [node_heads(lane), node_shape(v)[-1]]
        edit.replace(edit.reshape(out, shape, need_lane(node).row_shape()))
    else:
        apart = edit.emit(aten.unflatten.int, out, 0, [-1, node_shape(q)[-2]])
        turned = edit.emit(aten.transpose.int, apart, 1, 2)
        edit.replace_plain(edit.emit(aten.reshape.default, turned, [-1, *node_shape(node)[1:]]))


def attention_scale(edit: Editor, node: fx.Node) -> float | None:
    scale = argument(node, 6, "scale")
    if isinstance(scale, fx.Node):
        raise Unsupported(node, "its scale depends on the size of the picture")
    return scale if scale is None else float(scale)


def count_rows(edit: Editor, segments: tuple[str, ...]) -> fx.Node | int:
    """Return the number of rows that these segments have in the batch."""
    if not segments:
        return 0
    return edit.emit(aten.sym_size.int, edit.owner(segments), 0)


def attention_bias(
    edit: Editor, mask: fx.Node | None, queries: Lane, keys: tuple[str, ...]
) -> tuple[fx.Node | None, tuple[int, bool]]:
    """Return the attention mask as one flat ragged list, its number of heads, and if per query.

    Ragged: the entries of requests of different sizes, concatenated without padding.
    """
    if mask is None:
        return None, (1, False)
    order = [site_order(a) for a in queries.dims[-2] if isinstance(a, SITES)]
    if order != sorted(order):
        raise Unsupported(edit.node, "it has a mask, and its tokens count in another order")
    given = given_mask(edit, mask)
    shape = node_shape(mask)
    heads = mask_heads(edit.node, shape[:-2], queries)
    pairwise = len(shape) >= 2 and shape[-2] != 1
    who = queries.segments if pairwise else ()
    name = f"pairs_{mask.target}_{heads}_{slug((*who, 'to', *keys))}"
    return edit.input(name, Pairs(given, who, keys, heads)), (heads, pairwise)


def mask_heads(node: fx.Node, leading: Sequence[int], queries: Lane) -> int:
    """Return the mask's number of distinct heads; its leading axes broadcast over the queries'."""
    own = queries.dims[:-2]
    if len(leading) > len(own):
        raise Unsupported(node, "its mask has more axes than its queries")
    below = own[len(own) - len(leading) :]
    told = [atom for axis, size in zip(below, leading, strict=True) if size != 1 for atom in axis]
    heads = prod(atom.size for atom in told if isinstance(atom, Feature))
    if heads not in (1, prod(queries.features(axis) for axis in range(len(own)))):
        raise Unsupported(node, "its mask distinguishes some axes of its heads and not others")
    if heads > 1 and any(isinstance(atom, Batch) for atom in told[1:]):
        raise Unsupported(node, "its mask has heads before the batch")
    return heads
