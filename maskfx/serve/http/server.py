"""uvicorn with timeouts, so that a slow client can't hold a connection.

Owns the timeouts of a request's head and of a client that doesn't read its response, and the
closing of a connection with an unread body. Closing a socket with unread bytes resets the
connection, and the client may lose the response. So the write side is closed first, and incoming
data is discarded for a while.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from maskfx.serve.config import Limits, ServeSettings
from maskfx.serve.errors import ApiError

LEAST = 2.0  # seconds, minimum time between both steps of closing


class Lingering(asyncio.Transport):
    """A transport that closes in two steps if a request's body is incomplete.

    Args:
        transport: The transport to wrap.
        body_unread: Returns True if a body is incomplete.
        most: Maximum bytes to discard before the connection is aborted.
        seconds: Time for the client to send the body or to disconnect, at least `LEAST`. A busy
            client may start to send its body long after the response; waiting for it costs no
            more than for a client that is slow with its head.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        body_unread: Callable[[], bool],
        most: int,
        seconds: float,
    ) -> None:
        super().__init__()
        self._transport, self._body_unread, self._most = transport, body_unread, most
        self._seconds = max(LEAST, seconds)
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._timer is not None or self._transport.is_closing():
            return
        if not self._body_unread():
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds, self._transport.abort)

    def discards(self, data: bytes) -> bool:
        """Return True if received data is to be discarded, as the connection is closing."""
        if self._timer is None:
            return False
        self._most -= len(data)
        if self._most < 0:
            self._transport.abort()
        return True

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def pause_reading(self) -> None:
        if self._timer is None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._transport.write(data)

    def write_eof(self) -> None:
        self._transport.write_eof()

    def abort(self) -> None:
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)


READS = 256 << 10  # bytes of its response that a client must read in every interval


class Guarded(H11Protocol):
    """The protocol of one connection. uvicorn creates it, so a subclass sets `limits`."""

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
        """Answer invalid HTTP with the JSON of an ApiError."""
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

    # Timeout of a request's head

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(self.limits.header_seconds, self._give_up)

    def _awaits_head(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _give_up(self) -> None:
        self._head = None
        self.transport.close()

    def _body_unread(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    # Timeout of a client that doesn't read its response

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
    """Set TCP_NODELAY on a connection.

    asyncio sets it only on sockets that it opened; without it each response, sent as head and body,
    waits 40 ms for an acknowledgement.
    """
    line = transport.get_extra_info("socket")
    if line is not None and line.family in (socket.AF_INET, socket.AF_INET6):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


BACKLOG = 2048  # connections that wait to be accepted
TAKEN = 16  # connections accepted at a time; 1000 at once would block the event loop for a second
KEEP_ALIVE = 30  # seconds that an idle connection stays open
HEAD = 32 << 10  # maximum bytes of a request's head


class Server(uvicorn.Server):
    """A uvicorn server with a listen backlog of `BACKLOG`.

    asyncio uses one number for the backlog and for the connections accepted at a time.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                with socket.socket(fileno=os.dup(listener.fileno())) as line:
                    line.listen(BACKLOG)


def make_server(app: ASGIApp, settings: ServeSettings) -> Server:
    """Create a server without starting it; `serve` accepts open sockets."""
    protocol = type("Limited", (Guarded,), {"limits": settings.limits})
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="asyncio",
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=TAKEN,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout),
        h11_max_incomplete_event_size=HEAD,
    )
    return Server(config)
