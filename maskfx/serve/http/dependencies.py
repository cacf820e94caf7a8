"""FastAPI dependencies of the routes: the app's context and the call.

The dependencies are coroutines, as FastAPI runs plain functions in threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from maskfx.serve.codecs.pool import Codecs
from maskfx.serve.config import ServeSettings
from maskfx.serve.frontend_protocol import Frontend
from maskfx.serve.http.forms import Forms
from maskfx.serve.http.idempotency import Idempotency
from maskfx.serve.http.orders import Orders, Requester

TRACE = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context/


@dataclass(frozen=True, eq=False)
class AppContext:
    """The objects that all routes of an app share."""

    frontend: Frontend
    settings: ServeSettings
    codecs: Codecs
    forms: Forms
    orders: Orders
    kept: Idempotency


async def desk_of(request: Request) -> AppContext:
    context = request.app.state.context
    assert isinstance(context, AppContext)
    return context


async def caller_of(request: Request) -> Requester:
    trace = None
    if request.app.state.context.settings.otlp_endpoint is not None:
        trace = {name: request.headers[name] for name in TRACE if name in request.headers}
    address = "" if request.client is None else request.client.host
    return Requester(request.state.call_id, request.state.arrived, trace, address)


AtDesk = Annotated[AppContext, Depends(desk_of)]
Calls = Annotated[Requester, Depends(caller_of)]
