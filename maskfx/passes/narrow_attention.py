"""Narrows attention over sites: active rows as queries, cached keys and values of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import fx

from maskfx.ir.lanes import Batch, Feature, Lane, fixed_segment, is_image, node_shape
from maskfx.ir.sources import Given, Pairs, Rest
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
from maskfx.passes.row_form import fixed_rows, is_rows


def narrow_attention(graph: fx.Graph, ctx: PassContext) -> int:
    """Attend from active rows to active rows and to the cached keys and values of the rest.

    Before  y = scaled_dot_product_attention(q, k, v)
    After   y = attend(q, k, v, rest_k, rest_v, spans, spans, rest_spans)   (all rows-first)
    Keeps   attention of values without sites.
    """
    count = 0
    for node in list(graph.nodes):
        if op_name(node) != "scaled_dot_product_attention" or not is_rows(node):
            continue
        attend(Editor(graph, ctx, node), node)
        count += 1
    return count


def attend(edit: Editor, node: fx.Node) -> None:
    q, k, v = (n for n in node.args[:3])
    assert isinstance(q, fx.Node)
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    lane = need_lane(q)
    queries = heads_last(edit, edit.rows(q), lane.row_shape())
    keys, key_segments = token_rows(edit, k)
    values, _ = token_rows(edit, v)
    images = tuple(s for s in key_segments if is_image(s))
    rest = []
    heads = node_heads(need_lane(k)) if need_lane(k).has_sites else 0
    for rows, source in ((keys, k), (values, v)):
        if images:
            tap = edit.tap(rows, key_segments, [heads, node_shape(source)[-1]])
            rest.append(edit.input(f"rest_{tap}", Rest(tap, images)))
        else:
            rest.append(edit.emit(aten.slice.Tensor, rows, 0, 0, 0))
    bias, layout = attention_bias(edit, argument(node, 3, "attn_mask"), lane, key_segments)
    out = edit.emit(
        ops.attend,
        queries,
        keys,
        values,
        *rest,
        edit.spans(lane.segments),
        edit.spans(key_segments),
        edit.rest_spans(images),
        bias,
        *layout,
        attention_scale(edit, node),
    )
    shape = [node_heads(lane), node_shape(v)[-1]]
    edit.replace(edit.reshape(out, shape, need_lane(node).row_shape()))


def attention_scale(edit: Editor, node: fx.Node) -> float | None:
    scale = argument(node, 6, "scale")
    if isinstance(scale, fx.Node):
        raise Unsupported(node, "its scale depends on the size of the picture")
    return scale if scale is None else float(scale)


def node_heads(lane: Lane) -> int:
    total = 1
    for size in lane.row_shape()[:-1]:
        total *= size
    return total


def heads_last(edit: Editor, rows: fx.Node, shape: list[int]) -> fx.Node:
    """Merge all head axes into one: (rows, heads, depth)."""
    if not shape:
        raise Unsupported(edit.node, "its heads have no depth")
    heads = 1
    for size in shape[:-1]:
        heads *= size
    return edit.reshape(rows, shape, [heads, shape[-1]])


def token_rows(edit: Editor, value: fx.Node) -> tuple[fx.Node, tuple[str, ...]]:
    """Return keys or values as rows, and their row set."""
    lane = need_lane(value)
    if lane.kind == "rows":
        return heads_last(edit, edit.rows(value), lane.row_shape()), lane.segments
    rows, sizes = fixed_rows(edit, value, -2)
    return heads_last(edit, rows, sizes), (fixed_segment(node_shape(value)[-2]),)


def count_rows(edit: Editor, segments: tuple[str, ...]) -> Any:
    """Return the number of rows that these segments have in the batch."""
    if not segments:
        return 0
    return edit.emit(aten.sym_size.int, edit.owner(segments), 0)


def attention_bias(
    edit: Editor, mask: Any, queries: Lane, keys: tuple[str, ...]
) -> tuple[Any, tuple[int, bool]]:
    """Return the attention mask as one flat ragged list, its number of heads, and if per query.

    Ragged: the entries of requests of different sizes, concatenated without padding.
    """
    if mask is None:
        return None, (1, False)
    given = edit.ctx.interface.inputs.get(str(mask.target)) if mask.op == "placeholder" else None
    if not isinstance(given, Given):
        raise Unsupported(edit.node, "its mask is computed in every step")
    shape = node_shape(mask)
    heads = mask_heads(edit.node, shape[:-2], queries)
    pairwise = len(shape) >= 2 and shape[-2] != 1
    who = queries.segments if pairwise else ()
    name = f"pairs_{mask.target}_{heads}_{slug((*who, 'to', *keys))}"
    bare = Given(given.origin, given.index, Lane(()))  # a mask's axes are its queries and keys
    return edit.input(name, Pairs(bare, who, keys, heads)), (heads, pairwise)


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
