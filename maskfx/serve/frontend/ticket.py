"""A request and its state in the front end, from arrival to answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

import xxhash

from maskfx.scheduling.load import Demand
from maskfx.serve.errors import ApiError
from maskfx.serve.messages import Job
from maskfx.serve.request import Card, Finished, Pictures, Pixels, Preview, Request, RequestKind
from maskfx.serve.request_cost import work_of
from maskfx.serve.workers.pixels import Part, part_of

if TYPE_CHECKING:
    from maskfx.serve.frontend.tracing import Trace  # its dependencies are optional

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
    answers: asyncio.Queue[Answer] = field(default_factory=asyncio.Queue)
    attempt: int = 0  # number of the current or last attempt
    deaths: int = 0  # workers that died while running it
    shortages: int = 0  # out-of-memory failures in a batch with others
    shown: int = 0  # previews sent
    worker: str | None = None
    started: float | None = None  # start of the first attempt
    ended: bool = False
    trace: Trace | None = None
    picture: str | None = None  # name of the recordings of the one that it edits
    bound: bool = False  # to a worker that has the recording: its model records no pictures

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

    def job(self, now: float) -> Job:
        """Return the message that starts this attempt on a worker."""
        pictures = self.pictures
        return Job(
            id=self.id,
            attempt=self.attempt,
            request=self.request,
            images=[image.shape for image in pictures.images],
            mask=None if pictures.mask is None else pictures.mask.shape,
            controls=[image.shape for image in pictures.controls],
            shown=[image.shape for image in pictures.shown],
            left=None if self.demand.due == inf else max(0.0, self.demand.due - now),
            traced=self.trace is not None,
        )

    def parts(self) -> list[Part]:
        """Return the pixels that follow the job."""
        return [part_of(array) for array in self.pictures.arrays()]


def picture_name(pixels: Pixels) -> str:
    """Return the name of a picture's recordings; no client can give a template this."""
    return f"picture {xxhash.xxh3_128_hexdigest(part_of(pixels))}"


def new_ticket(
    id: str,
    request: Request,
    pictures: Pictures,
    card: Card,
    bytes: int,
    now: float,
    template: str | None = None,
) -> RequestTicket:
    """Create the ticket of a request.

    Args:
        id: Unique in this server.
        request: The request.
        pictures: Its input images.
        card: The model that serves the request.
        bytes: Size of the template's recording; 0 if unknown.
        now: Time of arrival, by the monotonic clock.
        template: Name of the recording that it reads; defaults to that in the request.
    """
    due = inf if request.seconds is None else now + request.seconds
    work = work_of(request, pictures, card, bytes)
    work = work if template is None else replace(work, template=template)
    demand = Demand(id, work, now, due, request.user)
    bound = request.kind is RequestKind.EDIT and "template" not in card.takes
    return RequestTicket(request, pictures, demand, bound=bound)
