"""Completes the OpenAPI document with what FastAPI can't derive, from the routes' field tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import maskfx
from maskfx.serve.config import Limits, ServeSettings
from maskfx.serve.errors import CODES
from maskfx.serve.http.body import MULTIPART
from maskfx.serve.http.failures import JSON
from maskfx.serve.http.idempotency import HEADER, LONGEST
from maskfx.serve.http.middleware import OPEN
from maskfx.serve.http.schemas import Field, FieldTables, PictureField, nullable

Said = dict[str, Any]
EVENTS = "text/event-stream"
PICTURES = "image/png, image/jpeg, image/webp"

PARSING = ("malformed_body", "payload_too_large", "request_timeout", "unsupported_media_type")
WAITING = ("queue_full", "generation_failed", "no_workers")
NONE_FOUND = ("not_found",)
# error codes by route; the document lists their statuses
FAILURES: dict[tuple[str, str], tuple[str, ...]] = {
    ("/v1/images/edits", "post"): (*PARSING, *WAITING, *NONE_FOUND),
    ("/v1/images/generations", "post"): (*PARSING, *WAITING, *NONE_FOUND),
    ("/v1/templates", "post"): (*PARSING, *WAITING, *NONE_FOUND),
    ("/v1/templates/{template_id}", "get"): NONE_FOUND,
    ("/v1/templates/{template_id}", "delete"): NONE_FOUND,
    ("/v1/models/{name}", "get"): NONE_FOUND,
    **{(path, "get"): ("no_workers",) for path in OPEN},
}


def describe(app: FastAPI, tables: FieldTables, settings: ServeSettings) -> None:
    """Make the app serve this document."""

    def told() -> Said:
        if app.openapi_schema is None:
            app.openapi_schema = document(app, tables, settings)
        return app.openapi_schema

    app.openapi = told  # type: ignore[method-assign]


def document(app: FastAPI, tables: FieldTables, settings: ServeSettings) -> Said:
    said = get_openapi(title="maskfx", version=maskfx.__version__, routes=app.routes)
    components = said.setdefault("components", {})
    components["schemas"] = {"Error": error()}
    for path, operations in said["paths"].items():
        for verb, operation in operations.items():
            _failures(operation, path, verb, settings)
    limits = settings.limits
    bodies = {
        "/v1/images/edits": {MULTIPART: form(tables.edits, limits)},
        "/v1/images/generations": {JSON: {"schema": members(tables.generations)}},
        "/v1/templates": {
            MULTIPART: form(tables.templates, limits),
            JSON: {"schema": members(tables.templates)},
        },
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


def form(table: Sequence[Field], limits: Limits) -> Said:
    """Return the schema and encoding of a multipart body."""
    properties, encoding = {}, {}
    for field in table:
        kind = field.kind
        several = isinstance(kind, PictureField) and kind.several > 1
        schema = described(field, kind.schema())
        if isinstance(kind, PictureField):
            encoding[field.name] = {"contentType": PICTURES}
        if several:
            assert isinstance(kind, PictureField)
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": kind.several}
        properties[field.name] = schema
    return {"schema": closed(properties, table), "encoding": encoding}


def members(table: Sequence[Field]) -> Said:
    """Return the schema of a JSON body, in which images are `data:` URLs."""
    properties = {}
    for field in table:
        schema = field.kind.schema()
        if isinstance(field.kind, PictureField):
            schema = {"type": "string", "pattern": "^data:image/(png|jpeg|webp);base64,"}
        properties[field.name] = described(field, schema if field.required else nullable(schema))
    return closed(properties, table)


def closed(properties: Said, table: Sequence[Field]) -> Said:
    required = [field.name for field in table if field.required]
    more = {"required": required} if required else {}
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def described(field: Field, schema: Said) -> Said:
    return {**schema, "description": field.says} if field.says else schema


def error() -> Said:
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    inner = {
        "type": "object",
        "properties": {
            "message": text,
            "type": text,
            "param": maybe,
            "code": {"type": "string", "enum": list(CODES)},
        },
        "required": ["message", "type", "param", "code"],
        "additionalProperties": False,
    }
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}


def _failures(operation: Said, path: str, verb: str, settings: ServeSettings) -> None:
    codes = FAILURES.get((path, verb), ())
    guarded = settings.api_key is not None and path not in OPEN
    responses = operation["responses"]
    responses.pop("422", None)
    for code in (*codes, *(("invalid_api_key",) if guarded else ())):
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
    picture = {"type": "object", "properties": {"maskfx": {"type": "object"}}}
    answered = {
        "type": "object",
        "properties": {
            "created": {"type": "integer"},
            "data": {"type": "array", "items": picture, "minItems": 1},
            "usage": {"type": "object"},
        },
        "required": ["created", "data", "usage"],
    }
    operation["responses"]["200"]["content"] = {
        JSON: {"schema": answered},
        EVENTS: {"schema": {"type": "string"}},
    }
    key = {"type": "string", "minLength": 1, "maxLength": LONGEST, "pattern": "^[!-~]+$"}
    operation["parameters"] = [{"name": HEADER, "in": "header", "schema": key}]
