"""A connection that can't be held by being slow: uvicorn's protocol with deadlines.

Owns the time that a request's head may take and the time a client may leave its answer unread.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from uuid import uuid4

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from maskfx.serve.api.lingering import Lingering
from maskfx.serve.errors import ApiError
from maskfx.serve.settings import Limits

READS = 256 << 10  # bytes that a client must take of its answer in every interval


class Guarded(H11Protocol):
    """One connection; `limits` is set by a subclass, as uvicorn makes these itself."""

    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None
        self._unread = 0
        self._lingering: Lingering | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        limits = self.limits
        most, seconds = limits.body_bytes, limits.header_seconds
        self._lingering = Lingering(transport, self._body_unread, most, seconds)
        super().connection_made(self._lingering)
        send_at_once(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        assert self._lingering is not None
        if self._lingering.discards(data):
            return
        if self._head is None and self._awaits_head():
            self._expect_head()
        super().data_received(data)
        if self._head is not None and not self._awaits_head():
            self._head.cancel()
            self._head = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._reader):
            if timer is not None:
                timer.cancel()
        self._head = self._reader = None
        if self._lingering is not None:
            self._lingering.end()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What isn't HTTP gets our JSON too."""
        body = msgspec.json.encode(ApiError("malformed_body", msg).body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", uuid4().hex.encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    # The head of a request

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(self.limits.header_seconds, self._give_up)

    def _awaits_head(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _give_up(self) -> None:
        self._head = None
        self.transport.close()

    def _body_unread(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    # A client that doesn't read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def _watch_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._reader = self.loop.call_later(self.limits.reader_seconds, self._check_reader)

    def _check_reader(self) -> None:
        if self._unread - self.transport.get_write_buffer_size() < READS:
            self.transport.abort()
        else:
            self._watch_reader()


def send_at_once(transport: asyncio.Transport) -> None:
    """asyncio does so only for sockets that it opened itself; else each answer, which is a head
    and a body, waits 40 ms for an acknowledgement.
    """
    line = transport.get_extra_info("socket")
    if line is not None and line.family in (socket.AF_INET, socket.AF_INET6):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
