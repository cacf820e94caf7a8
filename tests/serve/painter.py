"""A Frontend for tests of the page: it tints what is masked, waits, fails on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np

from maskfx.serve.errors import ApiError
from maskfx.serve.metrics import Metrics
from maskfx.serve.request import Card, Finished, Mask, Pictures, Pixels, Preview, Request
from tests.serve.fake_frontend import Asked, FakeFrontend

CARD = Card(
    name="painter",
    family="PainterPipeline",
    size=(256, 256),
    multiple=8,
    steps=12,
    guidance=5.0,
    takes=frozenset("image mask guidance strength negative_prompt seed steps".split()),  # noqa: SIM905
    generates=False,
)


class Painter(FakeFrontend):
    """`fault` fails calls after `after` previews; `gate` holds back what follows the first."""

    def __init__(self, *cards: Card) -> None:
        super().__init__(Metrics(), cards=cards or (CARD,))
        self.fault: ApiError | None = None
        self.after = 0
        self.gate = threading.Event()
        self.gate.set()

    async def serve(
        self, request: Request, pictures: Pictures
    ) -> AsyncIterator[Preview | Finished]:
        self.asked.append(Asked(request, pictures))
        done = False
        picture, mask = pictures.images[0] if pictures.images else drawn(request), pictures.mask
        if mask is None:
            mask = np.ones(picture.shape[:2], bool)
        try:
            for index in range(request.previews):
                self.fail_after(index)
                yield Preview(index, tinted(picture, mask, (index + 1) / (request.previews + 1)))
                while index == 0 and not self.gate.is_set():
                    await asyncio.sleep(0.01)
            self.fail_after(request.previews)
            yield Finished(
                pixels=tinted(picture, mask, 1.0),
                seconds=0.84,
                queued=0.04,
                steps=request.steps or CARD.steps,
                mask_ratio=pooled(mask, CARD.site),
                dense_seconds=2.72,
            )
            done = True
        finally:
            if not done and self.fault is None:
                self.cancelled.append(request.id)

    def fail_after(self, previews: int) -> None:
        if self.fault is not None and previews >= self.after:
            raise self.fault

    def serve_models(self, *cards: Card) -> None:
        self._cards = cards


def drawn(request: Request) -> Pixels:
    """A picture from nothing: squares of 8 pixels in colours of the seed."""
    width, height = request.size or CARD.size
    draw = np.random.default_rng(request.seed)
    squares = draw.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return squares.repeat(8, 0).repeat(8, 1)


def tinted(picture: Pixels, mask: Mask, strength: float) -> Pixels:
    """Red and blue swapped where the mask is, by an amount; the rest as it was."""
    mixed = picture + np.float32(strength) * (picture[..., ::-1].astype(np.float32) - picture)
    return np.where(mask[..., None], mixed.round(), picture).astype(np.uint8)


def pooled(mask: Mask, site: int) -> float:
    """The share of sites that the mask touches."""
    height, width = mask.shape
    cells = mask.reshape(height // site, site, width // site, site).any((1, 3))
    return float(cells.mean())
