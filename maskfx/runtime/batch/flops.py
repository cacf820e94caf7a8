"""FLOPs and cache bytes of compiled graphs, counted on shapes alone.

Two for each multiply-add of a product, as torch's FlopCounterMode counts; the rest is free. All
tensors are on the meta device, so models without weights count as well. Knows no wall clock.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterable
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from maskfx import ops
from maskfx.ir.lanes import Batch, Lane, int_hint, is_image, shape_hint
from maskfx.ir.program import (
    Enter,
    Given,
    Halo,
    Interface,
    Loaded,
    Neighbours,
    Owner,
    Pairs,
    Parents,
    Program,
    Rest,
    RestSpans,
    RestStats,
    RestSum,
    Source,
    Spans,
    Subsites,
    Tap,
)
from maskfx.ir.pyramid import Pyramid
from maskfx.ops import wide
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.rows import atom_size
from maskfx.runtime.cache.quantize import LOSSLESS, Encoding, Format, pack
from maskfx.runtime.sites.active import ActiveSites

RowSet = tuple[str, ...]

SPANS = (Spans, RestSpans)
SUMS = (ops.group_scale, ops.site_mean, ops.site_product)  # one result for each request
TABLES = (*SPANS, Owner, Enter, Neighbours, Parents, Subsites)

PRODUCTS = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "inner"),
        *("tensordot", "bilinear", "convolution", "_convolution"),
        *(f"conv{n}d" for n in (1, 2, 3)),
        *(f"conv_transpose{n}d" for n in (1, 2, 3)),
        "scaled_dot_product_attention",
    }
)


# A mask and the sites that follow from it.


def capture_sizes(pyramid: Pyramid) -> dict[str, int]:
    """The sizes of the call that a pyramid was made from."""
    sizes = {"tokens" if s == "image" else s: n for s, n in pyramid.segments.items()}
    if pyramid.base is not None:
        sizes["y"], sizes["x"] = pyramid.base
    return {"batch": pyramid.batch, **sizes}


def square_mask(sizes: dict[str, int], ratio: float) -> Tensor | None:
    """About `ratio` of all sites in one piece; None is a mask of everything.

    A rectangle of the picture's shape, or a run of tokens.
    """
    if ratio >= 1:
        return None
    if "y" not in sizes:
        return torch.arange(sizes["tokens"]) < max(round(ratio * sizes["tokens"]), 1)
    height, width = sizes["y"], sizes["x"]
    tall = min(max(round(height * sqrt(ratio)), 1), height)
    wide = min(max(round(ratio * height * width / tall), 1), width)
    top, left = (height - tall) // 2, (width - wide) // 2
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[top : top + tall, left : left + wide] = True
    return mask


def square_sites(pyramid: Pyramid, sizes: dict[str, int], ratio: float) -> ActiveSites:
    """The sites of a request with a mask of this ratio."""
    return ActiveSites(pyramid, sizes, square_mask(sizes, ratio))


# Rewritten graphs: shapes follow from how many rows are active.


def row_flops(program: Program, sites: ActiveSites, batch: int) -> Counter[RowSet]:
    """FLOPs of one edit of `batch` elements by row set; () is what each element has once."""
    counter = count_rows(program, sites, batch)
    out: Counter[RowSet] = Counter()
    for rows, flops in counter.flops.items():
        out[program.interface.pyramid.base_segments(rows)] += flops
    return out


def count_rows(program: Program, sites: ActiveSites, batch: int) -> RowCounter:
    """A counter that has run."""
    counter = RowCounter(program, sites, batch)
    with torch.no_grad(), FlopCounterMode(display=False) as counter.mode:
        counter.run(*meta_inputs(program, sites, batch))
    return counter


class RowCounter(fx.Interpreter):
    """Runs a rewritten graph on the meta device, and follows which rows each value holds."""

    mode: FlopCounterMode

    def __init__(self, program: Program, sites: ActiveSites, batch: int) -> None:
        super().__init__(program.module)
        self.sites, self.batch = sites, batch
        self.flops: Counter[RowSet] = Counter()
        self.by_node: dict[fx.Node, tuple[RowSet, int]] = {}
        self.rows: dict[fx.Node, RowSet] = {}
        for node in program.module.graph.nodes:
            if node.op == "placeholder":
                self.rows[node] = rows_of(program.interface.inputs[str(node.target)])

    def run_node(self, n: fx.Node) -> Any:
        before = self.mode.get_total_flops()
        value = super().run_node(n)
        if n.op == "call_function":
            used = self.mode.get_total_flops() - before
            self.rows[n] = self._follow(n, value)
            if used:
                rows = self.rows[n] or self._first(n)
                self.flops[rows] += used
                self.by_node[n] = rows, used
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.detach().to("meta") if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return super().call_function(target, args, kwargs)

    def _first(self, node: fx.Node) -> RowSet:
        return next((self.rows[n] for n in node.all_input_nodes if self.rows.get(n)), ())

    def _follow(self, node: fx.Node, value: Any) -> RowSet:
        """The row set of a value; () if its first dimension isn't rows."""
        target = node.target
        if target in (*SUMS, torch.ops.aten.sym_size.int):
            return ()
        if target in (ops.gather, ops.enter):
            return self.rows.get(node.args[2], ())  # type: ignore[arg-type]
        if target is torch.ops.aten.index_select.default:
            first, index = (self.rows.get(node.args[i], ()) for i in (0, 2))  # type: ignore[arg-type]
            return index if node.args[1] == 0 else first
        if target is torch.ops.aten.cat.default and (len(node.args) < 2 or node.args[1] == 0):
            return tuple(s for n in node.all_input_nodes for s in self.rows.get(n, ()))
        found = self._first(node)
        if target is torch.ops.aten.slice.Tensor and found and int_of(node.args[1:2]) == 0:
            return self._part(found, value.shape[0])
        return found

    def _part(self, whole: RowSet, rows: int) -> RowSet:
        """The segments of `whole` that have this many rows together."""
        for length in range(len(whole), 0, -1):
            for first in range(len(whole) - length + 1):
                part = whole[first : first + length]
                if self.batch * sum(self.sites.active_count(s) for s in part) == rows:
                    return part
        return whole


def int_of(args: Iterable[Any]) -> int:
    return next((a for a in args if isinstance(a, int)), 0)


def rows_of(source: Source) -> RowSet:
    """The row set that an input lies on."""
    match source:
        case Given(_, _, lane) if lane.kind == "rows":
            return lane.segments
        case Owner(segments) | Enter(_, segments):
            return segments
        case Neighbours(window):
            return (f"grid{window.target}",)
        case Parents(_, target):
            return (f"grid{target}",)
        case Subsites(_, fine, _):
            return (f"grid{fine}",)
    return ()


def meta_inputs(program: Program, sites: ActiveSites, batch: int) -> list[Tensor]:
    """The inputs of a graph without their values; spans, which attention's FLOPs need, are real."""
    interface = program.interface
    tables: dict[str, Source] = {n: s for n, s in interface.inputs.items() if isinstance(s, TABLES)}
    frame = Frame(dataclasses.replace(interface, inputs=tables), (sites,), (batch,))
    real = dict(zip(tables, frame.inputs([]), strict=True))
    out = []
    for node in program.module.graph.nodes:
        if node.op != "placeholder":
            continue
        name = str(node.target)
        source = interface.inputs[name]
        if isinstance(source, TABLES):
            out.append(real[name] if isinstance(source, SPANS) else real[name].to("meta"))
            continue
        shape, dtype = shape_of(source, interface, sites, batch)
        value = node.meta.get("val")
        dtype = value.dtype if isinstance(value, Tensor) else dtype
        out.append(torch.empty(shape, dtype=dtype, device="meta"))
    return out


def shape_of(
    source: Source, interface: Interface, sites: ActiveSites, batch: int
) -> tuple[list[int], torch.dtype]:
    """The shape of an input's rows, and their type as far as the interface knows it."""

    def rest(segments: RowSet) -> int:
        return sum(sites.count(s) - sites.active_count(s) for s in segments)

    match source:
        case Given(_, _, lane) if lane.kind == "rows":
            active = sum(sites.active_count(s) for s in lane.segments)
            return [batch * active, *lane.row_shape()], torch.float32
        case Given(_, _, lane):
            has_batch = [any(isinstance(a, Batch) for a in d) for d in lane.dims]
            sizes = [lane.features(i) * (batch if b else 1) for i, b in enumerate(has_batch)]
            return sizes, torch.float32
        case Halo(tap, window):
            known = interface.taps[tap]
            return [batch * len(sites.window(window)[1]), *known.shape], known.dtype
        case Rest(tap, segments):
            known = interface.taps[tap]
            kept = 0 if sites.full else rest(segments)
            return [batch * kept, *known.shape], known.dtype
        case Loaded(tap):  # row sets are those of the mask: nothing more is loaded
            known = interface.taps[tap]
            return [0, *known.shape], known.dtype
        case RestStats(tap):
            return [batch, interface.taps[tap].stats, 3], torch.float32
        case RestSum(tap):
            known = interface.taps[tap]
            return [batch, prod(known.shape) + 1], wide(known.dtype)
        case Pairs(_, queries, keys, heads):
            each = sum(sites.active_count(s) for s in queries) if queries else 1
            return [batch * heads * each * sum(sites.count(s) for s in keys)], torch.float32
    raise AssertionError(f"no shape for {source}")


# Captured graphs: shapes are known from the capture.


def graph_flops(graph: fx.Graph, captured: fx.Graph | None = None) -> dict[fx.Node, int]:
    """FLOPs of each node at the sizes of its capture; zeros are left out.

    `captured` is the graph whose arguments this one shares, where it doesn't know their shapes.
    """
    arguments = {str(n.target): n for n in (captured or graph).nodes if n.op == "placeholder"}
    counts = {}
    with torch.no_grad(), FlopCounterMode(display=False) as mode:
        for node in graph.nodes:
            if node.op != "call_function" or packet_name(node) not in PRODUCTS:
                continue
            before = mode.get_total_flops()
            args, kwargs = fx.map_arg(
                (node.args, dict(node.kwargs)),
                lambda n: stand_in(arguments[str(n.target)] if n.op == "placeholder" else n),
            )
            node.target(*args, **kwargs)
            counts[node] = mode.get_total_flops() - before
    return {node: used for node, used in counts.items() if used}


def packet_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return ""


def stand_in(node: fx.Node) -> Any:
    """A node's value at capture, without its numbers."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    if isinstance(value, Tensor):
        return torch.empty(shape_hint(value), dtype=value.dtype, device="meta")
    if isinstance(value, (torch.SymInt, int)):
        return int_hint(value)
    return value


# The cache.

KINDS = (
    "attention keys and values",
    "window inputs",
    "group statistics",
    "sums",
    "inputs of keys and values",
    "values between blocks",
    "output",
)


def tap_kinds(interface: Interface) -> dict[str, str]:
    """What each tap is kept for: the first of KINDS that an input reads it as."""
    order = (Rest, Halo, RestStats, RestSum, Loaded)
    uses: dict[str, int] = {}
    for source in interface.inputs.values():
        if isinstance(source, order):
            crosses = isinstance(source, Loaded) and not interface.region_of(source)
            kind = order.index(type(source)) + crosses
            uses[source.tap] = min(kind, uses.get(source.tap, kind))
    return {tap: KINDS[kind] for tap, kind in uses.items()}


def cache_bytes(
    program: Program, sites: ActiveSites, dtype: torch.dtype, encoding: Encoding = LOSSLESS
) -> dict[tuple[str, RowSet], int]:
    """Bytes that a recording keeps of one batch element, by kind and image sites.

    The outputs are `dtype`. With an encoding: as if all values fit into its formats.
    """
    interface = program.interface
    uses = tap_kinds(interface)
    out: Counter[tuple[str, RowSet]] = Counter()
    for tap in interface.taps.values():
        images = tuple(s for s in tap.segments if is_image(s))
        images = interface.pyramid.base_segments(images)
        count = sum(sites.count(s) for s in images)
        if not tap.stats:
            size = site_bytes(tap.shape, tap.dtype, encoding.of(tap.name))
            out[uses[tap.name], images] += count * size
        elif interface.stats_index(tap.name) == 0:  # the norms of one row set lie side by side
            norms = len(interface.stats_taps(tap.segments, tap.stats))
            out[uses[tap.name], images] += stats_bytes(tap, norms, count, encoding.stats)
    for lane in interface.outputs:
        assert lane is not None
        out[KINDS[-1], lane.segments] += lane_numel(lane, sites) * dtype.itemsize
    return dict(out)


def site_bytes(shape: tuple[int, ...], dtype: torch.dtype, wanted: Format) -> int:
    """Bytes of one site's rows in a format."""
    return pack(torch.ones(1, 1, *shape, dtype=dtype), wanted).nbytes


def stats_bytes(tap: Tap, norms: int, sites: int, wanted: Format) -> int:
    """Bytes of such norms: per group, a mean and a spread at each site, their sums, the centre."""
    kept, groups = wide(tap.dtype), norms * tap.stats
    return sites * site_bytes((2 * groups,), kept, wanted) + groups * (kept.itemsize + 2 * 8)


def lane_numel(lane: Lane, sites: ActiveSites) -> int:
    return prod(1 if isinstance(a, Batch) else atom_size(a, sites) for a in lane.atoms())
