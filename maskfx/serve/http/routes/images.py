"""The routes that make images."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from maskfx.serve.errors import ApiError
from maskfx.serve.http.body import JSON, MULTIPART, read_form
from maskfx.serve.http.cancellation import unless_gone
from maskfx.serve.http.dependencies import AppContext, AtDesk, Calls
from maskfx.serve.http.forms import AnsweredForm
from maskfx.serve.http.idempotency import HEADER
from maskfx.serve.http.orders import Order
from maskfx.serve.http.responses import EventStream, InPieces, events, whole

router = APIRouter()


@router.post("/v1/images/edits")
async def edit_images(request: Request, context: AtDesk, caller: Calls) -> Response:
    """Edit what a mask leaves transparent; every other pixel comes back as it was."""
    form = await read_form(request, context.forms.edits, (MULTIPART,), context.settings.limits)
    return await answer(request, context, form, lambda: context.orders.edit(form, caller))


@router.post("/v1/images/generations")
async def generate_images(request: Request, context: AtDesk, caller: Calls) -> Response:
    """Pictures from a prompt alone, by models that can."""
    limits, kinds = context.settings.limits, (JSON, MULTIPART)
    form = await read_form(request, context.forms.generations, kinds, limits)
    return await answer(request, context, form, lambda: context.orders.generation(form, caller))


async def answer(
    request: Request, context: AppContext, form: AnsweredForm, order: Callable[[], Awaitable[Order]]
) -> Response:
    """Run an order and return one JSON response, or a stream of events if the form asks for it."""
    key = request.headers.get(HEADER)
    digest = b"" if key is None else await asyncio.to_thread(form.digest)
    if form.stream:
        if key is not None:
            raise ApiError("invalid_value", f"{HEADER} must be left out of a stream.", param=HEADER)
        made = await unless_gone(request.receive, _made(order))
        return EventStream(events(context.frontend, context.codecs, made), request.state.call_id)

    async def compute() -> bytes:
        return await whole(context.frontend, context.codecs, await order())

    body = await unless_gone(request.receive, context.kept.answer(key, digest, compute))
    return InPieces(body, media_type=JSON)


async def _made(order: Callable[[], Awaitable[Order]]) -> Order:
    return await order()
