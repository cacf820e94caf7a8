"""Lets the ranks of a step divide the heads of an attention; a part of `add_exchanges`."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from maskfx.ir.geometry.lanes import fixed_count, is_image
from maskfx.ir.programs.head_sources import ByHead, HeadRestSpans, HeadShare, HeadSpans
from maskfx.ir.programs.sources import Rest, RestSpans, Source
from maskfx.passes.context import Editor, ops, slug

Segments = tuple[str, ...]


def reason_to_gather(
    queries: Segments, keys: Segments, cached: list[Source | None], biased: bool
) -> str:
    """Return why ranks can't divide the heads of an attention, or gain nothing; "" if they may."""
    if not any(map(is_image, keys)):
        return "its keys are those of a text"
    if not any(map(is_image, queries)):
        return "its queries are those of a text"
    if any(fixed_count(segment) is not None for segment in queries):
        return "each rank makes rows of its queries"
    if biased:
        return "it has a mask of queries and keys"
    if not all(isinstance(source, Rest) for source in cached):
        return "its cached keys are computed"
    return ""


def attend_by_heads(
    edit: Editor,
    node: fx.Node,
    queries: Segments,
    keys: Segments,
    heads: int,
    number: Callable[[], int],
) -> fx.Node:
    """Return an attention for whose heads each rank has the rows of all ranks.

    Before  y = attend(q, k, v, rest_k, rest_v, ...)
    After   y = from_heads(attend(*to_heads([q, k, v]), heads_k, heads_v, ...))

    Args:
        edit: Inserts before the node.
        node: The attention.
        queries: The row set of its queries.
        keys: That of its keys.
        heads: The number of heads of keys.
        number: Returns the number of the next exchange.
    """
    q, k, v, rest_k, rest_v, _, _, rest_spans, *more = node.args
    cached = edit.ctx.interface.inputs[str(rest_spans.target)]  # type: ignore[union-attr]
    assert isinstance(cached, RestSpans), node.format_node()

    def tables(segments: Segments, back: bool = False) -> list[fx.Node]:
        name = f"{'from' if back else 'to'}_{heads}_heads_{slug(segments)}"
        return [
            edit.input(f"{part}_{name}", ByHead(part, segments, heads, back))
            for part in ("send", "counts", "order")
        ]

    def moved(values: list[object], segments: Segments) -> list[fx.Node]:
        both = edit.emit(ops.to_heads, values, heads, *tables(segments), number())  # type: ignore[arg-type]
        return [edit.emit(operator.getitem, both, i) for i in range(len(values))]

    if queries == keys:
        q, k, v = moved([q, k, v], keys)
    else:
        (q,), (k, v) = moved([q], queries), moved([k, v], keys)
    last = f"{heads}_heads_{slug(cached.segments)}"
    rest = [own_heads(edit, value, heads) for value in (rest_k, rest_v)]
    spans = [
        *(
            edit.input(f"spans_{heads}_heads_{slug(s)}", HeadSpans(s, heads))
            for s in (queries, keys)
        ),
        edit.input(f"rest_spans_{last}", HeadRestSpans(cached.segments, heads)),
    ]
    out = edit.emit(ops.attend, q, k, v, *rest, *spans, *more)
    return edit.emit(ops.from_heads, out, heads, *tables(queries, True), number())


def own_heads(edit: Editor, rest: object, heads: int) -> fx.Node:
    """Return the input with a rank's heads of cached rows."""
    source = edit.ctx.interface.inputs[str(rest.target)]  # type: ignore[attr-defined]
    assert isinstance(source, Rest), rest
    return edit.input(f"heads_{source.tap}", HeadShare(source.tap, source.segments, heads))
