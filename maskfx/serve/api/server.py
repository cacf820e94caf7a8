"""uvicorn, as this server needs it."""

from __future__ import annotations

import math
import os
import socket

import uvicorn
from starlette.types import ASGIApp

from maskfx.serve.api.protocol import Guarded
from maskfx.serve.settings import ServeSettings

BACKLOG = 2048  # connections that wait to be taken
TAKEN = 16  # of them at a time, or a thousand that come at once hold the loop for a second
KEEP_ALIVE = 30  # seconds without a request
HEAD = 32 << 10  # bytes of a request's head


class Server(uvicorn.Server):
    """asyncio has one number for what it takes at a time and for what may wait."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                with socket.socket(fileno=os.dup(listener.fileno())) as line:
                    line.listen(BACKLOG)


def make_server(app: ASGIApp, settings: ServeSettings) -> Server:
    """A server that isn't started; its sockets may be given to `serve`."""
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
