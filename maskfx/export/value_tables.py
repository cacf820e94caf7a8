"""Describes the inputs and outputs of graphs, and collects the tables that they refer to.

A value is described by its source or its lane; windows, segments and dimensions are tables of the
manifest, in which each has a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch

from maskfx.errors import InputError
from maskfx.export.graph_facts import (
    AnySource,
    ArgumentNumber,
    GraphFacts,
    GraphInput,
    GraphOutput,
    WholeArgument,
    check_segment,
)
from maskfx.ir.geometry.lanes import (
    Atom,
    Batch,
    Experts,
    Feature,
    Frames,
    Lane,
    Part,
    Tokens,
    X,
    Y,
    atom_name,
    filled,
    fixed_count,
    grid_level,
    is_image,
    of_each,
    segment_region,
)
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.program import Tap
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
    lane_sizes,
    sizes_of,
)
from maskfx.ir.programs.sources import (
    Calls,
    CallSpans,
    Down,
    Enter,
    Given,
    Halo,
    Kept,
    Lines,
    Loaded,
    Neighbours,
    OwnBiases,
    Owner,
    OwnGroups,
    OwnWeights,
    Pairs,
    PairTable,
    Parents,
    RankGroups,
    Requests,
    Rest,
    RestOwner,
    RestSpans,
    RestStats,
    RestSum,
    Spans,
    Subsites,
    Up,
    Updated,
    Weights,
)
from maskfx.ops import wide

Item = dict[str, Any]
ORIGINS = {"step": "argument", "request": "side_request", "dense": "side_dense"}
IN_ROWS = ("edit", "record")  # graphs whose results are rows; those of the others are full values


@dataclass
class ValueTables:
    """Describes values, and collects the tables that the descriptions refer to.

    Args:
        taps: the program's taps by name.
        arguments: the dimensions of the input for each argument.
    """

    taps: dict[str, Tap]
    arguments: list[list[int | str]] = field(default_factory=list)
    segments: dict[str, Item] = field(default_factory=dict)
    windows: dict[str, Item] = field(default_factory=dict)
    dimensions: dict[str, Item] = field(default_factory=dict)

    def graph(self, name: str, facts: GraphFacts) -> Item:
        full = name not in IN_ROWS
        return {
            "file": facts.file,
            "inputs": [self.input(name, value) for name, value in facts.inputs.items()],
            "outputs": [self.output(value, full) for value in facts.outputs],
        }

    def input(self, name: str, value: GraphInput) -> Item:
        return {
            "name": name,
            "dtype": dtype_name(value.dtype),
            "dims": self.dims(value),
            "made_by": maker(value.source),
            "source": self.source(value.source),
        }

    def output(self, value: GraphOutput, full: bool) -> Item:
        dims: list[int | str]
        if value.tap is not None:
            tap = self.taps[value.tap]
            dims = [self.rows("rows", tap.segments), *tap.shape]
        elif value.lane is None or not value.lane.dims:
            dims = self.known(value.shape)
        else:
            dims = self.full_dims(value.lane) if full else self.row_dims(value.lane)
        return {
            "name": value.name,
            "dtype": dtype_name(value.dtype),
            "dims": dims,
            "lane": None if value.lane is None else self.lane(value.lane),
            "tap": value.tap,
        }

    def tap(self, tap: Tap) -> Item:
        size = tap.dtype.itemsize * prod(tap.shape)
        if tap.stats:  # offset and squared deviations of each group
            size = 2 * tap.stats * wide(tap.dtype).itemsize
        return {
            "segments": self.names(tap.segments),
            "shape": list(tap.shape),
            "dtype": dtype_name(tap.dtype),
            "groups": tap.stats,
            "bytes": size,
        }

    # Sources.

    def source(self, source: AnySource) -> Item:
        names = self.names
        match source:
            case Given():
                return {"kind": "given", **self.given(source)}
            case Owner(segments):
                return {"kind": "owner", "segments": names(segments)}
            case RestOwner(segments):
                return {"kind": "rest_owner", "segments": names(segments)}
            case Requests():
                return {"kind": "requests"}
            case Calls():
                return {"kind": "calls"}
            case CallSpans():
                return {"kind": "call_spans"}
            case Spans(segments):
                return {"kind": "spans", "segments": names(segments)}
            case RestSpans(segments):
                return {"kind": "rest_spans", "segments": names(segments)}
            case Neighbours(window):
                return {"kind": "neighbours", "window": self.window(window)}
            case Weights(window):
                return {"kind": "weights", "window": self.window(window)}
            case Parents(coarse, fine):
                return {"kind": "parents", "source": coarse, "target": fine}
            case Subsites(coarse, fine, patch):
                return {"kind": "subsites", "coarse": coarse, "fine": fine, "patch": patch}
            case Lines(part, segments, axis, window):
                lines = {"part": part, "segments": names(segments), "axis": axis}
                read = {} if window is None else {"window": self.window(window)}
                return {"kind": "lines", **lines, **read}
            case Halo(tap, window):
                return {"kind": "halo", "tap": tap, "window": self.window(window)}
            case Rest(tap, segments):
                return {"kind": "rest", "tap": tap, "segments": names(segments)}
            case Enter(before, after):
                return {"kind": "enter", "before": names(before), "after": names(after)}
            case Loaded(tap, before, after):
                cut = {"before": names(before), "after": names(after)}
                return {"kind": "loaded", "tap": tap, **cut}
            case RestStats(tap, segments):
                return {"kind": "rest_stats", "tap": tap, "segments": names(segments)}
            case RestSum(tap, segments):
                return {"kind": "rest_sum", "tap": tap, "segments": names(segments)}
            case Pairs(value, queries, keys, heads):
                axes = {"queries": names(queries), "keys": names(keys), "heads": heads}
                return {"kind": "pairs", **self.given(value), **axes}
            case PairTable(value, queries, keys, heads):
                axes = {"queries": names(queries), "keys": names(keys), "heads": heads}
                return {"kind": "pair_table", **self.given(value), **axes}
            case WholeArgument(index):
                return {"kind": "argument", "index": index}
            case ArgumentNumber(index, place, width):
                return {"kind": "number_at", "index": index, "place": place, "width": width}
            case Kept():
                raise AssertionError("a program that chooses rows by data isn't exported")
            case (
                RankGroups() | Down() | Up() | OwnWeights() | OwnBiases() | OwnGroups() | Updated()
            ):
                raise AssertionError("a twin for adapters or ranks isn't exported")
        raise AssertionError(f"{source} is an input of a rank, which isn't exported")

    def given(self, value: Given) -> Item:
        return {"of": ORIGINS[value.origin], "index": value.index, "lane": self.lane(value.lane)}

    def lane(self, lane: Lane) -> list[list[Item]]:
        return [[self.atom(atom) for atom in dim] for dim in lane.dims]

    def atom(self, atom: Atom) -> Item:
        match atom:
            case Batch():
                return {"kind": "batch"}
            case Feature(size):
                return {"kind": "features", "size": size}
            case Frames(size, spread):
                return {"kind": "frames", "size": size, "spread": spread}
            case Y(level, spread):
                return {"kind": "y", "level": level, "spread": spread}
            case X(level, spread):
                return {"kind": "x", "level": level, "spread": spread}
            case Tokens(segments):
                return {"kind": "tokens", "segments": self.names(segments)}
            case Part():
                raise InputError(
                    "export: a value that each request gives in full lies along parts of the "
                    f"picture ({atom_name(atom)}), which manifests can't describe; give it to the "
                    "denoiser as a picture"
                )
            case Experts():
                raise AssertionError("a program that chooses rows by data isn't exported")

    # Dimensions.

    def dims(self, value: GraphInput) -> list[int | str]:
        match value.source:
            case WholeArgument(index):
                return self.arguments[index]
            case ArgumentNumber(_, _, _, axis):
                return [self.role(axis)]
            case Given(_, _, lane) if not lane.dims:
                return self.known(value.shape)
        return [self.size(size) for size in sizes_of(value.source, self.taps)]

    def row_dims(self, lane: Lane) -> list[int | str]:
        """Return the dimensions of a value as rows, as one entry per request, or as one for all."""
        return [self.size(size) for size in lane_sizes(lane)]

    def size(self, size: Size) -> int | str:
        """Return a number, or the name of the dimension that varies."""
        match size:
            case int():
                return size
            case Rows(segments):
                return self.rows("rows", segments)
            case RestRows(segments):
                return self.rows("rest", segments)
            case KeyRows(segments):
                return self.rows("keys", segments)
            case PerRequest(times):
                return self.requests(times)
            case HaloRows(window):
                name = f"halo_{window.name}"
                return self.dimension(name, kind="halo", window=self.window(window))
            case LoadedRows(before, after):
                name = f"loaded_{slug(before)}_to_{slug(after)}"
                cut = {"before": self.names(before), "after": self.names(after)}
                return self.dimension(name, kind="loaded", **cut)
            case PairEntries(queries, keys, heads):
                name = f"pairs_{slug(queries)}_{slug(keys)}_{heads}"
                axes = {"queries": self.names(queries), "keys": self.names(keys), "heads": heads}
                return self.dimension(name, kind="pairs", **axes)
            case LineCount(segments, axis):
                what = {"segments": self.names(segments), "axis": axis}
                return self.dimension(f"lines_{axis}_{slug(segments)}", kind="lines", **what)
            case KeptRows():
                raise AssertionError("no format has operators for such a program yet")
            case TwinSize():
                raise AssertionError("a twin for adapters or ranks isn't exported")

    def full_dims(self, lane: Lane) -> list[int | str]:
        """Return the dimensions of a full value of one request."""
        return [
            lane.features(i)
            if lane.is_feature_dim(i)
            else self.dimension(
                "axes_" + slug([str(Lane((dim,)))]), kind="axes", axes=[self.atom(a) for a in dim]
            )
            for i, dim in enumerate(lane.dims)
        ]

    def number(self, index: int, name: str) -> list[int | str]:
        """Return the dimensions of the input that gives a number by its length."""
        return [self.dimension(f"number_{slug([name])}", kind="number", argument=index)]

    def role(self, role: str) -> str:
        """Return the dimension of an argument that has a role."""
        name = role.replace("/", "_by_").replace("*", "_times_")
        return self.dimension(f"size_{slug([name])}", kind="role", role=role)

    def known(self, shape: tuple[int | None, ...] | None) -> list[int | str]:
        sizes = shape or ()
        return [self.dimension("any", kind="any") if n is None else n for n in sizes]

    def rows(self, kind: str, segments: tuple[str, ...]) -> str:
        names = self.names(segments)
        return self.dimension(f"{kind}_{slug(segments)}", kind=kind, segments=names)

    def requests(self, times: int = 1) -> str:
        name = "requests" if times == 1 else f"requests_x{times}"
        return self.dimension(name, kind="requests", times=times)

    def dimension(self, name: str, **what: object) -> str:
        """Return the name of a dimension, and add it to the table."""
        known = self.dimensions.setdefault(name, what)
        assert known == what, (name, known, what)
        return name

    # Segments and windows.

    def names(self, segments: Iterable[str]) -> list[str]:
        for segment in segments:
            if segment not in self.segments:
                self.segments[segment] = self.segment(segment)
        return list(segments)

    def segment(self, name: str) -> Item:
        check_segment(name)
        level, fixed, filling = grid_level(name), fixed_count(name), filled(name)
        if filling is not None:
            self.names([filling[1]])
            return {"kind": "fill", "multiple": filling[0], "of": filling[1]}
        each = of_each(name)
        if each is not None:
            self.names([each[1]])
            return {"kind": "each", "count": each[0], "of": each[1]}
        if level is not None:
            return {"kind": "grid", "level": level}
        if fixed is not None:
            return {"kind": "fixed", "count": fixed}
        if is_image(name):
            return {"kind": "tokens", "region": segment_region(name)}
        return {"kind": "text", "role": name}

    def window(self, window: Window) -> str:
        self.names([f"grid{window.source}", f"grid{window.target}"])
        fields = asdict(window).items()
        self.windows[window.name] = {n: list(v) if isinstance(v, tuple) else v for n, v in fields}
        return window.name


def maker(source: AnySource) -> str:
    """Return the maker of an input: the request, a side graph, the cache, or the host."""
    match source:
        case WholeArgument() | ArgumentNumber():
            return "request"
        case Given(origin) | Pairs(Given(origin)) | PairTable(Given(origin)):
            return "request" if origin == "step" else ORIGINS[origin]
        case Halo() | Rest() | Loaded() | RestStats() | RestSum():
            return "cache"
    return "host"


def slug(names: Iterable[str]) -> str:
    """Return a name of letters, digits and _ for a dimension."""
    return re.sub(r"\W+", "_", "_".join(names)).strip("_")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
