"""Completes the OpenAPI document with what FastAPI can't derive, from the forms of the routes."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field

import maskfx
from maskfx.serve.config import ServeSettings
from maskfx.serve.errors import CODES
from maskfx.serve.http.body import MULTIPART
from maskfx.serve.http.failures import JSON
from maskfx.serve.http.forms import Form, Forms, is_upload
from maskfx.serve.http.idempotency import HEADER, LONGEST
from maskfx.serve.http.middleware import OPEN
from maskfx.serve.http.schemas import JsonSchema, schema_of

Said = dict[str, Any]  # a JSON object whose members are read
EVENTS = "text/event-stream"
PICTURES = "image/png, image/jpeg, image/webp"

PARSING = ("malformed_body", "payload_too_large", "request_timeout", "unsupported_media_type")
WAITING = ("queue_full", "generation_failed", "model_loading")
NONE_FOUND = ("not_found",)
# error codes by route; the document lists their statuses
FAILURES: dict[tuple[str, str], tuple[str, ...]] = {
    ("/v1/images/edits", "post"): (*PARSING, *WAITING, *NONE_FOUND),
    ("/v1/images/generations", "post"): (*PARSING, *WAITING, *NONE_FOUND),
    ("/v1/templates", "post"): (*PARSING, *WAITING, *NONE_FOUND),
    ("/v1/templates/{template_id}", "get"): NONE_FOUND,
    ("/v1/templates/{template_id}", "delete"): NONE_FOUND,
    ("/v1/adapters", "post"): (*PARSING, *WAITING, *NONE_FOUND),
    ("/v1/adapters/{adapter}", "get"): NONE_FOUND,
    ("/v1/adapters/{adapter}", "delete"): NONE_FOUND,
    ("/v1/models/{name}", "get"): NONE_FOUND,
    **{(path, "get"): ("no_workers",) for path in OPEN},
}


class ErrorDetail(BaseModel):
    """What is wrong."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: Literal[tuple(CODES)]  # type: ignore[valid-type]


class ErrorBody(BaseModel):
    """The answer to a request that fails."""

    error: ErrorDetail


class Image(BaseModel):
    """One image, in base64 or as a URL."""

    b64_json: str | None = None
    url: str | None = None
    maskfx: Said


class Images(BaseModel):
    """The answer to an edit or a generation."""

    created: int
    data: list[Image] = Field(min_length=1)
    usage: Said


def describe(app: FastAPI, forms: Forms, settings: ServeSettings) -> None:
    """Make the app serve this document."""

    def told() -> Said:
        if app.openapi_schema is None:
            app.openapi_schema = document(app, forms, settings)
        return app.openapi_schema

    app.openapi = told  # type: ignore[method-assign]


def document(app: FastAPI, forms: Forms, settings: ServeSettings) -> Said:
    said = get_openapi(title="maskfx", version=maskfx.__version__, routes=app.routes)
    components = said.setdefault("components", {})
    components["schemas"] = {"Error": schema_of(ErrorBody), "Images": schema_of(Images)}
    for path, operations in said["paths"].items():
        for verb, operation in operations.items():
            _failures(operation, path, verb, settings)
    bodies = {
        "/v1/images/edits": {MULTIPART: multipart(forms.edits)},
        "/v1/images/generations": either(forms.generations),
        "/v1/templates": either(forms.templates),
        "/v1/adapters": {JSON: {"schema": schema_of(forms.adapters, JsonSchema)}},
    }
    for path, content in bodies.items():
        said["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for path in ("/v1/images/edits", "/v1/images/generations"):
        _pictures(said["paths"][path]["post"])
    text = {"text/plain": {"schema": {"type": "string"}}}
    said["paths"]["/metrics"]["get"]["responses"]["200"]["content"] = text
    if settings.api_key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return said


def either(form: type[Form]) -> Said:
    """Return the content of a body that is multipart or JSON."""
    return {MULTIPART: multipart(form), JSON: {"schema": schema_of(form, JsonSchema)}}


def multipart(form: type[Form]) -> Said:
    """Return the schema and encoding of a multipart body."""
    files = (name for name, field in form.model_fields.items() if is_upload(field))
    return {
        "schema": schema_of(form),
        "encoding": {name: {"contentType": PICTURES} for name in files},
    }


def _failures(operation: Said, path: str, verb: str, settings: ServeSettings) -> None:
    codes = FAILURES.get((path, verb), ())
    guarded = settings.api_key is not None and path not in OPEN
    refusal = "invalid_api_key" if guarded else "origin_not_allowed"
    responses = operation["responses"]
    responses.pop("422", None)
    for code in (*codes, *((refusal,) if path not in OPEN else ())):
        status = CODES[code][0]
        same = [name for name, (number, _) in CODES.items() if number == status]
        responses[str(status)] = {
            "description": ", ".join(same),
            "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
    if guarded:
        operation["security"] = [{"key": []}]


def _pictures(operation: Said) -> None:
    """Add both content types of the response, and the idempotency header, to an operation."""
    operation["responses"]["200"]["content"] = {
        JSON: {"schema": {"$ref": "#/components/schemas/Images"}},
        EVENTS: {"schema": {"type": "string"}},
    }
    key = {"type": "string", "minLength": 1, "maxLength": LONGEST, "pattern": "^[!-~]+$"}
    operation["parameters"] = [{"name": HEADER, "in": "header", "schema": key}]
