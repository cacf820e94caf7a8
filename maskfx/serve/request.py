"""A request as the front end owns it, its results, and the interface `Frontend` that serves it.

One request produces one image; an HTTP call for n images is n requests.
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
    """The kind of a request."""

    EDIT = "edit"
    GENERATE = "generate"
    RECORD = "record"  # a template, warmed and pinned


@dataclass(frozen=True, eq=False)
class Request:
    """A decoded and validated request, with all parameters of the image, including the seed."""

    id: str
    kind: RequestKind
    prompt: str
    seed: int
    images: tuple[Pixels, ...] = ()  # upright; the first one is edited
    mask: Mask | None = None  # of the first image's size
    control: Pixels | None = None
    negative_prompt: str | None = None
    size: tuple[int, int] | None = None  # width, height; None: the first image's or the model's
    steps: int | None = None
    guidance: float | None = None
    strength: float | None = None
    template: str | None = None
    lora: str | None = None
    # the following don't change the image
    previews: int = 0
    seconds: float | None = None  # deadline, in seconds after the arrival
    user: str = ""
    trace: Mapping[str, str] | None = None  # the caller's W3C trace context headers


@dataclass(frozen=True, eq=False)
class Preview:
    """A low-quality image of a request in flight."""

    index: int  # 0, 1, …
    pixels: Pixels


@dataclass(frozen=True, eq=False)
class Finished:
    """The result image, and the request's statistics."""

    pixels: Pixels
    seconds: float  # from arrival to result
    queued: float
    steps: int
    mask_ratio: float  # share of the sites that were computed; 1 without a mask
    dense_seconds: float | None = None  # predicted seconds of a dense run
    tries: int = 1
    worker: str = ""


@dataclass(frozen=True)
class Card:
    """A model's properties and supported parameters, as reported by its worker."""

    name: str
    family: str  # class name of the pipeline
    size: tuple[int, int]  # default width and height
    multiple: int  # widths and heights are multiples of this
    steps: int
    guidance: float | None
    takes: frozenset[str]  # of: image, mask, control, negative_prompt, guidance, strength, lora…
    generates: bool  # whether it generates without an image
    site: int = 8  # pixels along a site of the latents, for the web page's overlay
    loras: tuple[str, ...] = ()
    margin: int = 0  # sites around a mask that an edit computes, too
    every: int = 1  # an edit computes about every n-th step
    strength: float | None = None  # default of an edit


@dataclass(frozen=True)
class TemplateInfo:
    """A template image that is stored for edits."""

    id: str
    width: int
    height: int
    created: int  # Unix time in seconds
    pinned: bool = True
    bytes: dict[str, int] = field(default_factory=dict)  # by tier
    workers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Health:
    """State of the server: `live` if the process responds, `ready` if it accepts requests."""

    live: bool
    ready: bool
    reason: str = ""  # an error code if it isn't ready
    waiting: int = 0
    running: int = 0
    workers: int = 0


class Frontend(Protocol):
    """Owns requests from their arrival to their result; used by one event loop."""

    def seat(self) -> AbstractContextManager[None]:
        """Reserve capacity for one call before its body is read.

        Raises ApiError queue_full, draining or no_workers if there is none.
        """
        ...

    def serve(self, request: Request) -> AsyncIterator[Preview | Finished]:
        """Yield previews, then Finished, or raise ApiError; closing it cancels the request."""
        ...

    def cards(self) -> list[Card]:
        """Return the cards of the served models, under the names that clients use."""
        ...

    async def record(self, request: Request) -> TemplateInfo:
        """Register, warm and pin a template."""
        ...

    def templates(self) -> list[TemplateInfo]: ...

    async def forget(self, template: str) -> None:
        """Delete a template; ApiError template_not_found if there is none."""
        ...

    def template_picture(self, template: str) -> Pixels:
        """Return a template's image; ApiError template_not_found if there is none."""
        ...

    def health(self) -> Health: ...

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        ...

    def count(self, metric: str, **labels: Any) -> None:
        """Increment a counter of `metrics.py`."""
        ...
