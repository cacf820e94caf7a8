"""Dispatch: the queue of waiting requests, their assignment to workers, retries and results.

Each request is held until it is answered, whatever happens to workers. If a worker dies, its
requests return to the head of the queue, at most twice each. A request that was on two workers that
died runs alone from then on: if it is the cause, no other request fails with it; if not, it still
gets its image. The same applies to a request that ran out of memory three times; each time, the
worker's batch limit is halved. Late messages of an earlier attempt are dropped. Used from one event
loop. The clock is injected through the constructor and is never the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Protocol

import msgspec
import structlog

from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.load import Scheduler, StepCosts, Work, Worker
from maskfx.scheduling.step_reports import LoadFacts, Stepped
from maskfx.serve.errors import CODES, ApiError
from maskfx.serve.frontend.ticket import TRIES, RequestTicket, picture_name
from maskfx.serve.frontend.worker_pool import WorkerPool, WorkerState
from maskfx.serve.messages import (
    Cancel,
    Done,
    Failed,
    JobProgress,
    JobSpan,
    Prefetch,
    PreviewSent,
    ToWorker,
)
from maskfx.serve.metrics import Metrics
from maskfx.serve.request import Finished, Preview, RequestKind
from maskfx.serve.workers.pixels import Part, read

READ_AHEAD = 8  # waiting requests whose templates are read from disk meanwhile, at most
RETRY_SECONDS = 1.0  # Retry-After where waiting may help

log = structlog.get_logger(__name__)


class CostModel(StepCosts, Protocol):
    """Predicts step costs and updates the predictions from measurements."""

    def observe(self, stepped: Stepped, loaded: int = 0) -> None: ...

    def observe_around(self, work: Work, seconds: float) -> None: ...

    def learn_loads(self, facts: LoadFacts) -> None: ...

    def observe_reads(self, nbytes: int, seconds: float) -> None: ...


class Send(Protocol):
    """Sends a message to a worker; returns False if the worker is unreachable."""

    def __call__(self, worker: str, message: ToWorker, parts: Sequence[Part] = ()) -> bool: ...


class Dispatch:
    """Owns the tickets of all waiting and running requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        costs: CostModel,
        send: Send,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._costs, self._send = scheduler, costs, send
        self._metrics, self._clock = metrics, clock
        self.pool = WorkerPool()
        self.waiting: dict[str, RequestTicket] = {}
        self.running: dict[str, RequestTicket] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def serves(self, template: str) -> bool:
        """Return True if a waiting or running request uses the template."""
        tickets = [*self.waiting.values(), *self.running.values()]
        return any(ticket.request.template == template for ticket in tickets)

    # Adding and removing requests

    def enter(self, ticket: RequestTicket) -> None:
        self.waiting[ticket.id] = ticket

    def leave(self, ticket: RequestTicket) -> None:
        """Cancel a request whose client disconnected; no effect if it has been answered."""
        if ticket.ended:
            return
        ticket.ended = True
        self._count(ticket, "cancelled")
        if self.waiting.pop(ticket.id, None) is None:
            worker = self._stop(ticket)
            if worker is not None:
                self._send(worker, Cancel(ticket.id))

    def fail_all(self, error: Callable[[], ApiError]) -> None:
        for ticket in [*self.waiting.values(), *self.running.values()]:
            self._end(ticket, error())

    # Adding and removing workers

    def joined(
        self,
        name: str,
        slots: int,
        on_disk: Mapping[str, int] | None = None,
        loads: LoadFacts | None = None,
        disk: str = "",
    ) -> None:
        self.pool.join(name, max(1, slots), self._clock(), disk)
        if loads is not None:
            self._costs.learn_loads(loads)
        for template, nbytes in (on_disk or {}).items():
            self.pool.warmed(name, template, {"disk": nbytes})

    def lost(self, name: str) -> None:
        """Remove a worker that died and requeue its requests; fail those on their last try."""
        self.pool.leave(name)
        mine = [ticket for ticket in self.running.values() if ticket.worker == name]
        for ticket in mine:
            ticket.deaths += 1
            if ticket.deaths >= TRIES:
                message = f"workers died {ticket.deaths} times while they made this picture"
                self._fail(ticket, ApiError("worker_lost", message))
        self._again([ticket for ticket in mine if not ticket.ended])

    def stuck(self, seconds: float) -> list[str]:
        """Return the names of workers with requests but no progress for `seconds`."""
        now = self._clock()
        return [
            mate.name
            for mate in self.pool.mates.values()
            if mate.load.running and now - mate.moved > seconds
        ]

    # Starting requests on workers

    def decide(self, *, tick: bool = False) -> None:
        """Start and drop waiting requests. Call after each change of requests or workers.

        Args:
            tick: The call is periodic: also drop requests past their deadline, and run the
                scheduler even if no worker has a free slot.
        """
        now = self._clock()
        if tick:
            self._expire(now)
        kept = self._start_alone(now)
        workers = [w for w in self.pool.open() if kept is None or w.name != kept.name]
        demands = [ticket.demand for ticket in self.waiting.values() if not ticket.alone]
        if demands and workers and (tick or any(worker.free > 0 for worker in workers)):
            decision = self._scheduler.decide(now, demands, workers)
            for demand in decision.drops:
                self._drop(self.waiting[demand.id], "it can't be in time any more")
            for demand, name in decision.starts:
                ticket = self.waiting[demand.id]
                mate = self.pool.holder(demand.work.template, name) if ticket.bound else name
                if mate is not None:
                    self._start(ticket, self.pool.mates[mate], now)
        self._read_ahead()
        self._metrics.num_requests_running.set(len(self.running))
        self._metrics.num_requests_waiting.set(len(self.waiting))

    def _read_ahead(self) -> None:
        """Have the templates of waiting requests read from disk, by the least busy worker.

        The router prefers a worker that has a template in memory.
        """
        for ticket in islice(self.waiting.values(), READ_AHEAD):
            template = ticket.request.template
            if template is None or ticket.request.kind is RequestKind.RECORD:
                continue
            name = self.pool.reader(template)
            if name is not None and self._send(name, Prefetch(template)):
                self.pool.read(name, template)

    def _start_alone(self, now: float) -> Worker | None:
        """Start the requests that must run alone.

        Returns the worker to reserve for the next of them, if that one could not start.
        """
        while (ticket := self._next_alone()) is not None:
            mate = self.pool.emptiest()
            if mate is None or mate.load.running:
                return None if mate is None else mate.load
            if not self._start(ticket, mate, now):
                return mate.load
        return None

    def _next_alone(self) -> RequestTicket | None:
        return next((ticket for ticket in self.waiting.values() if ticket.alone), None)

    def _start(self, ticket: RequestTicket, mate: WorkerState, now: float) -> bool:
        ticket.attempt += 1
        if not self._send(mate.name, ticket.job(now), ticket.parts()):
            ticket.attempt -= 1  # the worker is dying and has not seen this attempt
            return False
        del self.waiting[ticket.id]
        self.running[ticket.id] = ticket
        ticket.worker = mate.name
        if ticket.started is None:
            ticket.started = now
            self._metrics.request_queue_time_seconds.observe(now - ticket.demand.arrived)
        if ticket.trace is not None:
            ticket.trace.started(mate.name, ticket.attempt, now)
        mate.start(ticket.demand, now, ticket.alone)
        return True

    def _expire(self, now: float) -> None:
        for ticket in [*self.waiting.values(), *self.running.values()]:
            if ticket.demand.due < now:
                self._drop(ticket, "its time is over")

    def _drop(self, ticket: RequestTicket, why: str) -> None:
        wanted = f"within {ticket.request.seconds:g} s" if ticket.request.seconds else "in time"
        message = f"the picture was wanted {wanted}: {why}; allow more time, or send it later"
        self._end(ticket, ApiError("deadline_exceeded", message, retry_after=RETRY_SECONDS))

    # Messages from workers

    def stepped(self, worker: str, stepped: Stepped) -> None:
        mate = self.pool.mates.get(worker)
        if mate is None:
            return
        mate.stepped(self._clock(), stepped.seconds)
        batch = [running.demand.work for running in mate.load.running]
        loaded = mate.loaded(batch) if fits(batch, stepped) else 0
        # several groups of a worker's requests step at the same time: it is as fast as all of them
        occupied = msgspec.structs.replace(stepped, seconds=stepped.occupied)
        self._costs.observe(occupied, loaded)
        self._metrics.step_latency_seconds.observe(stepped.seconds)
        self._metrics.steps_total.labels(degree=str(stepped.degree)).inc()
        self._metrics.batch_active_sites.observe(stepped.sites)
        self._metrics.plan_bubble_seconds.observe(stepped.bubble)

    def progress(self, worker: str, said: JobProgress) -> None:
        ticket = self._current(worker, said.id, said.attempt)
        if ticket is not None:
            left = ticket.demand.work.computed(said.steps - said.step)
            self.pool.mates[worker].moved_on(said.id, left, self._clock())

    def aside(self, worker: str, ids: Sequence[str]) -> None:
        """Note which requests wait for an adapter, or for another one's recording.

        They take no part in steps, so they keep no other request from starting.
        """
        mate = self.pool.mates.get(worker)
        if mate is not None:
            mate.aside = set(ids)

    def spell(self, worker: str, said: JobSpan) -> None:
        ticket = self._current(worker, said.id, said.attempt)
        if ticket is not None and ticket.trace is not None:
            here = said.shifted(self._clock(), relative=False) if said.relative else said
            ticket.trace.spent(here)

    def preview(self, worker: str, said: PreviewSent, parts: Sequence[Part]) -> None:
        ticket = self._current(worker, said.id, said.attempt)
        if ticket is not None and said.index >= ticket.shown:
            ticket.shown = said.index + 1  # a retry sends no preview twice
            ticket.answer(Preview(said.index, read(said.pixels, iter(parts))))

    def done(self, worker: str, said: Done, parts: Sequence[Part]) -> None:
        """Answer a request with its image; late duplicates are dropped."""
        ticket = self._current(worker, said.id, said.attempt)
        if ticket is None:
            return
        now, request = self._clock(), ticket.request
        if said.template is not None and said.template == request.template:
            # no request can refer to a recording under a name that no client gave it
            self.pool.warmed(worker, said.template, said.template_bytes)
        if said.pixels is not None:
            pixels = read(said.pixels, iter(parts))
        elif request.kind is RequestKind.RECORD and ticket.pictures.images:
            pixels = ticket.pictures.images[0]
        else:
            raise ValueError("a picture without pixels")
        made = request.kind is RequestKind.GENERATE and said.template is not None
        picture = picture_name(pixels) if made else ticket.picture
        if picture is not None:  # its next edit finds what this worker has or will record
            self.pool.warmed_in_memory(worker, picture, said.template_bytes)
        mate = self.pool.mates[worker]
        mate.made()
        around = mate.around(ticket.id, now)
        if around is not None and request.kind is not RequestKind.RECORD:
            self._costs.observe_around(ticket.demand.work, around)
        self._stop(ticket)
        arrived, started = ticket.demand.arrived, ticket.started or now
        if now <= ticket.demand.due < inf:
            self._metrics.slo_attained_total.inc()
        self._metrics.mask_ratio.observe(said.mask_ratio)
        if ticket.trace is not None:
            ticket.trace.made(said)
        self._count(ticket, "stop")
        ticket.answer(
            Finished(
                pixels=pixels,
                seconds=now - arrived,
                queued=started - arrived,
                steps=said.steps,
                mask_ratio=said.mask_ratio,
                patch_share=said.patch_share,
                dense_seconds=self._dense(ticket.demand.work, said.steps),
                tries=ticket.attempt,
                worker=worker,
            )
        )

    def failed(self, worker: str, said: Failed) -> None:
        ticket = self._current(worker, said.id, said.attempt)
        if ticket is None:
            return
        if said.code == "out_of_memory":
            self._short(ticket, self.pool.mates[worker])
            return
        code = said.code if said.code in CODES else "generation_failed"
        again = RETRY_SECONDS if CODES[code][0] in (429, 503) else None
        self._fail(ticket, ApiError(code, said.message, param=said.param, retry_after=again))

    def _short(self, ticket: RequestTicket, mate: WorkerState) -> None:
        """Handle an out-of-memory failure: requeue for a smaller batch, or fail if it ran alone."""
        batch = mate.short()
        if batch <= 1:
            message = "there isn't memory enough for this picture: make it smaller"
            self._fail(ticket, ApiError("out_of_memory", message, retry_after=10.0))
            return
        log.warning("worker_short_of_memory", worker=mate.name, batch=batch)
        ticket.shortages += 1
        self._again([ticket])

    def _current(self, worker: str, id: str, attempt: int) -> RequestTicket | None:
        """Return the ticket that a message is for, or None if the message is late."""
        ticket = self.running.get(id)
        if ticket is None or ticket.attempt != attempt or ticket.worker != worker:
            return None
        return ticket

    def _dense(self, work: Work, steps: int) -> float:
        """Return the predicted seconds of the request with all sites computed."""
        dense = Work(work.whole, work.whole, steps, work.branches, kind=StepKind.DENSE)
        return self._costs.around(dense) + steps * self._costs.step([dense])

    # Ending requests

    def _again(self, tickets: Sequence[RequestTicket]) -> None:
        """Requeue requests at the head of the queue, in order of arrival."""
        for ticket in tickets:
            self._stop(ticket)
            if ticket.trace is not None:
                ticket.trace.stopped(self._clock())
        first = sorted(tickets, key=lambda ticket: ticket.demand.arrived)
        self.waiting = {ticket.id: ticket for ticket in [*first, *self.waiting.values()]}

    def _stop(self, ticket: RequestTicket) -> str | None:
        """Free the slot of a request; return its worker's name, if any."""
        worker, ticket.worker = ticket.worker, None
        self.running.pop(ticket.id, None)
        if worker in self.pool.mates:
            self.pool.mates[worker].end(ticket.id)
        return worker

    def _end(self, ticket: RequestTicket, error: ApiError) -> None:
        """Fail a request and cancel it on its worker."""
        worker = ticket.worker
        self._fail(ticket, error)
        if worker is not None:
            self._send(worker, Cancel(ticket.id))

    def _fail(self, ticket: RequestTicket, error: ApiError) -> None:
        self.waiting.pop(ticket.id, None)
        self._stop(ticket)
        self._count(ticket, error.code)
        ticket.answer(error)

    def _count(self, ticket: RequestTicket, reason: str) -> None:
        now = self._clock()
        self._metrics.request_success_total.labels(finished_reason=reason).inc()
        self._metrics.e2e_request_latency_seconds.observe(now - ticket.demand.arrived)
        if ticket.trace is not None:
            ticket.trace.ended(reason, now)


def fits(batch: Sequence[Work], stepped: Stepped) -> bool:
    """Return True if the step's size matches the batch, so that it loaded what the batch loads.

    An edit of a new image first records the image with all sites, in steps that don't match.
    """
    wanted = sum(work.sites * work.branches for work in batch)
    return len(batch) == len(stepped.members) and wanted <= 2 * stepped.sites <= 4 * wanted
