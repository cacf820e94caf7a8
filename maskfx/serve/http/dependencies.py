"""What the routes share: one desk per app.

The dependencies are coroutines, as FastAPI hands plain functions to threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.config import ServeSettings
from maskfx.serve.http.idempotency import Idempotency
from maskfx.serve.http.orders import Caller, Orders
from maskfx.serve.http.schemas import Tables
from maskfx.serve.request import Frontend

TRACE = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context/


@dataclass(frozen=True, eq=False)
class Desk:
    """The frontend, and what reads and writes pictures for it."""

    frontend: Frontend
    settings: ServeSettings
    codecs: Codecs
    tables: Tables
    orders: Orders
    kept: Idempotency


async def desk_of(request: Request) -> Desk:
    desk = request.app.state.desk
    assert isinstance(desk, Desk)
    return desk


async def caller_of(request: Request) -> Caller:
    trace = None
    if request.app.state.desk.settings.otlp_endpoint is not None:
        trace = {name: request.headers[name] for name in TRACE if name in request.headers}
    return Caller(request.state.call_id, request.state.arrived, trace)


AtDesk = Annotated[Desk, Depends(desk_of)]
Calls = Annotated[Caller, Depends(caller_of)]
