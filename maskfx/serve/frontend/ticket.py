"""A request and its state in the front end, from arrival to answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from maskfx.serve.errors import ApiError
from maskfx.serve.messages import Job
from maskfx.serve.request import Card, Finished, Pictures, Preview, Request, RequestKind
from maskfx.serve.scheduling.load import Demand
from maskfx.serve.scheduling.request_cost import size_of, work_of
from maskfx.serve.workers.shared_memory import PackedPixels

if TYPE_CHECKING:
    from maskfx.serve.frontend.tracing import Trace  # its dependencies are optional

CHANNELS = 3
TRIES = 3  # attempts of a request whose workers die: the first and two retries
DEATHS_BEFORE_ALONE = 2  # it may be the cause: protect other requests
SHORTAGES_BEFORE_ALONE = 3  # the batch limit is halved each time

Answer = Preview | Finished | ApiError


@dataclass(eq=False)
class RequestTicket:
    """Everything needed to run a request again, and the queue of its answers."""

    request: Request
    pictures: Pictures
    demand: Demand
    room: int = 0  # expected bytes of the resulting image
    answers: asyncio.Queue[Answer] = field(default_factory=asyncio.Queue)
    attempt: int = 0  # number of the current or last attempt
    deaths: int = 0  # workers that died while running it
    shortages: int = 0  # out-of-memory failures in a batch with others
    shown: int = 0  # previews sent
    worker: str | None = None
    memory: str | None = None  # name of the shared-memory block of this attempt
    started: float | None = None  # start of the first attempt
    ended: bool = False
    trace: Trace | None = None

    @property
    def id(self) -> str:
        return self.demand.id

    @property
    def alone(self) -> bool:
        """Whether the request must run in a batch of one."""
        return self.deaths >= DEATHS_BEFORE_ALONE or self.shortages >= SHORTAGES_BEFORE_ALONE

    def answer(self, answer: Answer) -> None:
        if not self.ended:
            self.ended = not isinstance(answer, Preview)
            self.answers.put_nowait(answer)

    def job(self, now: float, packed: PackedPixels) -> Job:
        """Return the message that starts this attempt on a worker."""
        blocks = list(packed.blocks)  # of `Pictures.arrays`
        control = blocks.pop() if self.pictures.control is not None else None
        mask = blocks.pop() if self.pictures.mask is not None else None
        return Job(
            id=self.id,
            attempt=self.attempt,
            request=self.request,
            images=blocks,
            mask=mask,
            control=control,
            result=packed.result,
            left=None if self.demand.due == inf else max(0.0, self.demand.due - now),
            traced=self.trace is not None,
        )


def new_ticket(
    id: str, request: Request, pictures: Pictures, card: Card, bytes: int, now: float
) -> RequestTicket:
    """Create the ticket of a request.

    Args:
        id: Unique in this server.
        request: The request.
        pictures: Its input images.
        card: The model that serves the request.
        bytes: Size of the template's recording; 0 if unknown.
        now: Time of arrival, by the monotonic clock.
    """
    due = inf if request.seconds is None else now + request.seconds
    demand = Demand(id, work_of(request, pictures, card, bytes), now, due, request.user)
    width, height = size_of(request.size, pictures.images, card)
    room = 0 if request.kind is RequestKind.RECORD else width * height * CHANNELS
    return RequestTicket(request, pictures, demand, room)
