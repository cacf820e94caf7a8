"""OpenTelemetry spans: one per request, with child spans for the queue and the worker's phases.

Imported only if `otlp_endpoint` is set; needs the extra `maskfx[otel]`.

All times are read from the monotonic clock, in the front end and in the workers: it is shared by
all processes of a machine (docs.python.org, time.monotonic: "always system-wide"). Each request
reads both clocks once, at its start, and converts its times to times of day by the difference, so
no duration depends on the wall clock.
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
NO_FAULT = ("stop", "cancelled")  # values of `finished_reason` that are no failures
TRACES = "/v1/traces"  # path below a collector's base URL, by the OTLP specification
CLOSE_SECONDS = 5.0  # timeout for sending the remaining spans
NANO = 10**9


def exporter_to(endpoint: str) -> SpanExporter:
    """Return an OTLP/HTTP exporter; OTEL_EXPORTER_OTLP_… variables set its other options."""
    base = endpoint.rstrip("/")
    return OTLPSpanExporter(base if base.endswith(TRACES) else base + TRACES)


class Tracing:
    """Creates the spans of one server; a background thread sends them."""

    def __init__(self, exporter: SpanExporter, wall: Callable[[], int] = time.time_ns) -> None:
        self._wall = wall
        service = os.environ.get("OTEL_SERVICE_NAME", "maskfx")
        resource = Resource.create({SERVICE_NAME: service, SERVICE_VERSION: maskfx.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("maskfx.serve", maskfx.__version__)

    def begin(self, request: Request, arrived: float) -> Trace | None:
        """Start a request's span, in the caller's trace if there is one; None if not sampled."""
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
        """Send the remaining spans, for at most `CLOSE_SECONDS` if the collector is unreachable."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class Trace:
    """The span of one request and its child spans."""

    def __init__(self, tracer: Tracer, span: Span, origin: int, arrived: float) -> None:
        """Initialize the trace of a request whose span has started.

        Args:
            tracer: Creates the child spans.
            span: The span of the request.
            origin: Nanoseconds of the wall clock at second 0 of the monotonic clock.
            arrived: Arrival of the request, in seconds of the monotonic clock.
        """
        self._tracer, self._span, self._origin = tracer, span, origin
        self._within = set_span_in_context(span)
        self._queued: float | None = arrived
        self._attempt: dict[str, str | int] = {}

    def started(self, worker: str, attempt: int, now: float) -> None:
        """Record the start of an attempt on a worker, which ends the time in the queue."""
        self._waited(now)
        self._attempt = {"maskfx.worker": worker, "maskfx.attempt": attempt}

    def stopped(self, now: float) -> None:
        """Record that the attempt ended by loss of the worker or memory: back in the queue."""
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
        """End the request's span; `reason` is the `finished_reason` label of the metrics."""
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
