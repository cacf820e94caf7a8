"""Responses to failures: always the JSON of an ApiError.

Owns the handlers that convert exceptions of FastAPI and Starlette to ApiErrors.
"""

from __future__ import annotations

import math
import traceback
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from maskfx.serve.errors import ApiError

log = structlog.get_logger(__name__)

RETRY_AFTER = 1.0  # seconds, default of the `Retry-After` header
JSON = "application/json"


class ClientGone(Exception):
    """Raised if the client disconnected; no response is sent."""


def response_of(error: ApiError, extra: dict[str, str] | None = None) -> Response:
    """Return the response for an error; `extra` are additional headers."""
    headers = dict(extra or {})
    if error.status in (429, 503):
        seconds = RETRY_AFTER if error.retry_after is None else error.retry_after
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    challenge = getattr(error, "challenge", None)
    if challenge is not None:
        headers["www-authenticate"] = challenge
    body = msgspec.json.encode(error.body())
    return Response(body, status_code=error.status, media_type=JSON, headers=headers)


def internal(error: Exception, call_id: str) -> ApiError:
    """Log an unexpected exception and return the ApiError to send instead.

    The traceback is plain text: a renderer of local variables blocks the event loop for seconds.
    """
    trace = "".join(traceback.format_exception(error))
    log.error("unexpected", request_id=call_id, error=repr(error), trace=trace)
    return ApiError(
        "internal_error",
        "An unexpected error occurred; the server's log has it under this x-request-id.",
    )


def handle(app: FastAPI) -> None:
    """Register the exception handlers of the app."""
    app.add_exception_handler(ApiError, _ours)
    app.add_exception_handler(HTTPException, _starlettes)
    app.add_exception_handler(RequestValidationError, _fastapis)


async def _ours(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return response_of(error)


async def _starlettes(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        told = ApiError("method_not_allowed", f"This route does not take {request.method}.")
    elif error.status_code == 404:
        told = ApiError("not_found", "There is no such route; GET /openapi.json lists them.")
    else:
        told = ApiError("malformed_body", str(error.detail))
    return response_of(told, dict(error.headers or {}))


async def _fastapis(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = dict(error.errors()[0])
    param = str(first["loc"][-1])
    return response_of(ApiError("invalid_value", f"{param}: {first['msg']}.", param=param))
