"""A Frontend in this process: it inverts what is masked, after a given number of steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from maskfx.serve.errors import ApiError
from maskfx.serve.metrics import Metrics
from maskfx.serve.request import (
    AdapterInfo,
    Card,
    Finished,
    Health,
    ModelState,
    Pictures,
    Pixels,
    Preview,
    Request,
    RequestKind,
    ServedModel,
    TemplateInfo,
)

EVERYTHING = frozenset(
    (
        *("ahead", "control", "guidance", "image", "images", "lora", "mask"),
        *("negative_prompt", "seed", "steps", "strength", "template"),
    )
)
CARD = Card(
    name="fake/model",
    family="Fake",
    size=(64, 48),
    multiple=8,
    steps=4,
    guidance=None,
    takes=EVERYTHING,
    generates=True,
    loras=("ink",),
)


class Asked(NamedTuple):
    """A request and its pictures."""

    request: Request
    pictures: Pictures


class FakeFrontend:
    """Records what it is asked; `step` seconds per step; `fail` and `refuse` are raised."""

    def __init__(self, metrics: Metrics, *, cards: tuple[Card, ...] = (CARD,)) -> None:
        self._metrics, self._cards = metrics, cards
        self.asked: list[Asked] = []
        self.cancelled: list[str] = []
        self.seats, self.most_seats = 0, 1000
        self.step = 0.0
        self.fail: Exception | None = None
        self.refuse: list[ApiError] = []
        self.state = ModelState.LOADING  # without cards
        self.waited: list[float | None] = []  # seconds for which calls would wait
        self.shown = Health(live=True, ready=True, workers=1)
        self.loras = {"ink"}
        self._templates: dict[str, tuple[TemplateInfo, Pixels]] = {}

    @contextmanager
    def seat(self) -> Iterator[None]:
        if self.refuse:
            raise self.refuse.pop(0)
        if self.seats >= self.most_seats:
            raise ApiError("queue_full", "The queue is full.", retry_after=2.0)
        self.seats += 1
        try:
            yield
        finally:
            self.seats -= 1

    async def serve(
        self, request: Request, pictures: Pictures
    ) -> AsyncIterator[Preview | Finished]:
        self.asked.append(Asked(request, pictures))
        steps, done = request.steps or self._cards[0].steps, False
        try:
            for step in range(steps):
                await asyncio.sleep(self.step)
                if self.fail is not None:
                    raise self.fail
                if step < request.previews:
                    yield Preview(step, self._picture(request, pictures)[::8, ::8])
            yield Finished(
                self._picture(request, pictures), 0.5, 0.1, steps, 0.25, dense_seconds=2.0
            )
            done = True
        finally:
            if not done and self.fail is None:
                self.cancelled.append(request.id)

    def _picture(self, request: Request, pictures: Pictures) -> Pixels:
        if request.kind is RequestKind.GENERATE:
            width, height = request.size or self._cards[0].size
            return np.full((height, width, 3), request.seed % 256, np.uint8)
        return 255 - pictures.images[0]

    def models(self) -> list[ServedModel]:
        cards = [replace(card, loras=tuple(sorted(self.loras))) for card in self._cards]
        found = [ServedModel(card.name, ModelState.READY, card) for card in cards]
        return found or [ServedModel("soon", self.state, None)]

    async def card(self, name: str | None, seconds: float | None) -> Card:
        self.waited.append(seconds)
        for card in self._cards:
            if name in (None, card.name):
                return replace(card, loras=tuple(sorted(self.loras)))
        raise ApiError("model_not_found", f"There is no model {name!r}.", param="model")

    async def record(self, request: Request, pictures: Pictures) -> TemplateInfo:
        assert request.template is not None
        height, width = pictures.images[0].shape[:2]
        info = TemplateInfo(request.template, width, height, 1, bytes={"host": 10}, workers=("w",))
        self.asked.append(Asked(request, pictures))
        self._templates[request.template] = (info, pictures.images[0])
        return info

    def record_ahead(self, request: Request, pictures: Pictures) -> None:
        self.asked.append(Asked(request, pictures))

    def templates(self) -> list[TemplateInfo]:
        return [replace(info) for info, _ in self._templates.values()]

    async def forget(self, template: str) -> None:
        self._find(template)
        del self._templates[template]

    def template_picture(self, template: str) -> Pixels:
        return self._find(template)[1]

    def _find(self, template: str) -> tuple[TemplateInfo, Pixels]:
        if template not in self._templates:
            raise ApiError("template_not_found", "There is no such template.", param="template_id")
        return self._templates[template]

    def adapters(self) -> list[AdapterInfo]:
        return [AdapterInfo(name, 10, 1) for name in sorted(self.loras)]

    async def register_adapter(self, name: str) -> AdapterInfo:
        if name not in ("ink", "oil"):
            raise ApiError("lora_not_found", "There is no such LoRA.", param="name")
        self.loras |= {name}
        return AdapterInfo(name, 10, 1)

    def remove_adapter(self, name: str) -> None:
        if name not in self.loras:
            raise ApiError("lora_not_found", "There is no such LoRA.", param="adapter")
        self.loras -= {name}

    def health(self) -> Health:
        return self.shown

    def metrics(self) -> bytes:
        return self._metrics.text()

    def count(self, metric: str, **labels: Any) -> None:
        self._metrics.count(metric, **labels)
