"""Splits a finished graph over ranks: adds exchanges where operators mix sites."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from maskfx.ir.geometry.lanes import fixed_count, is_image, of_each
from maskfx.ir.programs.head_sources import way_of
from maskfx.ir.programs.sources import (
    CallSpans,
    Enter,
    Exchanged,
    KeySpans,
    Lines,
    Merged,
    Neighbours,
    OwnSpans,
    Parents,
    Peers,
    Places,
    Reader,
    ReadLines,
    ReadSpans,
    Rest,
    RestShare,
    RestShareSpans,
    SameLines,
    Source,
    Spans,
    Subsites,
)
from maskfx.passes.attend_by_heads import attend_by_heads, reason_to_gather
from maskfx.passes.context import Editor, PassContext, Unsupported, aten, node_at, ops, slug


def add_exchanges(graph: fx.Graph, ctx: PassContext) -> int:
    """Let each rank compute its part of the rows, and read the other ranks' where sites mix.

    Before  y = attend(q, k, v, rest_k, rest_v, ...)
    After   y = attend(q, *exchange([k, v]), rest_k, rest_v, ...)
    or      y = merge_parts(attend_part(exchange([q]), k, v, share_k, share_v, ...))
    or      y = from_heads(attend(*to_heads([q, k, v]), heads_k, heads_v, ...))
    and     y = gather(rows, halo, table)
    becomes y = gather(exchange([rows]), halo, table)
    and     y = group_scale(rows, rest, ...)
    becomes y = group_scale(rows, peer_moments(rows, rest, ...), ...)
    Keeps   operators on each row alone, and attention to what each rank makes for itself.
    """
    splitter = Splitter(graph, ctx)
    for node in list(graph.nodes):
        if node.op == "call_function":
            splitter.split(node)
    return splitter.count


@dataclass
class Splitter:
    """Adds the exchanges of one graph; `exchanges` counts those that were added."""

    graph: fx.Graph
    ctx: PassContext
    count: int = 0
    exchanges: int = 0
    _known: dict[tuple[fx.Node, Reader | None], fx.Node] = field(default_factory=dict)

    def split(self, node: fx.Node) -> None:
        rules: dict[object, Callable[[fx.Node], bool]] = {
            ops.attend: self.attend,
            ops.gather: lambda n: self.table(n, 2),
            ops.enter: lambda n: self.table(n, 2),
            aten.index_select.default: lambda n: self.table(n, 2),
            ops.group_scale: self.moments,
            ops.line_scale: self.line_moments,
            ops.site_mean: self.sums,
            ops.site_extreme: self.extreme,
            ops.site_logsumexp: self.extreme,
            ops.site_pair_sum: self.pairs,
            ops.site_product: self.product,
            ops.choose: self.choose,
            ops.pick_tokens: self.pick,
        }
        rule, name, before = rules.get(node.target), node.name, self.exchanges
        if rule is not None and rule(node):
            self.count += 1
        if node.target is ops.attend:
            self.ctx.attentions[name] = tuple(range(before + 1, self.exchanges + 1))

    # Rows of other ranks.

    def exchange(
        self,
        edit: Editor,
        rows: Sequence[fx.Node],
        segments: tuple[str, ...],
        reader: Reader | None = None,
    ) -> list[fx.Node]:
        """Return these values with the rows that this rank reads."""
        key = (rows[0], reader)
        if len(rows) == 1 and key in self._known:
            return [self._known[key]]
        tables = [
            edit.input(f"{part}_{name_of(segments, reader)}", Exchanged(part, segments, reader))
            for part in ("send", "counts", "order")
        ]
        both = edit.emit(ops.exchange, list(rows), *tables, self._next())
        found = [edit.emit(operator.getitem, both, i) for i in range(len(rows))]
        if len(rows) == 1:
            self._known[key] = found[0]
        return found

    def _next(self) -> int:
        self.exchanges += 1
        return self.exchanges

    def source(self, node: object) -> Source | None:
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return None
        return self.ctx.interface.inputs.get(str(node.target))

    def segments_of(self, spans: object) -> tuple[str, ...]:
        source = self.source(spans)
        assert isinstance(source, Spans), f"{spans} isn't the spans of a row set"
        return source.segments

    def table(self, node: fx.Node, place: int) -> bool:
        """Exchange the rows that a table picks from."""
        reader = self.source(node.args[place])
        if not isinstance(reader, Neighbours | Parents | Subsites | Enter):
            return False
        rows = node_at(node, 0)
        edit = Editor(self.graph, self.ctx, node)
        (found,) = self.exchange(edit, [rows], read_segments(reader), reader)
        node.args = (found, *node.args[1:])
        return True

    def attend(self, node: fx.Node) -> bool:
        q, k, v, rest_k, rest_v, q_spans, k_spans, rest_spans, bias, *more = node.args
        lines = self.source(k_spans)
        if isinstance(lines, CallSpans):  # each rank has all samples
            return False
        if isinstance(lines, Lines):
            return self.attend_lines(node, lines)
        queries, keys = self.segments_of(q_spans), self.segments_of(k_spans)
        if all_fixed(keys):
            return False
        edit = Editor(self.graph, self.ctx, node)
        sources = self.source(rest_k), self.source(rest_v)
        way = way_of(self.ctx.attention, node.name)
        if way == "heads":
            why = reason_to_gather(queries, keys, list(sources), bias is not None)
            if not why:
                heads = self.ctx.interface.taps[sources[0].tap].shape[0]  # type: ignore[union-attr]
                own = attend_by_heads(edit, node, queries, keys, heads, self._next)
                self.replace(node, own)
                return True
            self.ctx.gathered[node.name] = why
        shared = all(isinstance(source, Rest) for source in sources) and bias is None
        if way != "keys by rank" or not shared:
            k, v = self.exchange(edit, [k, v], keys)  # type: ignore[list-item]
            read = edit.input(f"read_spans_{slug(keys)}", ReadSpans(keys))
            node.args = (q, k, v, rest_k, rest_v, q_spans, read, rest_spans, bias, *more)
            return True
        (q,) = self.exchange(edit, [q], queries)  # type: ignore[list-item]
        shares, share_spans = self.shares(edit, sources)
        spans = [
            edit.input(f"read_spans_{slug(queries)}", ReadSpans(queries)),
            edit.input(f"key_spans_{slug(keys)}", KeySpans(keys)),
            share_spans,
        ]
        part = edit.emit(ops.attend_part, q, k, v, *shares, *spans, node.args[11])
        out, weight = (edit.emit(operator.getitem, part, i) for i in (0, 1))
        tables = [
            edit.input(f"merge_{name}_{slug(queries)}", Merged(name, queries))
            for name in ("send", "counts", "order")
        ]
        self.replace(node, edit.emit(ops.merge_parts, out, weight, *tables, self._next()))
        return True

    def attend_lines(self, node: fx.Node, lines: Lines) -> bool:
        """Attend to the rows that all ranks have of each line."""
        (segment,) = lines.segments
        if node.args[8] is not None:
            raise Unsupported(node, "it attends along lines of the picture, with a mask")
        if way_of(self.ctx.attention, node.name) == "heads":
            self.ctx.gathered[node.name] = "it attends along lines"
        each = of_each(segment)  # tokens, with a row for each frame
        if each is not None and all_fixed(each[1:]):
            return False
        rest, queries = (self.source(node.args[place]) for place in (7, 5))
        assert isinstance(rest, Lines)
        assert isinstance(queries, Lines)
        reader: Neighbours | SameLines | None = None
        if rest.window is not None:
            reader = Neighbours(rest.window)
        elif each is None:
            reader = SameLines(lines.axis, segment, queries.segments[0])
        edit, sorting, apart = Editor(self.graph, self.ctx, node), None, None
        keys = [node_at(node, 1), node_at(node, 2)]
        if keys[0].target is aten.index_select.default:
            sorting = self.source(keys[0].args[2])
        if isinstance(sorting, Lines):
            keys = [node_at(key, 0) for key in keys]
        if each is not None:
            apart = [key.args[1] for key in keys]
            keys = [node_at(key, 0) for key in keys]
        keys = self.exchange(edit, keys, lines.segments if each is None else each[1:], reader)
        if apart is not None:
            pairs = zip(keys, apart, strict=True)
            keys = [edit.emit(aten.reshape.default, key, shape) for key, shape in pairs]
        if isinstance(sorting, Lines):
            order = read_lines(edit, sorting, reader)
            keys = [edit.emit(aten.index_select.default, key, 0, order) for key in keys]
        spans, kept = read_lines(edit, lines, reader), node.args[3:5]
        rest_spans: Any = node.args[7]
        if isinstance(reader, SameLines):
            kept = tuple(self.rest_of_lines(edit, value, reader) for value in kept)
            rest_spans = read_lines(edit, rest, reader)
        node.args = (node.args[0], *keys, *kept, node.args[5], spans, rest_spans, *node.args[8:])
        return True

    def rest_of_lines(self, edit: Editor, value: Any, reader: SameLines) -> fx.Node:
        """Return the cached rows of the lines that this rank has rows of."""
        order = self.source(value.args[2]) if value.op == "call_function" else None
        source = self.source(value if order is None else value.args[0])
        assert isinstance(source, Rest)
        name = f"share_{source.tap}_{name_of((), reader)}"
        share = edit.input(name, RestShare(source.tap, source.segments, reader))
        if order is None:
            return share
        assert isinstance(order, Lines)
        return edit.emit(aten.index_select.default, share, 0, read_lines(edit, order, reader))

    def pairs(self, node: fx.Node) -> bool:
        """Sum over the keys and values of all ranks."""
        q, k, v, rest_k, rest_v, q_spans, k_spans, *more = node.args
        keys = self.segments_of(k_spans)
        edit = Editor(self.graph, self.ctx, node)
        k, v = self.exchange(edit, [k, v], keys)  # type: ignore[list-item]
        spans = edit.input(f"read_spans_{slug(keys)}", ReadSpans(keys))
        node.args = (q, k, v, rest_k, rest_v, q_spans, spans, *more)
        return True

    def shares(self, edit: Editor, sources: Sequence[Any]) -> tuple[list[fx.Node], fx.Node]:
        """Return the inputs with this rank's share of cached rows, and their spans."""
        segments = sources[0].segments
        shares = [edit.input(f"share_{s.tap}", RestShare(s.tap, s.segments)) for s in sources]
        spans = edit.input(f"share_spans_{slug(segments)}", RestShareSpans(segments))
        return shares, spans

    # Sums over sites.

    def peers(self, edit: Editor) -> fx.Node:
        return edit.input("peers", Peers())

    def moments(self, node: fx.Node) -> bool:
        rows, rest, spans, groups, *more = node.args
        edit = Editor(self.graph, self.ctx, node)
        segments = self.segments_of(spans)
        own = edit.input(f"own_spans_{slug(segments)}", OwnSpans(segments))
        args = (rows, rest, own, self.peers(edit), groups, self._next())
        node.args = (rows, edit.emit(ops.peer_moments, *args), spans, groups, *more)
        return True

    def line_moments(self, node: fx.Node) -> bool:
        """Read the moments of all ranks' rows; they are few numbers for each row."""
        moments, rest, owner, *more = node.args
        lines = self.source(owner)
        assert isinstance(lines, Lines)
        edit = Editor(self.graph, self.ctx, node)
        (moments,) = self.exchange(edit, [moments], lines.segments)  # type: ignore[list-item]
        node.args = (moments, rest, read_lines(edit, lines), *more)
        return True

    def sums(self, node: fx.Node) -> bool:
        rows, rest, spans, divide = node.args
        edit = Editor(self.graph, self.ctx, node)
        merged = edit.emit(ops.peer_sums, rows, rest, spans, self.peers(edit), self._next())
        node.args = (rows, merged, spans, divide)
        return True

    def extreme(self, node: fx.Node) -> bool:
        rows, rest, spans, rest_spans, *more = node.args
        segments = self.segments_of(spans)
        edit = Editor(self.graph, self.ctx, node)
        (rows,) = self.exchange(edit, [rows], segments)  # type: ignore[list-item]
        read = edit.input(f"read_spans_{slug(segments)}", ReadSpans(segments))
        node.args = (rows, rest, read, rest_spans, *more)
        return True

    def product(self, node: fx.Node) -> bool:
        a, b, rest_a, rest_b, spans, _ = node.args
        edit = Editor(self.graph, self.ctx, node)
        shares, share_spans = self.shares(edit, [self.source(rest_a), self.source(rest_b)])
        own = edit.emit(ops.site_product, a, b, *shares, spans, share_spans)
        self.replace(node, edit.emit(ops.sum_ranks, own, self.peers(edit), self._next()))
        return True

    # Choices.

    def choose(self, node: fx.Node) -> bool:
        """Choose among all rows of a request, and return the choices of this rank's rows."""
        scores, kept, spans, rest, count = node.args
        segments = self.segments_of(spans)
        edit = Editor(self.graph, self.ctx, node)
        (scores,) = self.exchange(edit, [scores], segments)  # type: ignore[list-item]
        read = edit.input(f"read_spans_{slug(segments)}", ReadSpans(segments))
        chosen = edit.emit(ops.choose, scores, kept, read, rest, count)
        places = edit.input(f"places_{slug(segments)}", Places(segments))
        self.replace(node, edit.emit(aten.index_select.default, chosen, 0, places))
        return True

    def pick(self, node: fx.Node) -> bool:
        rows, numbers, spans, out_spans = node.args
        segments = self.segments_of(spans)
        if any(map(is_image, segments)):
            raise Unsupported(node, "it picks sites by numbers that are data")
        if all_fixed(segments):
            return False
        edit = Editor(self.graph, self.ctx, node)
        (rows,) = self.exchange(edit, [rows], segments)  # type: ignore[list-item]
        read = edit.input(f"read_spans_{slug(segments)}", ReadSpans(segments))
        node.args = (rows, numbers, read, out_spans)
        return True

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        new.meta.update({k: v for k, v in node.meta.items() if str(k).startswith("tap")})
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)


def read_lines(edit: Editor, lines: Lines, reader: Neighbours | SameLines | None = None) -> fx.Node:
    """Return a table of the lines of rows after their exchange, or of the cached rows read."""
    return edit.input(f"read_{name_of((), reader)}_{lines.name}", ReadLines(lines, reader))


def all_fixed(segments: Sequence[str]) -> bool:
    """Return True if each rank makes all rows of these segments for itself."""
    return all(fixed_count(segment) is not None for segment in segments)


def read_segments(reader: Reader) -> tuple[str, ...]:
    """Return the row set that a table picks from."""
    match reader:
        case Neighbours(window):
            return (f"grid{window.source}",)
        case Parents(source, _):
            return (f"grid{source}",)
        case Subsites(coarse, _, _):
            return (f"grid{coarse}",)
        case Enter(before, _):
            return before
        case SameLines(_, source, _):
            return (source,)


def name_of(segments: tuple[str, ...], reader: Reader | None) -> str:
    match reader:
        case Neighbours(window):
            return f"window_{window.name}"
        case Parents(source, target):
            return f"parents_{source}_{target}"
        case Subsites(coarse, fine, patch):
            return f"subsites_{coarse}_{fine}_{patch}"
        case Enter(before, after):
            return f"enter_{slug(before)}_to_{slug(after)}"
        case SameLines(axis, source, target):
            return f"lines_{axis}_{slug((source, 'for', target))}"
    return slug(segments)
