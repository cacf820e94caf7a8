"""A seat before a body is read, and a body within its size and time."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maskfx.serve.api.failures import ClientGone
from maskfx.serve.errors import ApiError
from maskfx.serve.request import Frontend
from maskfx.serve.settings import Limits

SEATED = ("/v1/images/edits", "/v1/images/generations", "/v1/templates")


class Admission:
    """Takes a seat for calls that make pictures and holds it until they are answered."""

    def __init__(self, app: ASGIApp, frontend: Frontend, limits: Limits) -> None:
        self.app, self._frontend, self._limits = app, frontend, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in SEATED:
            await self.app(scope, receive, send)
            return
        with self._frontend.seat():
            await self.app(scope, Body(scope, receive, self._limits).receive, send)


class Body:
    """A request's body: its bytes are counted, and all are here before its deadline."""

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
