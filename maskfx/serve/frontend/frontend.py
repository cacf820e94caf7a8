"""`Front`: the interface of the HTTP layer to the rest of the server.

Owns admission slots ("seats"), templates, drain and shutdown. Used from one event loop.
`workers/supervisor.py` owns the worker processes, `dispatch.py` in-flight requests, `readiness.py`
the state of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import structlog

from maskfx.scheduling.load import Scheduler
from maskfx.scheduling.step_reports import Stepped
from maskfx.serve.config import ServeSettings
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend.adapter_names import AdapterNames
from maskfx.serve.frontend.ahead_recordings import AheadRecordings
from maskfx.serve.frontend.dispatch import CostModel, Dispatch
from maskfx.serve.frontend.readiness import LATER, Readiness, model_loading, queue_full
from maskfx.serve.frontend.stored_templates import StoredTemplates
from maskfx.serve.frontend.ticket import RequestTicket, new_ticket, picture_name
from maskfx.serve.frontend.worker_growth import WorkerGrowth
from maskfx.serve.frontend.worker_nodes import WorkerNodes
from maskfx.serve.logs import log_again
from maskfx.serve.messages import (
    Alive,
    Done,
    Failed,
    FromWorker,
    JobProgress,
    JobSpan,
    Logged,
    Ping,
    PreviewSent,
    Ready,
    Register,
    Stop,
    Unregister,
)
from maskfx.serve.metrics import CacheCounts, Metrics
from maskfx.serve.request import (
    AdapterInfo,
    Card,
    Finished,
    Health,
    Pictures,
    Pixels,
    Preview,
    Request,
    RequestKind,
    ServedModel,
    TemplateInfo,
)
from maskfx.serve.request_cost import card_of
from maskfx.serve.workers.executor import LOCAL, Executor
from maskfx.serve.workers.link import FrontLink
from maskfx.serve.workers.pixels import Part
from maskfx.serve.workers.supervisor import Workers

if TYPE_CHECKING:
    from maskfx.serve.frontend.tracing import Tracing  # its dependencies are optional

TICK_SECONDS = 0.1
PING_SECONDS = 1.0

log = structlog.get_logger(__name__)


class Front:
    """Implements `Frontend`."""

    def __init__(
        self,
        settings: ServeSettings,
        scheduler: Scheduler,
        costs: CostModel,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
        executor: Executor = LOCAL,
    ) -> None:
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._tracing = tracing
        self._adapters = AdapterNames(settings.lora_dir)
        self._link = FrontLink(self._heard, settings.limits.image_pixels, executor.listen)
        self._dispatch = Dispatch(scheduler, costs, self._link.send, metrics, clock)
        self._templates = StoredTemplates(settings.cache_dir, self._dispatch, self._link.send)
        recordings = settings.limits.recordings
        self._ahead = AheadRecordings(self._dispatch.pool, self._link.send, recordings)
        self.workers = Workers(
            settings,
            self._link.address,
            self._lost,
            metrics.worker_restarts_total.inc,
            clock,
            executor,
            self._link.remote,
        )
        self._nodes = WorkerNodes(metrics)
        self._growth = WorkerGrowth(
            settings, self.workers, self._dispatch, self._link.send, self._nodes
        )
        self._readiness = Readiness(settings, self.workers.hopeless)
        self._counts = CacheCounts(metrics, costs.observe_reads)
        self._seats = 0
        self._serial = 0
        self._deciding = False
        self._pinged = 0.0
        self._loop = asyncio.get_running_loop()
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the workers and return without waiting for them."""
        self.workers.start()
        self._ticking = self._loop.create_task(self._tick())

    async def until_ready(self) -> bool:
        """Wait until a worker is ready; return False if the supervisor gave up on all workers."""
        return await self._readiness.settled()

    # The `Frontend` protocol

    def seat(self) -> AbstractContextManager[None]:
        self._readiness.check()
        if max(self._seats, len(self._dispatch)) >= self._room:
            raise model_loading() if self._readiness.known is None else queue_full()
        return self._seated()

    async def serve(
        self, request: Request, pictures: Pictures
    ) -> AsyncGenerator[Preview | Finished, None]:
        ticket = self._enter(request, pictures)
        try:
            while not isinstance(answer := await ticket.answers.get(), Finished):
                if isinstance(answer, ApiError):
                    raise answer
                yield answer
            yield answer
        finally:
            self._dispatch.leave(ticket)
            self._decide_soon()

    def models(self) -> list[ServedModel]:
        found = self._readiness.model(len(self._dispatch.pool))
        return [replace(found, card=found.card and self._adapters.listed(found.card))]

    async def card(self, name: str | None, seconds: float | None) -> Card:
        return self._adapters.listed(await self._readiness.wait(name, seconds))

    def adapters(self) -> list[AdapterInfo]:
        return self._adapters.all()

    async def register_adapter(self, name: str) -> AdapterInfo:
        found = await asyncio.to_thread(self._adapters.register, name)
        for worker in self._dispatch.pool.mates:
            self._link.send(worker, Register(name))
        return found

    def remove_adapter(self, name: str) -> None:
        self._adapters.remove(name)
        for worker in self._dispatch.pool.mates:
            self._link.send(worker, Unregister(name))

    async def record(self, request: Request, pictures: Pictures) -> TemplateInfo:
        id = request.template or request.id
        if not pictures.images:
            message = "send the template's picture as image"
            raise ApiError("missing_parameter", message, param="image")
        self._templates.begin(id, pictures.images[0])
        recording = msgspec.structs.replace(request, kind=RequestKind.RECORD, template=id)
        try:
            async with contextlib.aclosing(self.serve(recording, pictures)) as answers:
                async for _ in answers:
                    pass
            leaf = self._templates.keep(id, pictures.images[0])
        except BaseException:  # disconnect, or no room left: no client could delete it
            self._templates.forget_recordings(id)
            raise
        return await self._templates.write(leaf)

    def record_ahead(self, request: Request, pictures: Pictures) -> None:
        self._ahead.start(request, pictures, self._readiness.card())

    def templates(self) -> list[TemplateInfo]:
        return self._templates.all()

    async def forget(self, template: str) -> None:
        await self._templates.forget(template)

    def template_picture(self, template: str) -> Pixels:
        return self._templates.picture(template)

    def health(self) -> Health:
        now, nodes = self._dispatch, self._nodes.counts()
        waiting, running = len(now.waiting), len(now.running)
        found = self._readiness.health(nodes, len(now.pool), waiting, running)
        counts = self._counts
        return replace(found, ranks=counts.ranks(), recordings=counts.recordings())

    def refused(self) -> bool:
        """Return True if all workers were given up because the model can't be loaded."""
        never = self._readiness.known is None
        return never and self.workers.refused and self.workers.hopeless()

    def metrics(self) -> bytes:
        return self._metrics.text()

    def count(self, metric: str, **labels: str) -> None:
        self._metrics.count(metric, **labels)

    # Shutdown

    def stop_taking(self) -> None:
        """Fail readiness and refuse new calls and those that wait for the model; others go on."""
        self._readiness.drain()
        self._ahead.cancel()

    async def drain(self, seconds: float) -> bool:
        """Wait for all admitted calls. Return False if they took longer than `seconds`."""
        self.stop_taking()
        until = self._clock() + seconds
        while self._seats or len(self._dispatch):
            if self._clock() > until:
                log.error("drain_timed_out", left=len(self._dispatch), seats=self._seats)
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self) -> None:
        """Stop the workers and fail all remaining requests."""
        self._readiness.close()
        if self._ticking is not None:
            self._ticking.cancel()
        self._dispatch.fail_all(lambda: ApiError("draining", "the server was stopped"))
        self.workers.stopping()
        for name in self.workers.names():
            self._link.send(name, Stop())
        await self.workers.ended()
        self._link.close()
        await asyncio.to_thread(self.workers.close)

    def abort(self) -> None:
        """Kill the workers and fail all requests without waiting."""
        self._readiness.close()
        self.workers.kill_all()
        if self._ticking is not None:
            self._ticking.cancel()
        self._dispatch.fail_all(lambda: ApiError("draining", "the server was stopped"))
        self._link.close()
        self.workers.close()

    # Requests

    @contextlib.contextmanager
    def _seated(self) -> Iterator[None]:
        self._seats += 1
        try:
            yield
        finally:
            self._seats -= 1

    @property
    def _room(self) -> int:
        """The maximum number of running and waiting requests."""
        return self.workers.count() * self._settings.max_num_seqs + self._settings.queue

    def _enter(self, request: Request, pictures: Pictures) -> RequestTicket:
        card = self._readiness.card()
        # one admitted call may add several requests; with no other calls, it is always accepted
        if len(self._dispatch) >= max(self._room, self._settings.limits.pictures):
            raise queue_full()
        if request.template is not None and request.kind is not RequestKind.RECORD:
            picture = self._templates.picture(request.template)
            if not pictures.images:
                pictures = replace(pictures, images=(picture,))
        self._serial += 1
        edited = self._edited(request, pictures)
        known = edited is not None and self._dispatch.pool.with_template(edited)
        name = request.template or (edited if known else None)
        bytes = self._dispatch.pool.size(name)
        id = f"{request.id}#{self._serial}"  # a client may use the same id twice
        ticket = new_ticket(id, request, pictures, card, bytes, self._clock(), name)
        ticket.picture = edited
        if self._tracing is not None:
            ticket.trace = self._tracing.begin(request, ticket.demand.arrived)
        self._dispatch.enter(ticket)
        self._decide_soon()
        return ticket

    def _edited(self, request: Request, pictures: Pictures) -> str | None:
        """Return the name of the recordings that an edit of a part reads or causes, if any."""
        plain = request.kind is RequestKind.EDIT and request.template is None
        part = pictures.mask is not None and not pictures.mask.all()
        return picture_name(pictures.images[0]) if plain and part and pictures.images else None

    # Scheduling, once per event loop iteration

    def _decide_soon(self) -> None:
        if not self._deciding:
            self._deciding = True
            self._loop.call_soon(self._decide)

    def _decide(self, *, tick: bool = False) -> None:
        self._deciding = False
        self._dispatch.decide(tick=tick)

    async def _tick(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # without ticks all requests would hang
                log.exception("tick_failed")
            await asyncio.sleep(TICK_SECONDS)

    def _look(self) -> None:
        self._link.listen()  # first: read heartbeats that arrived while this loop was busy
        if self._clock() - self._pinged >= min(PING_SECONDS, self._settings.heartbeat_seconds):
            self._pinged = self._clock()
            for name in self.workers.names():
                self._link.send(name, Ping())
        self.workers.tick()
        for name in self._dispatch.stuck(self._settings.stuck_seconds):
            self.workers.kill(name, "no step for too long")
        if self.workers.hopeless():
            self._readiness.give_up()
            why = "the workers died and none could be started again"
            self._dispatch.fail_all(lambda: ApiError("no_workers", why, retry_after=LATER))
        self._growth.look(self._clock())
        self._dispatch.decide(tick=True)

    # Workers

    def _lost(self, name: str) -> None:
        self._dispatch.lost(name)
        self._ahead.lost(name)
        self._counts.lost(name)
        self._nodes.left(name)
        self._decide_soon()

    def _heard(self, worker: str, message: FromWorker, parts: Sequence[Part]) -> None:
        if not self.workers.heard(worker):
            return  # from a process that was replaced, or not a worker of this server
        try:
            self._take(worker, message, parts)
        except (ValueError, OSError) as error:
            log.warning("message_dropped", worker=worker, error=str(error))
            if isinstance(message, Done):
                text = "the picture came back damaged"
                damaged = Failed(message.id, message.attempt, "generation_failed", text)
                self._dispatch.failed(worker, damaged)

    def _take(self, worker: str, message: FromWorker, parts: Sequence[Part]) -> None:
        match message:
            case Alive():
                self._counts.heard(worker, message.cache)
                self._dispatch.aside(worker, message.aside)
            case Logged():
                log_again(message.line)
            case JobProgress():
                self._dispatch.progress(worker, message)
            case Stepped():
                self._dispatch.stepped(worker, message)
            case JobSpan():
                self._dispatch.spell(worker, message)
            case PreviewSent():
                self._dispatch.preview(worker, message, parts)
            case Done() | Failed() if self._ahead.ended(message.id):
                pass  # no client waits for it
            case Done():
                self._dispatch.done(worker, message, parts)
                self._decide_soon()
            case Failed():
                self._dispatch.failed(worker, message)
                self._decide_soon()
            case Ready():
                self._joined(worker, message)

    def _joined(self, worker: str, ready: Ready) -> None:
        if self.workers.ready(worker):
            card = card_of(ready, self._settings.served_name)
            log.info("worker_ready", worker=worker, model=card.name, slots=ready.slots)
            self._readiness.loaded(card)
            self._nodes.joined(worker, ready.node)
            self._dispatch.joined(worker, ready.slots, ready.on_disk, ready.loads, ready.disk)
            self._templates.forget_unknown(ready.on_disk)
            self._decide_soon()
