"""A multipart body as it comes in: its parts are kept in memory, and refused while they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from maskfx.serve.errors import ApiError

PLAIN = (b"", b"binary", b"7bit", b"8bit")
LONGEST_NAME = 64


@dataclass(eq=False)
class Part:
    """A field as it was sent."""

    name: str
    most: int
    data: bytearray = field(default_factory=bytearray)


def malformed(reason: str) -> ApiError:
    return ApiError("malformed_body", f"The multipart body {reason}.", param="body")


class Reader:
    """Collects parts. `admit(name, count)` gives the bytes a field may have, or raises."""

    def __init__(self, boundary: bytes, admit: Callable[[str, int], int]) -> None:
        self.parts: list[Part] = []
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
        self.parts.append(Part(name, self._admit(name, len(self.parts) + 1)))

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
) -> list[Part]:
    """All parts of a body, in order."""
    reader = Reader(boundary, admit)
    async for chunk in chunks:
        if chunk:
            reader.write(chunk)
    if not reader.complete:
        raise malformed("ends before its closing boundary")
    return reader.parts
