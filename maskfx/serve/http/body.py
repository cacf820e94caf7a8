"""Parses a request body into validated fields. Fields not in the route's table are errors.

The parts of a multipart body are held in memory; limits are checked while they arrive.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from pydantic import BaseModel
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from maskfx.serve.config import Limits
from maskfx.serve.errors import ApiError
from maskfx.serve.http.forms import ELSEWHERE, is_list, most_bytes, validated, wrong

PLAIN = (b"", b"binary", b"7bit", b"8bit")
LONGEST_NAME = 64


@dataclass(eq=False)
class FormPart:
    """A field of a multipart body, unparsed."""

    name: str
    most: int
    data: bytearray = field(default_factory=bytearray)


def malformed(reason: str) -> ApiError:
    return ApiError("malformed_body", f"The multipart body {reason}.", param="body")


class Reader:
    """Parses a multipart body incrementally.

    Args:
        boundary: The boundary between the parts.
        admit: `admit(name, count)` returns the maximum bytes of a field, or raises ApiError;
            `count` is the number of parts so far.
    """

    def __init__(self, boundary: bytes, admit: Callable[[str, int], int]) -> None:
        self.parts: list[FormPart] = []
        self.complete = False
        self._admit = admit
        self._headers: dict[bytes, bytes] = {}
        self._name, self._value = bytearray(), bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, at, to: self._name.extend(data[at:to]),
                "on_header_value": lambda data, at, to: self._value.extend(data[at:to]),
                "on_header_end": self._header,
                "on_headers_finished": self._open,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )

    def write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as bad:
            raise malformed("can't be parsed") from bad

    def _begin(self) -> None:
        self._headers.clear()

    def _header(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _open(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        if kind != b"form-data" or b"name" not in options:
            raise malformed("has a part without a name")
        if self._headers.get(b"content-transfer-encoding", b"").strip().lower() not in PLAIN:
            raise malformed("has a part with a transfer encoding")
        name = options[b"name"].decode("utf-8", "replace")[:LONGEST_NAME]
        self.parts.append(FormPart(name, self._admit(name, len(self.parts) + 1)))

    def _data(self, data: bytes, at: int, to: int) -> None:
        part = self.parts[-1]
        part.data += memoryview(data)[at:to]
        if len(part.data) > part.most:
            raise ApiError(
                "payload_too_large",
                f"{part.name} is larger than the {part.most} bytes taken.",
                param=part.name,
            )

    def _end(self) -> None:
        self.complete = True


async def read_parts(
    chunks: AsyncIterable[bytes], boundary: bytes, admit: Callable[[str, int], int]
) -> list[FormPart]:
    """Read all parts of a multipart body, in order; `admit` as in `Reader`."""
    reader = Reader(boundary, admit)
    async for chunk in chunks:
        if chunk:
            reader.write(chunk)
    if not reader.complete:
        raise malformed("ends before its closing boundary")
    return reader.parts


MULTIPART, JSON = "multipart/form-data", "application/json"
LARGE = 1 << 20  # bytes from which a body is parsed in a thread
NESTED = 4  # average number of values per JSON field, apart from commas and brackets in a prompt
LISTS = "[]"  # `image[]` is an alias of `image`


F = TypeVar("F", bound=BaseModel)


async def read_form(request: Request, form: type[F], kinds: Sequence[str], limits: Limits) -> F:
    """Read and validate a request's body.

    Args:
        request: The request.
        form: The form of the route.
        kinds: Accepted content types.
        limits: Limits of the number of fields and of a prompt's length.
    """
    header = request.headers.get("content-type", "")
    kind, options = parse_options_header(header)
    name = kind.decode("latin-1")
    if name not in kinds:
        raise ApiError(
            "unsupported_media_type",
            f"Content-Type {header[:64]!r} is not taken here; send {' or '.join(kinds)}.",
            param="Content-Type",
        )
    if name == MULTIPART:
        boundary = options.get(b"boundary", b"")
        if not boundary:
            raise malformed("has no boundary in its Content-Type")
        given = await _parts(request.stream(), boundary, form, limits)
    else:
        given = await _members(request.stream(), form, limits)
    return await _in_thread(_form, given, form)


Given = list[tuple[str, object]]
In = TypeVar("In", bound=bytearray | list[tuple[str, object]])
P = ParamSpec("P")
R = TypeVar("R")


async def _parts(
    chunks: AsyncIterable[bytes], boundary: bytes, form: type[BaseModel], limits: Limits
) -> Given:
    def admit(name: str, count: int) -> int:
        field = form.model_fields[_field(name, form)]
        if count > limits.fields:
            raise ApiError(
                "too_many_fields", f"The form has more than {limits.fields} fields.", param=name
            )
        return most_bytes(field, limits)

    parts = await read_parts(chunks, boundary, admit)
    return [(_field(part.name, form), part.data) for part in parts]


async def _members(chunks: AsyncIterable[bytes], form: type[BaseModel], limits: Limits) -> Given:
    body = bytearray()
    async for chunk in chunks:
        body += chunk
    if sum(map(body.count, (b"[", b"{", b","))) > NESTED * limits.fields + 2 * limits.prompt:
        # json.loads of this many values holds the GIL and would delay all other requests
        raise ApiError("too_many_fields", "The body has too many values.", param="body")
    pairs = await _in_thread(_pairs, body)
    given = [(_field(name, form), value) for name, value in pairs]
    if len(given) > limits.fields:
        raise ApiError(
            "too_many_fields", f"The body has more than {limits.fields} fields.", param=given[-1][0]
        )
    return [
        (name, value)
        for name, value in given
        if value is not None or form.model_fields[name].is_required()
    ]


def _pairs(body: bytearray) -> Given:
    """Parse a JSON object to pairs, including repeated names; numbers may be infinite."""
    bad = ApiError("malformed_body", "The body is not a JSON object.", param="body")
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        raise bad from None
    if not isinstance(value, _Pairs):
        raise bad
    return list(value)


class _Pairs(list[tuple[str, object]]):
    """A JSON object as a list of pairs, in order and with repeated names."""


def _field(name: str, form: type[BaseModel]) -> str:
    """Return the form's field of this name or alias."""
    if name in form.model_fields:
        return name
    short = name.removesuffix(LISTS)
    if name.endswith(LISTS) and short in form.model_fields and is_list(form.model_fields[short]):
        return short
    shown = name.encode("utf-8", "replace").decode()[:64]
    code = "unsupported_parameter" if name in ELSEWHERE else "unknown_parameter"
    message = f"{shown!r} is not taken; taken: {', '.join(form.model_fields)}."
    raise ApiError(code, message, param=shown)


def _form(given: Given, form: type[F]) -> F:
    values: dict[str, Any] = {}
    for name, value in given:
        if is_list(form.model_fields[name]):
            several = value if type(value) is list else [value]  # a list is of JSON
            values.setdefault(name, []).extend(several)
        elif name in values:
            raise wrong(name, "given once")
        else:
            values[name] = value
    return validated(form, values)


async def _in_thread(
    work: Callable[Concatenate[In, P], R], first: In, *rest: P.args, **named: P.kwargs
) -> R:
    """Call `work`, in a thread if its input is large, so that the event loop isn't blocked."""
    size = len(first) if isinstance(first, bytearray) else sum(_length(raw) for _, raw in first)
    if size < LARGE:
        return work(first, *rest, **named)
    return await asyncio.to_thread(work, first, *rest, **named)


def _length(raw: object) -> int:
    if type(raw) is list:
        return sum(map(_length, raw))
    return len(raw) if isinstance(raw, str | bytearray) else 0
