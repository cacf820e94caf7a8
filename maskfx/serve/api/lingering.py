"""How a connection closes whose body nobody read.

To close with bytes unread resets the connection, and the answer is lost on its way: so the
writing side closes first, and what still comes is thrown away for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LEAST = 2.0  # seconds


class Lingering(asyncio.Transport):
    """A transport that closes in two steps if a body is under way.

    `seconds`: so long a client may take to send it or to leave. A busy one may come to its body
    long after its answer is there; it costs no more than one that is slow with its head.
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
        """Whether data that came is of no use any more."""
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

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)
