"""The outermost layer: an id for every call, and an answer whatever happened inside."""

from __future__ import annotations

import logging
import time
from uuid import uuid4

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maskfx.serve.api.failures import ClientGone, internal, response_of
from maskfx.serve.errors import ApiError
from maskfx.serve.metrics import Metrics

log = structlog.get_logger(__name__)

# of every answer; a page's own come first
HEADERS = {b"x-content-type-options": b"nosniff", b"referrer-policy": b"no-referrer"}


class Envelope:
    """Adds `x-request-id`, closes where a body stays unread, tells what failed, logs."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        call = Call(scope, receive, send)
        try:
            await self.app(scope, call.receive, call.send)
        except ClientGone:
            self.metrics.http_requests_client_disconnected_total.inc()
            call.status = 499
        except ApiError as error:
            await call.fail(error)
        except Exception as error:
            await call.fail(internal(error, call.id))
        finally:
            call.log()


class Call:
    """One request and what was answered so far."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.id, self.started = uuid4().hex, time.monotonic()
        self.scope, self._receive, self._send = scope, receive, send
        self.status: int | None = None
        self._unread = _has_body(scope)
        scope.setdefault("state", {}).update(call_id=self.id, arrived=self.started)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._unread = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            named = {name for name, _ in headers}
            headers += [pair for pair in HEADERS.items() if pair[0] not in named]
            headers.append((b"x-request-id", self.id.encode()))
            if self._unread:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Say it, unless an answer is under way: then the connection just ends short."""
        if self.status is None:
            await response_of(error)(self.scope, self.receive, self.send)

    def log(self) -> None:
        """Probes and scrapes come every few seconds: they don't fill a log."""
        quiet = self.scope["method"] == "GET" and self.status == 200
        log.log(
            logging.DEBUG if quiet else logging.INFO,
            "call",
            request_id=self.id,
            method=self.scope["method"],
            path=self.scope["path"],
            status=self.status,
            seconds=round(time.monotonic() - self.started, 4),
        )


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
