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
from maskfx.serve.api import about, images, page, templates
from maskfx.serve.api.auth import Auth
from maskfx.serve.api.desk import Desk
from maskfx.serve.api.document import describe
from maskfx.serve.api.envelope import Envelope
from maskfx.serve.api.failures import handle
from maskfx.serve.api.idempotency import Idempotency
from maskfx.serve.api.limits import Admission
from maskfx.serve.api.orders import Orders
from maskfx.serve.api.tables import tables
from maskfx.serve.codecs import Codecs
from maskfx.serve.metrics import Metrics
from maskfx.serve.request import Frontend
from maskfx.serve.settings import ServeSettings


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
    app.state.desk = Desk(
        frontend=frontend,
        settings=settings,
        codecs=codecs,
        tables=tables(settings.limits),
        orders=Orders(frontend, codecs, settings.limits),
        kept=Idempotency(),
    )
    for room in (images, templates, about):
        app.include_router(room.router)
    shown = page.Page(pages)
    shown.add_to(app)
    handle(app)
    describe(app, app.state.desk.tables, settings)

    # the last one added is the outermost
    app.add_middleware(Admission, frontend=frontend, limits=settings.limits)
    if settings.api_key is not None:
        app.add_middleware(Auth, key=settings.api_key, page=shown.paths)
    app.add_middleware(Envelope, metrics=metrics)
    return app
