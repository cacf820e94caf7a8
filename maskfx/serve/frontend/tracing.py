"""Spans of OpenTelemetry: one for each request, and within it what its time went to.

Only where `otlp_endpoint` is set is this imported; what it needs is the extra `maskfx[otel]`.

Times are of the monotonic clock, the front's and the workers' alike: it is one for all processes of
a machine (docs.python.org, time.monotonic: "always system-wide"). Each request reads both clocks
once, when it begins, and by that its times become times of day. So no duration is the wall clock's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import maskfx
from maskfx.serve.messages import Done, JobSpan
from maskfx.serve.request import Request, RequestKind

NAMES = {
    RequestKind.EDIT: "image_edit",
    RequestKind.GENERATE: "image_generation",
    RequestKind.RECORD: "template",
}
NO_FAULT = ("stop", "cancelled")  # how requests end that didn't fail
TRACES = "/v1/traces"  # below a collector's base URL, says OTLP
CLOSE_SECONDS = 5.0  # for what isn't sent yet
NANO = 10**9


def exporter_to(endpoint: str) -> SpanExporter:
    """Sends by OTLP over HTTP. Everything else is told by OTEL_EXPORTER_OTLP_… variables."""
    base = endpoint.rstrip("/")
    return OTLPSpanExporter(base if base.endswith(TRACES) else base + TRACES)


class Tracing:
    """The spans of one server. They are sent by a thread of their own."""

    def __init__(self, exporter: SpanExporter, wall: Callable[[], int] = time.time_ns) -> None:
        self._wall = wall
        service = os.environ.get("OTEL_SERVICE_NAME", "maskfx")
        resource = Resource.create({SERVICE_NAME: service, SERVICE_VERSION: maskfx.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("maskfx.serve", maskfx.__version__)

    def begin(self, request: Request, arrived: float) -> Trace | None:
        """A request's span, in its caller's trace if it has one; None if it isn't sampled."""
        now = self._wall()
        span = self._tracer.start_span(
            NAMES[request.kind],
            TraceContextTextMapPropagator().extract(request.trace or {}),
            SpanKind.SERVER,
            {"maskfx.request_id": request.id},
            start_time=now,
        )
        if not span.is_recording():
            return None
        return Trace(self._tracer, span, now - round(arrived * NANO), arrived)

    def close(self) -> None:
        """Send what there is; a collector that can't be reached doesn't hold the end up."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class Trace:
    """One request's span, and those within it."""

    def __init__(self, tracer: Tracer, span: Span, origin: int, arrived: float) -> None:
        """`origin`: the wall clock's nanoseconds at the monotonic clock's second 0."""
        self._tracer, self._span, self._origin = tracer, span, origin
        self._within = set_span_in_context(span)
        self._queued: float | None = arrived
        self._attempt: dict[str, str | int] = {}

    def started(self, worker: str, attempt: int, now: float) -> None:
        """A worker has it: it doesn't wait any more."""
        self._waited(now)
        self._attempt = {"maskfx.worker": worker, "maskfx.attempt": attempt}

    def stopped(self, now: float) -> None:
        """Its worker is lost, or was short of memory: it waits again."""
        self._span.add_event("begin_again", self._attempt, self._at(now))
        self._queued, self._attempt = now, {}

    def spent(self, spell: JobSpan) -> None:
        name = spell.name if spell.number is None else f"{spell.name}[{spell.number}]"
        self._child(name, spell.began, spell.ended)

    def made(self, done: Done) -> None:
        self._span.set_attribute("maskfx.steps", done.steps)
        self._span.set_attribute("maskfx.mask_ratio", done.mask_ratio)
        self._span.set_attribute("maskfx.tries", done.attempt)

    def ended(self, reason: str, now: float) -> None:
        """Its picture is there, or it got none; `reason` is the metrics' `finished_reason`."""
        self._waited(now)
        self._span.set_attribute("maskfx.finished_reason", reason)
        if reason not in NO_FAULT:
            self._span.set_status(Status(StatusCode.ERROR, reason))
        self._span.end(self._at(now))

    def _waited(self, now: float) -> None:
        if self._queued is not None:
            self._child("queue", self._queued, now)
            self._queued = None

    def _child(self, name: str, began: float, ended: float) -> None:
        start = self._at(began)
        child = self._tracer.start_span(
            name, self._within, attributes=self._attempt, start_time=start
        )
        child.end(self._at(ended))

    def _at(self, seconds: float) -> int:
        return self._origin + round(seconds * NANO)
