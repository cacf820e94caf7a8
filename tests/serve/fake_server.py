"""The HTTP front before a fake frontend, as a process of its own: `python -m` prints its port.

With every line that it reads it prints its longest stall of the event loop since the last one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time

import structlog

from maskfx.serve.config import ServeSettings
from maskfx.serve.http import create_app, make_server
from maskfx.serve.metrics import Metrics
from tests.serve.fake_frontend import FakeFrontend

TICK = 0.005


class Lag:
    """How late the loop's ticks come."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def watch(self) -> None:
        while True:
            due = time.monotonic() + TICK
            await asyncio.sleep(TICK)
            self.late.append(time.monotonic() - due)

    async def tell(self) -> None:
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while await lines.readline():
            late, self.late = sorted(self.late), []
            print(late[int(len(late) * 0.99)], late[-1], flush=True)


async def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    metrics = Metrics()
    frontend = FakeFrontend(metrics)
    frontend.step = float(sys.argv[1])
    frontend.most_seats = 2000
    settings = ServeSettings(codecs=int(sys.argv[2]))
    server = make_server(create_app(frontend, settings, metrics), settings)
    lag = Lag()
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as line:
        serving = asyncio.create_task(server.serve(sockets=[line]))
        while not server.started:
            await asyncio.sleep(0.01)
        print(line.getsockname()[1], flush=True)
        others = [asyncio.create_task(work) for work in (lag.watch(), lag.tell())]
        await serving
        for other in others:
            other.cancel()


if __name__ == "__main__":
    asyncio.run(main())
