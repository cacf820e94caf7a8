"""The ASGI middleware around the routes, outermost first: `Envelope`, `Auth`, `Seats`.

`Envelope` assigns an id to every call and turns every exception into a response. `Auth` checks the
API key, except on health routes. `Seats` acquires an admission slot (a "seat") before the body
is read, and limits the body's size and time.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import time
from uuid import uuid4

import structlog
from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maskfx.serve.config import Limits
from maskfx.serve.errors import ApiError
from maskfx.serve.frontend_protocol import Frontend
from maskfx.serve.http.failures import ClientGone, internal, response_of
from maskfx.serve.metrics import Metrics

log = structlog.get_logger(__name__)

# added to every response that doesn't set them
HEADERS = {b"x-content-type-options": b"nosniff", b"referrer-policy": b"no-referrer"}


class Envelope:
    """Adds `x-request-id`, closes connections with an unread body, sends errors, and logs."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        call = HttpCall(scope, receive, send)
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


class HttpCall:
    """The state of one HTTP call: id, start time, status of the response."""

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
        """Send an error, unless a response has started; then the connection ends prematurely."""
        if self.status is None:
            await response_of(error)(self.scope, self.receive, self.send)

    def log(self) -> None:
        """Log the call; successful GETs (probes, scrapes) at debug level, as they are frequent."""
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


OPEN = ("/health", "/health/live", "/health/ready")
SAME_SITE = (b"same-origin", b"none")


class InvalidKey(ApiError):
    """Raised if the API key is missing or wrong; `challenge` is the `WWW-Authenticate` header."""

    def __init__(self, challenge: str) -> None:
        super().__init__(
            "invalid_api_key",
            "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
        )
        self.challenge = challenge


class Auth:
    """Checks the API key, in constant time.

    Accepts the key as a bearer token, or as a password (Basic). Browsers resend Basic credentials
    automatically, so these are accepted only if `Sec-Fetch-Site` is same-origin or none.
    """

    def __init__(self, app: ASGIApp, key: SecretStr, page: frozenset[str] = frozenset()) -> None:
        self.app, self._page = app, page
        self._key = key.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN and not self._knows(scope):
            asks = "Basic realm=maskfx" if scope["path"] in self._page else "Bearer"
            raise InvalidKey(asks)
        await self.app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip()
        if scheme.lower() == b"basic":
            if headers.get(b"sec-fetch-site", b"none") not in SAME_SITE:
                return False
            given = _password(given)
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given, self._key)


def _password(given: bytes) -> bytes:
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


SEATED = ("/v1/images/edits", "/v1/images/generations", "/v1/templates", "/v1/adapters")


class Seats:
    """Acquires an admission slot for calls with a body, and releases it after the response."""

    def __init__(self, app: ASGIApp, frontend: Frontend, limits: Limits) -> None:
        self.app, self._frontend, self._limits = app, frontend, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in SEATED:
            await self.app(scope, receive, send)
            return
        with self._frontend.seat():
            await self.app(scope, Body(scope, receive, self._limits).receive, send)


class Body:
    """Wraps `receive` to enforce the maximum size and the deadline of a request's body."""

    def __init__(self, scope: Scope, receive: Receive, limits: Limits) -> None:
        self._receive, self._most = receive, limits.body_bytes
        self._seconds = limits.body_seconds
        self._deadline = time.monotonic() + limits.body_seconds
        self._seen, self._done = 0, False
        announced = dict(scope["headers"]).get(b"content-length")
        if announced is not None:
            self._check(int(announced))

    async def receive(self) -> Message:
        if self._done:
            return await self._receive()
        message = await self._in_time()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._seen += len(message.get("body", b""))
        self._check(self._seen)
        self._done = not message.get("more_body", False)
        return message

    async def _in_time(self) -> Message:
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                return await self._receive()
        except TimeoutError:
            raise ApiError(
                "request_timeout", f"The body was not complete after {self._seconds:g} s."
            ) from None

    def _check(self, size: int) -> None:
        if size > self._most:
            raise ApiError(
                "payload_too_large", f"The body is larger than the {self._most} bytes taken."
            )
