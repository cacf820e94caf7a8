"""The compiler's output for the runtime: a pure graph and a description of each of its inputs.

Passes write these descriptions and the runtime's frame provides the inputs; neither knows the
other. A *tap* is a value that a recording keeps. The *rest* of a row set is its inactive sites,
whose rows come from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from maskfx.ir.lanes import Lane
from maskfx.ir.pyramid import Pyramid, Window


@dataclass(frozen=True)
class Given:
    """A value that exists in full per request: an argument, or an output of a side graph.

    `origin` is "step" (an argument), "request" (computed once per request) or "dense" (computed
    in every step, in full, because no rule narrows it).
    """

    origin: str
    index: int
    lane: Lane


@dataclass(frozen=True)
class Owner:
    """For each row of a row set, the index of its request."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class Spans:
    """(requests, 2 * segments): start and stop of each request's rows in each segment."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class RestSpans:
    """(requests, 2 * segments): start and stop of each request's cached rows of the rest."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class Neighbours:
    """(rows of the target, window) indices into [rows of the source | halo | one zero row]."""

    window: Window


@dataclass(frozen=True)
class Parents:
    """For each row of the target level, the active row of the source level that contains it."""

    source: int
    target: int


@dataclass(frozen=True)
class Subsites:
    """For each row of the finer level, its index into (coarse row, patch, patch)."""

    coarse: int
    fine: int
    patch: int


@dataclass(frozen=True)
class Halo:
    """The cached rows around the active ones that a window reads."""

    tap: str
    window: Window


@dataclass(frozen=True)
class Rest:
    """The cached rows of every inactive site of `segments`, one segment after another."""

    tap: str
    segments: tuple[str, ...]


@dataclass(frozen=True)
class Enter:
    """For each row of the row set `after`, its index into [rows of `before` | loaded]."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """The cached rows of the sites that are active in `after` but not in `before`."""

    tap: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """The cached rows of every active site of `segments`, of requests that have inactive ones."""

    tap: str
    segments: tuple[str, ...]


@dataclass(frozen=True)
class RestStats:
    """(requests, groups, 3): count, mean and sum of squared deviations of the rest."""

    tap: str
    segments: tuple[str, ...]


@dataclass(frozen=True)
class RestSum:
    """(requests, features + 1): the sum of the rest's rows, and their number."""

    tap: str
    segments: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """A full attention mask, as each request's (queries x keys) entries concatenated."""

    value: Given
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    heads: int


# Inputs of exported graphs, in place of spans and ragged masks, which operators of maskfx read.


@dataclass(frozen=True)
class Requests:
    """(requests,): the numbers of the requests, from 0."""


@dataclass(frozen=True)
class RestOwner:
    """For each cached row of the rest of `segments`, the index of its request."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class PairTable:
    """What an attention mask adds to the products of all rows: (heads, queries or 1, keys).

    The keys are the rows of `keys` and then the cached rows of their rest. A boolean mask adds 0
    where it is True and -inf elsewhere. What stands between rows of different requests is not read.
    """

    value: Given
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    heads: int
    dtype: torch.dtype


# Inputs of twins for members with adapters. A layer is named by the weight of the program's graph.


@dataclass(frozen=True)
class RankGroups:
    """(groups, 4) on the host: rows of `segments` and the ranks of a layer that apply to them.

    Without segments a row is a request.
    """

    weight: str
    segments: tuple[str, ...]


@dataclass(frozen=True)
class Down:
    """(ranks, inputs): the first matrices of a layer's updates, with axes in the order of rows."""

    weight: str
    order: tuple[int, ...]


@dataclass(frozen=True)
class Up:
    """(ranks, outputs): the second matrices of a layer's updates, with their factors."""

    weight: str


@dataclass(frozen=True)
class Updated:
    """A layer's whole weight with its update, in another layout if `shape` is given.

    All members of a batch have the same one.
    """

    weight: str
    order: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


# Further inputs of a graph whose rows are split over ranks. A rank has a part of some requests'
# rows; of these requests it has all rows of the text.

Reader = Neighbours | Parents | Subsites | Enter  # tables that pick rows


@dataclass(frozen=True)
class Exchanged:
    """A table by which the ranks exchange rows of `segments`, so that each has those it reads.

    `part` is "send", "counts" or "order", as `ops.exchange` reads them. `reader` picks the rows;
    without one a rank reads all rows of its requests.
    """

    part: str
    segments: tuple[str, ...]
    reader: Reader | None = None


@dataclass(frozen=True)
class Merged:
    """A table by which the ranks return partial attentions of the rows of `segments`.

    `part` is "send", "counts" or "order", as `ops.merge_parts` reads them.
    """

    part: str
    segments: tuple[str, ...]


@dataclass(frozen=True)
class ReadSpans:
    """`Spans` of the rows of `segments` after an exchange of all rows."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class KeySpans:
    """`Spans` of a rank's rows, in which one rank alone has the text of a request."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class ImageSpans:
    """`Spans` of a rank's rows without those of texts."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class Places:
    """For each row that a rank has, its index after an exchange of all rows."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class Peers:
    """The other ranks that have a part of one of the rank's requests."""


@dataclass(frozen=True)
class RestShare:
    """The cached rows of a rank's share of the inactive sites of `segments`."""

    tap: str
    segments: tuple[str, ...]


@dataclass(frozen=True)
class RestShareSpans:
    """`RestSpans` of the rows of a `RestShare`."""

    segments: tuple[str, ...]


Source = (
    Given
    | Owner
    | Spans
    | RestSpans
    | Neighbours
    | Parents
    | Subsites
    | Halo
    | Rest
    | Enter
    | Loaded
    | Kept
    | RestStats
    | RestSum
    | Pairs
    | Requests
    | RestOwner
    | PairTable
    | RankGroups
    | Down
    | Up
    | Updated
    | Exchanged
    | Merged
    | ReadSpans
    | KeySpans
    | ImageSpans
    | Places
    | Peers
    | RestShare
    | RestShareSpans
)


Cached = Halo | Rest | Loaded | Kept | RestShare  # rows of the cache as they were recorded


KEYS, STRETCH = "keys", "stretch"


@dataclass(frozen=True)
class Region:
    """A part of the graph with a row set of active sites chosen at run time, beside the mask's.

    kind "keys": the projections of one attention's keys and values; a plan chooses the sites, and
    no choice changes the result. kind "stretch": a stretch, the consecutive blocks up to the one
    at `place`; the request chooses the sites, and these sites see the edit. `inside` is the
    stretch that contains the keys, if any.
    """

    kind: str
    place: str
    inside: int = 0


@dataclass(frozen=True)
class Tap:
    """A value that a recording keeps: the image sites' rows of one node."""

    name: str
    segments: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    stats: int = 0  # groups, if only statistics per site and group are kept


@dataclass(frozen=True)
class Derived:
    """A weight in another layout, derived again when the original weight changes."""

    name: str
    origin: str
    order: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """A linear layer on rows, to which a low-rank term can be added.

    Args:
        weight: the name of the original weight in the graph.
        order: the order of the weight's axes in the layer that multiplies rows.
        segments: the row set; empty if the rows are requests.
    """

    weight: str
    order: tuple[int, ...]
    segments: tuple[str, ...]


def derive(weight: torch.Tensor, order: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return weight.detach().permute(order).reshape(shape).contiguous()


@dataclass
class Interface:
    """Inputs, outputs and weights of a rewritten graph, in graph order."""

    pyramid: Pyramid
    inputs: dict[str, Source] = field(default_factory=dict)
    outputs: list[Lane | None] = field(default_factory=list)
    taps: dict[str, Tap] = field(default_factory=dict)
    derived: list[Derived] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)  # numbered from 1
    products: dict[str, Product] = field(default_factory=dict)  # by the name of the node

    def __post_init__(self) -> None:
        self._places: dict[str, int] = {}
        self._region_taps: dict[int, tuple[set[str], set[str]]] = {}

    def region_of(self, source: Source) -> int:
        """Return the region whose plan decides how many of these rows are loaded, or 0."""
        segments: tuple[str, ...] = ()
        if isinstance(source, Rest):
            segments = source.segments
        elif isinstance(source, Loaded):
            segments = source.after
        region = self.pyramid.region_in(segments)
        return region if region in self.regions_of(KEYS) else 0

    def regions_of(self, kind: str) -> list[int]:
        """Return the numbers of the regions of one kind."""
        return [n for n, region in enumerate(self.regions, 1) if region.kind == kind]

    def region_taps(self, region: int) -> tuple[set[str], set[str]]:
        """Return the taps that a region loads to project no keys, and those to project all keys."""
        if region not in self._region_taps:
            keys: set[str] = set()
            inputs: set[str] = set()
            for source in self.inputs.values():
                if isinstance(source, Rest | Loaded) and self.region_of(source) == region:
                    (keys if isinstance(source, Rest) else inputs).add(source.tap)
            self._region_taps[region] = keys, inputs
        return self._region_taps[region]

    def crossing_taps(self) -> set[str]:
        """Return the taps that are read only where a stretch is wider than the one before it."""
        readers: dict[str, set[bool]] = {}
        for source in self.inputs.values():
            if hasattr(source, "tap"):
                crosses = isinstance(source, Loaded) and not self.region_of(source)
                readers.setdefault(source.tap, set()).add(crosses)
        return {tap for tap, crosses in readers.items() if crosses == {True}}

    def fixed_taps(self) -> set[str]:
        """Return the taps that every plan reads."""
        loaded = (Halo, Rest, Loaded, Kept, RestStats, RestSum)
        sources = [s for s in self.inputs.values() if isinstance(s, loaded)]
        return {source.tap for source in sources if not self.region_of(source)}

    def taps_for(self, sides: Sequence[str]) -> set[str]:
        """Return the taps that edits need if each region keeps "keys", "inputs" or "both"."""
        needed = self.fixed_taps()
        for region, side in zip(self.regions_of(KEYS), sides, strict=True):
            keys, inputs = self.region_taps(region)
            needed |= {"keys": keys, "inputs": inputs, "both": keys | inputs}[side]
        return needed

    def stats_taps(self, segments: tuple[str, ...], groups: int) -> list[Tap]:
        """Return the statistics taps of one row set and group count, which are stored together."""
        return [t for t in self.taps.values() if t.stats == groups and t.segments == segments]

    def stats_index(self, tap: str) -> int:
        """Return the index of a norm's statistics among the taps stored together with it."""
        if tap not in self._places:
            own = self.taps[tap]
            names = [t.name for t in self.stats_taps(own.segments, own.stats)]
            self._places.update({name: i for i, name in enumerate(names)})
        return self._places[tap]


@dataclass
class SideGraph:
    """A part of the captured graph that runs in full, on the arguments of a single request."""

    module: fx.GraphModule
    lanes: list[Lane]
    used: list[int]
    nodes: int


@dataclass
class Program:
    """One compiled denoiser.

    Args:
        module: the rewritten graph.
        recording: the same graph, with the taps of the interface as further outputs.
        interface: inputs, outputs and weights of both graphs.
        code: hash of what the program computes.
        origins: the original weights by name, from which derived weights are made.

    A twin for members with adapters is a program too, with further inputs (`passes/add_low_rank`).
    """

    module: fx.GraphModule
    recording: fx.GraphModule
    interface: Interface
    code: str
    origins: dict[str, torch.Tensor] = field(default_factory=dict)
