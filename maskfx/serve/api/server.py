"""uvicorn, as this server needs it."""

from __future__ import annotations

import math

import uvicorn
from starlette.types import ASGIApp

from maskfx.serve.api.protocol import Guarded
from maskfx.serve.settings import ServeSettings

BACKLOG = 2048  # connections that wait to be taken
KEEP_ALIVE = 30  # seconds without a request
HEAD = 32 << 10  # bytes of a request's head


def make_server(app: ASGIApp, settings: ServeSettings) -> uvicorn.Server:
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
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout),
        h11_max_incomplete_event_size=HEAD,
    )
    return uvicorn.Server(config)
