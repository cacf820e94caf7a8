"""The HTTP app: its layers and routes, in one place.

Envelope    an id, and an answer whatever happens
Auth        the key
Admission   a seat, then a body within its limits
routes      forms -> orders -> pictures -> answers or events
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

import maskfx
from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.config import ServeSettings
from maskfx.serve.http.dependencies import AppContext
from maskfx.serve.http.failures import handle
from maskfx.serve.http.idempotency import Idempotency
from maskfx.serve.http.middleware import Admission, Auth, Envelope
from maskfx.serve.http.openapi import describe
from maskfx.serve.http.orders import Orders
from maskfx.serve.http.routes import images, page, status, templates
from maskfx.serve.http.schemas import tables
from maskfx.serve.metrics import Metrics
from maskfx.serve.request import Frontend


def create_app(
    frontend: Frontend,
    settings: ServeSettings,
    metrics: Metrics,
    *,
    pages: Path = page.FOLDER,
) -> FastAPI:
    """Everything between the socket and the frontend. Codec processes live as long as it does."""
    codecs = Codecs(settings.codecs)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with codecs:
            yield

    app = FastAPI(
        title="maskfx",
        version=maskfx.__version__,
        lifespan=lifespan,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = AppContext(
        frontend=frontend,
        settings=settings,
        codecs=codecs,
        tables=tables(settings.limits),
        orders=Orders(frontend, codecs, settings.limits),
        kept=Idempotency(),
    )
    for room in (images, templates, status):
        app.include_router(room.router)
    shown = page.Page(pages)
    shown.add_to(app)
    handle(app)
    describe(app, app.state.context.tables, settings)

    # the last one added is the outermost
    app.add_middleware(Admission, frontend=frontend, limits=settings.limits)
    if settings.api_key is not None:
        app.add_middleware(Auth, key=settings.api_key, page=shown.paths)
    app.add_middleware(Envelope, metrics=metrics)
    return app
