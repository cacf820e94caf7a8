"""Inputs of a graph that are made of the members' adapters; the others are in `sources.py`."""

from __future__ import annotations

from dataclasses import dataclass


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
class OwnWeights:
    """(several, outputs, inputs): a layer's weights with full differences, of requests with any.

    In the layout of the layer that multiplies rows, if `shape` is given.
    """

    weight: str
    order: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class OwnBiases:
    """(several, outputs): a layer's biases with differences, of requests with any."""

    bias: str


@dataclass(frozen=True)
class OwnGroups:
    """(groups, 4) on the host: rows of `segments`, and which weight and bias of a layer are theirs.

    Without segments a row is a request.
    """

    weight: str
    bias: str | None
    segments: tuple[str, ...]


@dataclass(frozen=True)
class Updated:
    """A layer's whole weight with its update, in another layout if `shape` is given.

    All members of a batch have the same one.
    """

    weight: str
    order: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


Own = OwnWeights | OwnBiases | OwnGroups
Adapted = RankGroups | Down | Up | Own | Updated  # what is made of the members' adapters
