"""A request as the front keeps it, from its arrival until its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from maskfx.serve.errors import ApiError
from maskfx.serve.messages import Job
from maskfx.serve.request import Card, Finished, Preview, Request, RequestKind
from maskfx.serve.scheduling.load import Demand
from maskfx.serve.scheduling.request_cost import size_of, work_of
from maskfx.serve.workers.shared_memory import PackedPixels

if TYPE_CHECKING:
    from maskfx.serve.frontend.tracing import Trace  # what it needs may not be installed

CHANNELS = 3
TRIES = 3  # deaths of workers: the first, and twice again
DEATHS_BEFORE_ALONE = 2  # then it might be the cause: it harms nobody else any more
SHORTAGES_BEFORE_ALONE = 3  # half as many each time

Answer = Preview | Finished | ApiError


@dataclass(eq=False)
class RequestTicket:
    """Everything that is needed to do it all over again, and where its answers go."""

    request: Request
    demand: Demand
    room: int = 0  # bytes that its picture is expected to need
    answers: asyncio.Queue[Answer] = field(default_factory=asyncio.Queue)
    attempt: int = 0  # the one under way, or the last
    deaths: int = 0  # of workers that had it
    shortages: int = 0  # of memory, while it ran beside others
    shown: int = 0  # previews
    worker: str | None = None
    memory: str | None = None  # the block lent for this attempt
    started: float | None = None  # for the first time
    ended: bool = False
    trace: Trace | None = None

    @property
    def id(self) -> str:
        return self.demand.id

    @property
    def alone(self) -> bool:
        """Whether it may only run with no other request beside it."""
        return self.deaths >= DEATHS_BEFORE_ALONE or self.shortages >= SHORTAGES_BEFORE_ALONE

    def answer(self, answer: Answer) -> None:
        if not self.ended:
            self.ended = not isinstance(answer, Preview)
            self.answers.put_nowait(answer)

    def job(self, now: float, packed: PackedPixels) -> Job:
        """What a worker is told of this attempt."""
        request = self.request
        blocks = list(packed.blocks)
        control = blocks.pop() if request.control is not None else None
        mask = blocks.pop() if request.mask is not None else None
        return Job(
            id=self.id,
            attempt=self.attempt,
            kind=request.kind.value,
            prompt=request.prompt,
            seed=request.seed,
            images=blocks,
            mask=mask,
            control=control,
            result=packed.result,
            negative_prompt=request.negative_prompt,
            size=request.size,
            steps=request.steps,
            guidance=request.guidance,
            strength=request.strength,
            template=request.template,
            lora=request.lora,
            previews=request.previews,
            seconds=None if self.demand.due == inf else max(0.0, self.demand.due - now),
            user=request.user,
            traced=self.trace is not None,
        )


def new_ticket(id: str, request: Request, card: Card, bytes: int, now: float) -> RequestTicket:
    """bytes: of its template's recording, where that is known."""
    due = inf if request.seconds is None else now + request.seconds
    demand = Demand(id, work_of(request, card, bytes), now, due, request.user)
    width, height = size_of(request.size, request.images, card)
    room = 0 if request.kind is RequestKind.RECORD else width * height * CHANNELS
    return RequestTicket(request, demand, room)
