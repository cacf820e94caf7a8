"""The compiler's output for the runtime: a pure graph and a description of each of its inputs.

The inputs are described in `sources.py`. A *tap* is a value that a recording keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from maskfx.ir.geometry.lanes import Lane
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.programs.sources import Halo, Kept, Loaded, Rest, RestStats, RestSum, Source

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

    def stretch_of(self, segments: Sequence[str]) -> int:
        """Return the stretch whose sites these segments hold, or 0 for the mask's."""
        region = self.pyramid.region_in(segments)
        kind = self.regions[region - 1] if region else None
        return kind.inside if kind is not None and kind.kind != STRETCH else region

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
