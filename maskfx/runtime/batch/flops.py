"""Counts FLOPs and cache bytes of compiled graphs from shapes alone.

Each multiply-add of a product counts as two FLOPs, as in torch's FlopCounterMode; other operators
count as zero. All tensors are on the meta device, so models without weights can be counted too.
Knows nothing of wall-clock time.
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
from maskfx.compiler.source_dtypes import dtype_of
from maskfx.ir.geometry.lanes import Batch, Lane, is_image
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.programs.program import Interface, Program, Tap
from maskfx.ir.programs.source_sizes import (
    HaloRows,
    KeptRows,
    KeyRows,
    LineCount,
    LoadedRows,
    PairEntries,
    PerRequest,
    RestRows,
    Rows,
    Size,
    TwinSize,
    row_set,
    sizes_of,
)
from maskfx.ir.programs.sources import (
    Given,
    Halo,
    Kept,
    LinePairs,
    Loaded,
    Pairs,
    Rest,
    RestStats,
    RestSum,
    Source,
    Table,
)
from maskfx.ops import wide
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.lines import count_lines
from maskfx.runtime.batch.rows import atom_size
from maskfx.runtime.cache.quantize import LOSSLESS, Encoding, Format, pack
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask

RowSet = tuple[str, ...]

# one result per request
SUMS = (
    *(ops.group_scale, ops.site_extreme, ops.site_logsumexp, ops.site_mean),
    ops.site_product,
)

PRODUCTS = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "inner"),
        *("tensordot", "bilinear", "convolution", "_convolution"),
        *(f"conv{n}d" for n in (1, 2, 3)),
        *(f"conv_transpose{n}d" for n in (1, 2, 3)),
        "_grouped_mm",
        "scaled_dot_product_attention",
        "pair_sum",
    }
)


# Masks and their active sites.


def capture_sizes(pyramid: Pyramid) -> dict[str, int]:
    """Return the sizes of the call that a pyramid was made from."""
    sizes = {"tokens" if s == "image" else s: n for s, n in pyramid.segments.items()}
    if pyramid.base is not None:
        sizes["y"], sizes["x"] = pyramid.base
        sizes |= {"frames": pyramid.frames} if pyramid.frames > 1 else {}
    return {"batch": pyramid.batch, **sizes}


def square_mask(sizes: dict[str, int], ratio: float) -> Tensor | None:
    """Return a mask of about `ratio` of all sites in one piece, or None for all sites.

    The piece is a rectangle of the picture's shape, or consecutive tokens.
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
    return mask.expand(sizes["frames"], -1, -1) if "frames" in sizes else mask


def square_sites(pyramid: Pyramid, sizes: dict[str, int], ratio: float) -> ActiveSites:
    """Return the active sites of a request with a mask of this ratio."""
    mask = square_mask(sizes, ratio)
    return ActiveSites(pyramid, sizes, None if mask is None else Mask(mask))


# Rewritten graphs, whose shapes follow from the number of active rows.


def row_flops(program: Program, sites: ActiveSites, batch: int) -> Counter[RowSet]:
    """Return an edit's FLOPs by row set; () holds what each batch element computes once."""
    counter = count_rows(program, sites, batch)
    out: Counter[RowSet] = Counter()
    for rows, flops in counter.flops.items():
        out[program.interface.pyramid.base_segments(rows)] += flops
    return out


def count_rows(program: Program, sites: ActiveSites, batch: int) -> RowCounter:
    """Return a counter that has run the program."""
    counter = RowCounter(program, sites, batch)
    with torch.no_grad(), FlopCounterMode(display=False) as counter.mode:
        counter.run(*meta_inputs(program, sites, batch))
    return counter


class RowCounter(fx.Interpreter):
    """Runs a rewritten graph on the meta device and tracks the row set of each value."""

    mode: FlopCounterMode

    def __init__(self, program: Program, sites: ActiveSites, batch: int) -> None:
        super().__init__(program.module)
        self.sites, self.batch = sites, batch
        self.flops: Counter[RowSet] = Counter()
        self.by_node: dict[fx.Node, tuple[RowSet, int]] = {}
        self.rows: dict[fx.Node, RowSet] = {}
        for node in program.module.graph.nodes:
            if node.op == "placeholder":
                self.rows[node] = row_set(program.interface.inputs[str(node.target)])

    def run_node(self, n: fx.Node) -> object:
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

    def get_attr(
        self, target: fx.node.Target, args: tuple[fx.node.Argument, ...], kwargs: dict[str, object]
    ) -> object:
        value = super().get_attr(target, args, kwargs)
        return value.detach().to("meta") if isinstance(value, Tensor) else value

    def call_function(
        self, target: fx.node.Target, args: tuple[fx.node.Argument, ...], kwargs: dict[str, object]
    ) -> object:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if target is torch.ops.aten.to.device:
            args = (args[0], torch.device("meta"), *args[2:])
        return super().call_function(target, args, kwargs)

    def _first(self, node: fx.Node) -> RowSet:
        return next((self.rows[n] for n in node.all_input_nodes if self.rows.get(n)), ())

    def _follow(self, node: fx.Node, value: object) -> RowSet:
        """Return the row set of a value; () if its first dimension isn't rows."""
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
        sliced = target is torch.ops.aten.slice.Tensor and found
        if sliced and isinstance(value, Tensor) and int_of(node.args[1:2]) == 0:
            return self._part(found, value.shape[0])
        return found

    def _part(self, whole: RowSet, rows: int) -> RowSet:
        """Return consecutive segments of `whole` that have this number of rows together."""
        for length in range(len(whole), 0, -1):
            for first in range(len(whole) - length + 1):
                part = whole[first : first + length]
                if self.batch * sum(self.sites.active_count(s) for s in part) == rows:
                    return part
        return whole


def int_of(args: Iterable[object]) -> int:
    return next((a for a in args if isinstance(a, int)), 0)


def meta_inputs(program: Program, sites: ActiveSites, batch: int) -> list[Tensor]:
    """Return inputs of a graph on the meta device; spans, which attention counts by, are real."""
    interface = program.interface
    tables: dict[str, Source] = {n: s for n, s in interface.inputs.items() if isinstance(s, Table)}
    frame = Frame(dataclasses.replace(interface, inputs=tables), Layout((sites,), (batch,)))
    real = dict(zip(tables, frame.inputs([]), strict=True))
    out = []
    for node in program.module.graph.nodes:
        if node.op != "placeholder":
            continue
        name = str(node.target)
        source = interface.inputs[name]
        if isinstance(source, Table):
            out.append(real[name] if frame.layout.on_host(source) else real[name].to("meta"))
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            dtype = value.dtype
        elif isinstance(source, Given | Pairs | LinePairs):
            dtype = torch.float32
        else:
            dtype = dtype_of(source, interface.taps, value)
        shape = [number_of(size, sites, batch) for size in sizes_of(source, interface.taps)]
        out.append(torch.empty(shape, dtype=dtype, device="meta"))
    return out


def number_of(size: Size, sites: ActiveSites, batch: int) -> int:
    """Return a size of the inputs of a batch of one call, whose row sets are those of the mask."""

    def active(segments: RowSet) -> int:
        return sum(map(sites.active_count, segments))

    def whole(segments: RowSet) -> int:
        return sum(map(sites.count, segments))

    match size:
        case int():
            return size
        case Rows(segments):
            return batch * active(segments)
        case RestRows(segments):
            return 0 if sites.full else batch * (whole(segments) - active(segments))
        case KeyRows(segments):
            return batch * whole(segments)
        case LineCount(segments, axis):
            return batch * count_lines(segments, axis, sites)
        case HaloRows(window):
            return batch * len(sites.window(window)[1])
        case LoadedRows():
            return 0
        case KeptRows(segments):
            return batch * active(segments) if whole(segments) > active(segments) else 0
        case PairEntries(queries, keys, heads):
            return batch * heads * (active(queries) if queries else 1) * whole(keys)
        case PerRequest(times):
            return batch * times
        case TwinSize():
            raise AssertionError("a twin for adapters or ranks isn't counted")


# Captured graphs, whose shapes are known from the capture.


def graph_flops(graph: fx.Graph, captured: fx.Graph | None = None) -> dict[fx.Node, int]:
    """Return the FLOPs of each node at the sizes of its capture, without zeros.

    `captured` is the graph that shares its arguments with this one; it supplies their shapes.
    """
    arguments = {str(n.target): n for n in (captured or graph).nodes if n.op == "placeholder"}
    counts = {}
    with torch.no_grad(), FlopCounterMode(display=False) as mode:
        for node in graph.nodes:
            if node.op != "call_function" or not multiplies(node):
                continue
            before = mode.get_total_flops()
            args, kwargs = fx.map_arg(
                (node.args, dict(node.kwargs)),
                lambda n: stand_in(arguments[str(n.target)] if n.op == "placeholder" else n),
            )
            node.target(*args, **kwargs)
            counts[node] = mode.get_total_flops() - before
    return {node: used for node, used in counts.items() if used}


def multiplies(node: fx.Node) -> bool:
    return packet_name(node) in PRODUCTS or node.target is ops.run_whole


def packet_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return ""


def size_at_capture(size: int | torch.SymInt) -> int:
    """Return the number that a size had at capture; 1 if it depends on what a tensor holds."""
    if not isinstance(size, torch.SymInt):
        return size
    known = size.node._hint
    return 1 if known is None else int(known)


def stand_in(node: fx.Node) -> Any:
    """Return a node's value at capture as a number, or a meta tensor with floats as float32."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    if isinstance(value, Tensor):
        shape = [size_at_capture(size) for size in value.shape]
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        return torch.empty(shape, dtype=dtype, device="meta")
    if isinstance(value, (torch.SymInt, int)):
        return size_at_capture(value)
    return value


# The cache.

KINDS = (
    "attention keys and values",
    "window inputs",
    "group statistics",
    "sums",
    "inputs of keys and values",
    "values between blocks",
    "choices of experts",
    "output",
)


def tap_kinds(interface: Interface) -> dict[str, str]:
    """Return the purpose of each tap: the first of KINDS that an input reads it as."""
    order = (Rest, Halo, RestStats, RestSum, Loaded, Kept)
    uses: dict[str, int] = {}
    for source in interface.inputs.values():
        if isinstance(source, order):
            crosses = isinstance(source, Kept | Loaded) and not interface.region_of(source)
            kind = order.index(type(source)) + crosses
            uses[source.tap] = min(kind, uses.get(source.tap, kind))
    return {tap: KINDS[kind] for tap, kind in uses.items()}


def cache_bytes(
    program: Program, sites: ActiveSites, dtype: torch.dtype, encoding: Encoding = LOSSLESS
) -> dict[tuple[str, RowSet], int]:
    """Return the bytes that a recording keeps per batch element, by kind and image sites.

    The outputs are of `dtype`. With an encoding, all values are assumed to fit into its formats.
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
        elif interface.stats_index(tap.name) == 0:  # counts all norms of the row set at once
            norms = len(interface.stats_taps(tap.segments, tap.stats))
            out[uses[tap.name], images] += stats_bytes(tap, norms, count, encoding.stats)
    for lane in interface.outputs:
        assert lane is not None
        out[KINDS[-1], lane.segments] += lane_numel(lane, sites) * dtype.itemsize
    return dict(out)


def site_bytes(shape: tuple[int, ...], dtype: torch.dtype, wanted: Format) -> int:
    """Return the bytes of one site's rows in a format."""
    return pack(torch.ones(1, 1, *shape, dtype=dtype), wanted).nbytes


def stats_bytes(tap: Tap, norms: int, sites: int, wanted: Format) -> int:
    """Return the bytes of norms: per group a mean and a spread per site, sums, and the centre."""
    kept, groups = wide(tap.dtype), norms * tap.stats
    return sites * site_bytes((2 * groups,), kept, wanted) + groups * (kept.itemsize + 2 * 8)


def lane_numel(lane: Lane, sites: ActiveSites) -> int:
    return prod(1 if isinstance(a, Batch) else atom_size(a, sites) for a in lane.atoms())
