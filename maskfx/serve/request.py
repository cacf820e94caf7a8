"""A request as the front owns it, what comes back of it, and who answers: `Frontend`.

One request makes one picture; a call that wants n pictures is n requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # (height, width, 3)
Mask = NDArray[np.bool_]  # (height, width), True = edit


class RequestKind(Enum):
    """What is asked for."""

    EDIT = "edit"
    GENERATE = "generate"
    RECORD = "record"  # a template, warmed and pinned


@dataclass(frozen=True, eq=False)
class Request:
    """Decoded and checked. Everything that the picture depends on, the seed included."""

    id: str
    kind: RequestKind
    prompt: str
    seed: int
    images: tuple[Pixels, ...] = ()  # upright; the first is the one that is edited
    mask: Mask | None = None  # of the first image's size
    control: Pixels | None = None
    negative_prompt: str | None = None
    size: tuple[int, int] | None = None  # width, height; None: the image's, or the model's
    steps: int | None = None
    guidance: float | None = None
    strength: float | None = None
    template: str | None = None
    lora: str | None = None
    # none of these changes the picture
    previews: int = 0
    seconds: float | None = None  # it is worth nothing later than so long after its arrival
    user: str = ""
    trace: Mapping[str, str] | None = None  # its caller's, as W3C's headers say it


@dataclass(frozen=True, eq=False)
class Preview:
    """A rough picture of a request under way."""

    index: int  # 0, 1, …
    pixels: Pixels


@dataclass(frozen=True, eq=False)
class Finished:
    """The picture, and what it took."""

    pixels: Pixels
    seconds: float  # from arrival to picture
    queued: float
    steps: int
    mask_ratio: float  # share of the sites that were computed; 1 without a mask
    dense_seconds: float | None = None  # what a dense run is predicted to take
    tries: int = 1
    worker: str = ""


@dataclass(frozen=True)
class Card:
    """What a model is and takes, as its worker says."""

    name: str
    family: str  # the pipeline's class
    size: tuple[int, int]  # width, height by default
    multiple: int  # widths and heights are multiples of this
    steps: int
    guidance: float | None
    takes: frozenset[str]  # of: image, mask, control, negative_prompt, guidance, strength, lora…
    generates: bool  # pictures from nothing
    site: int = 8  # pixels along a site of the latent: the page's overlay
    loras: tuple[str, ...] = ()
    margin: int = 0  # sites around a mask that an edit computes too
    every: int = 1  # of an edit's steps one in so many is computed
    strength: float | None = None  # of an edit that says none


@dataclass(frozen=True)
class TemplateInfo:
    """A picture kept for edits."""

    id: str
    width: int
    height: int
    created: int  # seconds of the wall clock
    pinned: bool = True
    bytes: dict[str, int] = field(default_factory=dict)  # by tier
    workers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Health:
    """live: the process can answer; ready: requests are taken."""

    live: bool
    ready: bool
    reason: str = ""  # an error code, where it isn't ready
    waiting: int = 0
    running: int = 0
    workers: int = 0


class Frontend(Protocol):
    """Owns requests from their arrival to their picture. One event loop uses it."""

    def seat(self) -> AbstractContextManager[None]:
        """A place for one call, taken before its body is read.

        Raises ApiError queue_full, draining or no_workers instead.
        """
        ...

    def serve(self, request: Request) -> AsyncIterator[Preview | Finished]:
        """Previews, then Finished; or an ApiError. To close the iterator cancels the request."""
        ...

    def cards(self) -> list[Card]:
        """The models that are served, by the names that clients use."""
        ...

    async def record(self, request: Request) -> TemplateInfo:
        """Register, warm and pin a template."""
        ...

    def templates(self) -> list[TemplateInfo]: ...

    async def forget(self, template: str) -> None:
        """ApiError template_not_found if there is none."""
        ...

    def template_picture(self, template: str) -> Pixels:
        """ApiError template_not_found if there is none."""
        ...

    def health(self) -> Health: ...

    def metrics(self) -> bytes:
        """Prometheus' text format."""
        ...

    def count(self, metric: str, **labels: Any) -> None:
        """Add one to a counter of `metrics.py`."""
        ...
