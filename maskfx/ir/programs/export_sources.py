"""Inputs of exported graphs, in place of spans, which operators of maskfx read.

The others are in `sources.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Requests:
    """(requests,): the numbers of the requests, from 0."""


@dataclass(frozen=True)
class CallSpans:
    """(requests, 2): start and stop of the requests that belong to the same call as this one."""


@dataclass(frozen=True)
class Calls:
    """(requests,): the number of the call that each request is a batch element of, from 0."""


@dataclass(frozen=True)
class RestOwner:
    """For each cached row of the rest of `segments`, the index of its request."""

    segments: tuple[str, ...]
