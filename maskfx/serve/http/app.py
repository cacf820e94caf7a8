"""Builds the HTTP app from its middleware and routes. Outermost first:

Envelope    adds the request id, turns every exception into a response
Auth        checks the API key; where there is none, Origins checks `Host` and `Origin`
Seats       acquires an admission slot (a "seat"), then enforces the limits of the body
routes      forms -> orders -> images -> JSON or server-sent events
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

import maskfx
from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.config import ServeSettings
from maskfx.serve.frontend_protocol import Frontend
from maskfx.serve.http.dependencies import AppContext
from maskfx.serve.http.failures import handle
from maskfx.serve.http.forms import forms
from maskfx.serve.http.idempotency import Idempotency
from maskfx.serve.http.middleware import Auth, Envelope, Seats
from maskfx.serve.http.openapi import describe
from maskfx.serve.http.orders import Orders
from maskfx.serve.http.origins import Origins
from maskfx.serve.http.routes import adapters, images, page, status, templates
from maskfx.serve.metrics import Metrics


def create_app(
    frontend: Frontend,
    settings: ServeSettings,
    metrics: Metrics,
    *,
    pages: Path = page.FOLDER,
) -> FastAPI:
    """Create the HTTP app.

    Args:
        frontend: Serves the requests.
        settings: Settings of the server. `codecs` processes run during the app's lifespan.
        metrics: Metrics of the server.
        pages: Folder of the static files of the web page.
    """
    codecs = Codecs(settings.codecs)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with codecs:
            yield

    app = FastAPI(
        title="maskfx",
        version=maskfx.__version__,
        lifespan=lifespan,
        docs_url=None,  # the built-in pages load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = AppContext(
        frontend=frontend,
        settings=settings,
        codecs=codecs,
        forms=forms(settings.limits),
        orders=Orders(frontend, codecs, settings.limits),
        kept=Idempotency(),
    )
    for room in (images, templates, adapters, status):
        app.include_router(room.router)
    shown = page.Page(pages)
    shown.add_to(app)
    handle(app)
    describe(app, app.state.context.forms, settings)

    # the last middleware added is the outermost
    app.add_middleware(Seats, frontend=frontend, limits=settings.limits)
    if settings.api_key is None:
        hosts, origins = settings.allowed_hosts, settings.allowed_origins
        app.add_middleware(Origins, hosts=hosts, origins=origins)
    else:
        app.add_middleware(Auth, key=settings.api_key, page=shown.paths)
    app.add_middleware(Envelope, metrics=metrics)
    return app
