"""What each input of a rewritten graph is: rows, tables and values that a frame provides.

Passes write these descriptions and the runtime's frame provides the inputs; neither knows the
other. The *rest* of a row set is its inactive sites, whose rows come from the cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from maskfx.ir.geometry.lanes import Lane
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.adapter_sources import Adapted as Adapted
from maskfx.ir.programs.adapter_sources import Down as Down
from maskfx.ir.programs.adapter_sources import OwnBiases as OwnBiases
from maskfx.ir.programs.adapter_sources import OwnGroups as OwnGroups
from maskfx.ir.programs.adapter_sources import OwnWeights as OwnWeights
from maskfx.ir.programs.adapter_sources import RankGroups as RankGroups
from maskfx.ir.programs.adapter_sources import Up as Up
from maskfx.ir.programs.adapter_sources import Updated as Updated
from maskfx.ir.programs.export_sources import Calls as Calls
from maskfx.ir.programs.export_sources import CallSpans as CallSpans
from maskfx.ir.programs.export_sources import Requests as Requests
from maskfx.ir.programs.export_sources import RestOwner as RestOwner
from maskfx.ir.programs.head_sources import ByHead as ByHead
from maskfx.ir.programs.head_sources import HeadRestSpans as HeadRestSpans
from maskfx.ir.programs.head_sources import HeadShare as HeadShare
from maskfx.ir.programs.head_sources import HeadSpans as HeadSpans


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
class Weights:
    """(rows of the target, window) weights of what a window reads, from the two sizes alone."""

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
class Lines:
    """A table of the lines of a picture, along `axis`: "x" for its rows, "y" for its columns.

    Of a video: "picture" for its frames, "frames" for the places of all frames. Others name the
    axes, joined by "_", of which a line has all or a part: of "y4far" the place in each of 4 equal
    parts, of "y4near" all places of one of them.

    `part` is "spans", (lines, 2): start and stop of each line's rows, one request after another;
    "order": the row at each place if they lie line by line; "back": the place of each row there;
    "owner": the line of each row, "sorted_owner" of each place; "numbers": those of the lines, from
    0. "rest_spans", "rest_order", "rest_owner" and "rest_sorted_owner" are those of the cached rows
    of the rest; with a `window`, of its halo. Lines whose sites lie apart are numbered by how many
    of them are masked, so that those with as many follow each other.
    """

    part: str
    segments: tuple[str, ...]
    axis: str
    window: Window | None = None

    @property
    def name(self) -> str:
        """The name of the graph's input."""
        words = ["lines", self.part, self.axis, *self.segments]
        words += [self.window.name] if self.window is not None else []
        return re.sub(r"\W", "_", "_".join(words))


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


@dataclass(frozen=True)
class LinePairs:
    """An attention mask of lines, as each line's (queries x keys) entries concatenated.

    `value` has an entry for each two places of a line, the same for all lines. The keys are the
    rows of `keys` and then those of `rest`; all three are the spans of lines.
    """

    value: Given
    queries: Lines
    keys: Lines
    rest: Lines
    heads: int

    @property
    def segments(self) -> tuple[str, ...]:
        return *self.queries.segments, *self.keys.segments


# An input of exported graphs, in place of ragged masks, which operators of maskfx read.


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


# Inputs of a graph whose rows are split over ranks. A rank has a part of some requests' rows, and
# a part or all rows of their texts.


@dataclass(frozen=True)
class SameLines:
    """Reads, for the rows of segment `target`, the rows of `source` in the same lines."""

    axis: str
    source: str
    target: str


Reader = Neighbours | Parents | Subsites | Enter | SameLines  # what picks rows


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
class ReadLines:
    """`Lines` of the rows, fresh or cached, that `reader` reads, or of all rows."""

    lines: Lines
    reader: Neighbours | SameLines | None = None


@dataclass(frozen=True)
class KeySpans:
    """`Spans` of a rank's rows, in which each row is that of one rank alone."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class OwnSpans:
    """`Spans` of a rank's rows without those that other ranks have too."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class ReadOwner:
    """`Owner` of the rows of `segments` that a rank reads by a reader."""

    segments: tuple[str, ...]
    reader: Reader | None


@dataclass(frozen=True)
class Places:
    """For each row that a rank has, its index after an exchange of all rows."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class Peers:
    """The other ranks that have a part of one of the rank's requests."""


@dataclass(frozen=True)
class RestShare:
    """The cached rows of a rank's share of the inactive sites of `segments`, or of its lines."""

    tap: str
    segments: tuple[str, ...]
    reader: SameLines | None = None


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
    | Weights
    | Parents
    | Subsites
    | Lines
    | Halo
    | Rest
    | Enter
    | Loaded
    | Kept
    | RestStats
    | RestSum
    | Pairs
    | LinePairs
    | Requests
    | Calls
    | CallSpans
    | RestOwner
    | PairTable
    | RankGroups
    | Down
    | Up
    | OwnWeights
    | OwnBiases
    | OwnGroups
    | Updated
    | Exchanged
    | Merged
    | ReadSpans
    | ReadLines
    | KeySpans
    | OwnSpans
    | ReadOwner
    | Places
    | Peers
    | RestShare
    | RestShareSpans
    | ByHead
    | HeadSpans
    | HeadShare
    | HeadRestSpans
)


# tables of indices or weights, which follow from masks and sizes alone
Spanning = Spans | RestSpans | CallSpans
Table = Owner | RestOwner | Requests | Calls | Spanning | Reader | Weights | Lines
# rows of the cache as they were recorded
Cached = Halo | Rest | Loaded | Kept | RestShare | HeadShare
Tapped = Cached | RestStats | RestSum  # what is made of the rows of a tap
