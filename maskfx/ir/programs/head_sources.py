"""Inputs of a graph whose ranks divide the heads of attentions; the others are in `sources.py`.

A *unit* is a row's part of one head of keys, with the heads of queries that read it. Where a rank
attends, its units lie request by request and head by head, each with the rows of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How the ranks of a step attend: each to the keys of all ranks, which are gathered; each to its
# share of the cached keys, for the queries of all ranks; or each with its share of the heads.
AttentionWay = Literal["gathered", "keys by rank", "heads"]
WAYS: tuple[AttentionWay, ...] = ("gathered", "keys by rank", "heads")

# The way of all attentions, or of some by the names of their nodes; the others gather keys.
AttentionWays = AttentionWay | tuple[tuple[str, AttentionWay], ...]


def way_of(ways: AttentionWays, attention: str) -> AttentionWay:
    """Return the way of an attention, by the name of its node."""
    return ways if isinstance(ways, str) else dict(ways).get(attention, "gathered")


@dataclass(frozen=True)
class ByHead:
    """A table by which the ranks exchange units of the rows of `segments`.

    `part` is "send", "counts" or "order", as `ops.to_heads` and `ops.from_heads` read them. On the
    way `back` each rank gets all heads of its own rows again.
    """

    part: str
    segments: tuple[str, ...]
    heads: int
    back: bool = False


@dataclass(frozen=True)
class HeadSpans:
    """(units of a row, 2): start and stop of the units of each request and head of a rank."""

    segments: tuple[str, ...]
    heads: int


@dataclass(frozen=True)
class HeadShare:
    """(units, 1, depth): the cached rows of `segments`, of a rank's heads alone."""

    tap: str
    segments: tuple[str, ...]
    heads: int


@dataclass(frozen=True)
class HeadRestSpans:
    """(units of a row, 2): start and stop of the units that `HeadShare` has."""

    segments: tuple[str, ...]
    heads: int
