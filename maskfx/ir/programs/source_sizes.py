"""The sizes of the inputs of a rewritten graph: numbers, and sizes that vary from batch to batch.

Frames, exporters and counters of FLOPs evaluate or name the sizes that vary, each in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from maskfx.ir.geometry.lanes import Batch, Lane, grid_segment
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.head_sources import ByHead, HeadRestSpans, HeadShare, HeadSpans
from maskfx.ir.programs.program import Tap
from maskfx.ir.programs.sources import (
    Calls,
    CallSpans,
    Down,
    Enter,
    Exchanged,
    Given,
    Halo,
    Kept,
    KeySpans,
    LinePairs,
    Lines,
    Loaded,
    Merged,
    Neighbours,
    OwnBiases,
    Owner,
    OwnGroups,
    OwnSpans,
    OwnWeights,
    Pairs,
    PairTable,
    Parents,
    Peers,
    Places,
    RankGroups,
    Reader,
    ReadLines,
    ReadOwner,
    ReadSpans,
    Requests,
    Rest,
    RestOwner,
    RestShare,
    RestShareSpans,
    RestSpans,
    RestStats,
    RestSum,
    Source,
    Spans,
    Subsites,
    Up,
    Updated,
    Weights,
)


@dataclass(frozen=True)
class Rows:
    """The number of rows of a row set."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class RestRows:
    """The number of cached rows of the inactive sites of `segments`."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class KeyRows:
    """The number of the rows of `segments` and the cached rows of their inactive sites."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class HaloRows:
    """The number of cached rows around the active ones that a window reads."""

    window: Window


@dataclass(frozen=True)
class LoadedRows:
    """The number of sites that are active in `after` but not in `before`."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class KeptRows:
    """The number of active sites of `segments`, of requests that have inactive ones."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class PairEntries:
    """The number of entries of all requests' attention masks."""

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    heads: int


@dataclass(frozen=True)
class PerRequest:
    """The number of requests, or a multiple of it."""

    times: int = 1


@dataclass(frozen=True)
class LineCount:
    """The number of lines along an axis of the pictures of all requests."""

    segments: tuple[str, ...]
    axis: str


class TwinSize:
    """A size of an input that only twins for adapters, or for the ranks of a step, have."""


@dataclass(frozen=True)
class UpdateRanks(TwinSize):
    """The number of ranks of a layer's updates, of own parameters, or of groups that share some."""

    weight: str


@dataclass(frozen=True)
class ReadRows(TwinSize):
    """The number of rows of `segments` that a rank of a step has after an exchange."""

    segments: tuple[str, ...]
    reader: Reader | None


@dataclass(frozen=True)
class RowUnits(TwinSize):
    """The number of rows of a row set, times a number of heads."""

    segments: tuple[str, ...]
    heads: int


@dataclass(frozen=True)
class AnyCount(TwinSize):
    """A number that no size of another input is equal to in every batch."""


VaryingSize = (
    Rows
    | RestRows
    | KeyRows
    | HaloRows
    | LoadedRows
    | KeptRows
    | PairEntries
    | PerRequest
    | TwinSize
    | LineCount
)
Size = int | VaryingSize


def sizes_of(
    source: Source, taps: Mapping[str, Tap], value: Sequence[int] | None = None
) -> tuple[Size, ...]:
    """Return the sizes of an input, in the order of its dimensions.

    Args:
        source: What the input is.
        taps: The program's taps by name.
        value: The sizes of an example, from which those of constants and weights are taken;
            without it, constants have the sizes of their lane.
    """
    match source:
        case Given(_, _, lane):
            return tuple(value) if lane.kind == "const" and value is not None else lane_sizes(lane)
        case Owner() | Enter() | Parents() | Subsites():
            return (Rows(row_set(source)),)
        case Neighbours(window) | Weights(window):
            return Rows(row_set(source)), window.places
        case Lines("rest_order" | "rest_owner" | "rest_sorted_owner", _, _, Window() as window):
            return (HaloRows(window),)
        case RestOwner(segments) | Lines(
            "rest_order" | "rest_owner" | "rest_sorted_owner", segments
        ):
            return (RestRows(segments),)
        case Lines("order" | "back" | "owner" | "sorted_owner", segments):
            return (Rows(segments),)
        case Lines("numbers", segments, axis):
            return (LineCount(segments, axis),)
        case Lines(_, segments, axis):
            return LineCount(segments, axis), 2
        case Requests() | Calls():
            return (PerRequest(),)
        case CallSpans():
            return PerRequest(), 2
        case Spans(segments) | RestSpans(segments):
            return PerRequest(), 2 * len(segments)
        case Halo(tap, window):
            return HaloRows(window), *taps[tap].shape
        case Rest(tap, segments):
            return RestRows(segments), *taps[tap].shape
        case Loaded(tap, before, after):
            return LoadedRows(before, after), *taps[tap].shape
        case Kept(tap, segments):
            return KeptRows(segments), *taps[tap].shape
        case RestStats(tap):
            return PerRequest(), taps[tap].stats, 3
        case RestSum(tap):
            return PerRequest(), prod(taps[tap].shape) + 1
        case Pairs(_, queries, keys, heads):
            return (PairEntries(queries, keys, heads),)
        case LinePairs(_, queries, keys, _, heads):  # as if each line had all rows
            return (PairEntries(queries.segments, keys.segments, heads),)
        case PairTable(_, queries, keys, heads):
            return heads, Rows(queries) if queries else 1, KeyRows(keys)
        case RankGroups(weight) | OwnGroups(weight):
            return UpdateRanks(weight), 4
        case Down(weight) | Up(weight) | OwnWeights(weight) | OwnBiases(weight):
            return UpdateRanks(weight), *(value or ())[1:]
        case Updated():
            return tuple(value or ())
    return rank_sizes_of(source, taps)


def rank_sizes_of(source: Source, taps: Mapping[str, Tap]) -> tuple[Size, ...]:
    """Return the sizes of an input that only the graphs of ranks have."""
    free = AnyCount()
    match source:
        case Exchanged("order", segments, reader) | ReadOwner(segments, reader):
            return (ReadRows(segments, reader),)
        case (
            Exchanged(part) | Merged("send" | "counts" as part) | ByHead("send" | "counts" as part)
        ):
            return (2, free) if part == "counts" else (free,)
        case Merged("order", segments):
            return free, Rows(segments)
        case ByHead("order", segments, heads, back):
            return (RowUnits(segments, heads) if back else free,)
        case ReadSpans(segments) | KeySpans(segments) | OwnSpans(segments):
            return PerRequest(), 2 * len(segments)
        case RestShareSpans(segments):
            return PerRequest(), 2 * len(segments)
        case HeadSpans() | HeadRestSpans():
            return free, 2
        case ReadLines(Lines(part, _, axis) as lines, reader):
            if part in ("spans", "rest_spans"):
                return LineCount(lines.segments, axis), 2
            if part.startswith("rest_"):
                return (free,)
            return (ReadRows(lines.segments, reader),)
        case Places(segments):
            return (Rows(segments),)
        case Peers():
            return (free,)
        case RestShare(tap):
            return free, *taps[tap].shape
        case HeadShare(tap, _, heads):
            _, *depth = taps[tap].shape
            return free, 1, *depth
    raise AssertionError(f"an input without sizes: {source}")


def lane_sizes(lane: Lane) -> tuple[Size, ...]:
    """Return the sizes of a value as rows, as one entry per request, or as one for all."""
    if lane.kind == "rows":
        return Rows(lane.segments), *lane.row_shape()
    sizes = [lane.features(i) for i in range(len(lane.dims))]
    return tuple(
        PerRequest(size) if Batch() in dim else size
        for size, dim in zip(sizes, lane.dims, strict=True)
    )


def row_set(source: Source) -> tuple[str, ...]:
    """Return the row set whose rows an input has, one entry for each; () for other inputs."""
    match source:
        case Given(_, _, lane) if lane.kind == "rows":
            return lane.segments
        case Owner(segments) | Enter(_, segments):
            return segments
        case Neighbours(window) | Weights(window):
            return (grid_segment(window.target),)
        case Parents(_, level) | Subsites(_, level):
            return (grid_segment(level),)
    return ()
