"""A Frontend without workers or torch, for tests of what stands before it: it keeps what it was
asked, tints the masked pixels, and fails when it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from maskfx.serve.errors import ApiError
from maskfx.serve.request import (
    Card,
    Finished,
    Health,
    Mask,
    Pixels,
    Preview,
    Request,
    TemplateInfo,
)

CARD = Card(
    name="painter",
    family="PainterPipeline",
    size=(256, 256),
    multiple=8,
    steps=12,
    guidance=5.0,
    takes=frozenset({"image", "mask", "guidance", "strength", "negative_prompt"}),
    generates=False,
)


def tinted(picture: Pixels, mask: Mask, strength: float) -> Pixels:
    """Red and blue swapped where the mask is, by so much; the rest as it was."""
    mixed = picture + strength * (picture[..., ::-1].astype(float) - picture)
    return np.where(mask[..., None], mixed.round(), picture).astype(np.uint8)


class Painter:
    """`fault` fails every call, at once or `after` so many previews; `gate` holds back the rest."""

    def __init__(self, cards: list[Card] | None = None) -> None:
        self.models = [CARD] if cards is None else cards
        self.requests: list[Request] = []
        self.fault: ApiError | None = None
        self.after = 0
        self.gate = threading.Event()
        self.gate.set()
        self.pause = 0.0  # seconds between previews
        self.cancelled = 0

    def seat(self) -> AbstractContextManager[None]:
        @contextmanager
        def taken() -> Iterator[None]:
            yield

        return taken()

    async def serve(self, request: Request) -> AsyncIterator[Preview | Finished]:
        self.requests.append(request)
        picture = request.images[0]
        whole = np.ones(picture.shape[:2], bool)
        mask = whole if request.mask is None else request.mask
        try:
            for index in range(request.previews):
                self.fail_after(index)
                yield Preview(index, tinted(picture, mask, (index + 1) / (request.previews + 1)))
                await asyncio.sleep(self.pause)
                while index == 0 and not self.gate.is_set():
                    await asyncio.sleep(0.01)
            self.fail_after(request.previews)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise
        yield Finished(
            pixels=tinted(picture, mask, 1.0),
            seconds=0.84,
            queued=0.04,
            steps=request.steps or CARD.steps,
            mask_ratio=pooled(mask, CARD.site),
            dense_seconds=2.72,
        )

    def fail_after(self, previews: int) -> None:
        if self.fault is not None and previews >= self.after:
            raise self.fault

    def cards(self) -> list[Card]:
        return self.models

    async def record(self, request: Request) -> TemplateInfo:
        raise ApiError("unsupported_parameter", "The painter keeps no templates.")

    def templates(self) -> list[TemplateInfo]:
        return []

    async def forget(self, template: str) -> None:
        raise ApiError("template_not_found", "The painter keeps no templates.")

    def template_picture(self, template: str) -> Pixels:
        raise ApiError("template_not_found", "The painter keeps no templates.")

    def health(self) -> Health:
        return Health(live=True, ready=True, workers=1)

    def metrics(self) -> bytes:
        return b""

    def count(self, metric: str, **labels: Any) -> None:
        pass


def pooled(mask: Mask, site: int) -> float:
    """The share of sites that the mask touches."""
    height, width = (-(-side // site) * site for side in mask.shape)
    padded = np.zeros((height, width), bool)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    cells = padded.reshape(height // site, site, width // site, site).any((1, 3))
    return float(cells.mean())
