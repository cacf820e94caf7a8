"""Reads the format and size of an image file from its header, before it is decoded.

Owns the list of accepted formats. Reads headers only, so a decompression bomb costs no more memory
than its file. By hand, because files of clients reach Pillow in codec processes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maskfx.serve.errors import ApiError

Format = Literal["png", "jpeg", "webp"]

TAKEN = "PNG, JPEG and WebP are taken"
SEGMENTS = 1000  # maximum number before the frame header of a JPEG
PADDING = 64  # maximum bytes before a segment; no real image has more
# markers of frame headers; the others of this range are tables (C4, CC) and reserved (C8)
SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True)
class Sniffed:
    """Format and stored size of an image; EXIF orientation isn't applied."""

    format: Format
    width: int
    height: int


def sniff(data: bytes, param: str, pixels: int) -> Sniffed:
    """Return the format and size of an image file.

    Args:
        data: The file.
        param: The request's field, which errors name.
        pixels: Maximum width x height.

    Raises ApiError if the format isn't accepted or the image is too large.
    """
    found = _read(data, param)
    if found is None:
        raise ApiError(
            "invalid_image_file",
            f"{param} is not a picture that can be read; {TAKEN}.",
            param=param,
        )
    if found.width * found.height > pixels:
        raise ApiError(
            "image_too_large",
            f"{param} has {found.width}x{found.height} pixels; at most {pixels} are taken.",
            param=param,
        )
    return found


def _read(data: bytes, param: str) -> Sniffed | None:
    if data.startswith((b"GIF87a", b"GIF89a")):
        raise ApiError("unsupported_image", f"{param} is a GIF; {TAKEN}.", param=param)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data, param)
    return None


def _png(data: bytes) -> Sniffed | None:
    if len(data) < 33 or data[12:16] != b"IHDR":
        return None
    return _sized("png", _big(data, 16, 4), _big(data, 20, 4))


def _jpeg(data: bytes) -> Sniffed | None:
    """Find the first frame header, which has the size, after up to `SEGMENTS` other segments."""
    at = 2
    for _ in range(SEGMENTS):
        start, at = at, _after_padding(data, at)
        if at - start > PADDING:
            return None
        if len(data) < at + 9 or data[at] != 0xFF:
            return None
        if data[at + 1] in SIZES:
            return _sized("jpeg", _big(data, at + 7, 2), _big(data, at + 5, 2))
        length = _big(data, at + 2, 2)
        if length < 2:
            return None
        at += 2 + length
    return None


def _after_padding(data: bytes, at: int) -> int:
    """Return the position of a marker's last 0xFF byte; others may precede it as padding."""
    found = data[at : at + PADDING + 2]
    return at + max(0, len(found) - len(found.lstrip(b"\xff")) - 1)


def _webp(data: bytes, param: str) -> Sniffed | None:
    kind = data[12:16]
    if len(data) < 30:
        return None
    if kind == b"VP8X":
        if data[20] & 0x02:
            raise ApiError(
                "unsupported_image", f"{param} is animated; a single picture is taken.", param=param
            )
        return _sized("webp", _little(data, 24, 3) + 1, _little(data, 27, 3) + 1)
    if kind == b"VP8L":
        bits = _little(data, 21, 4)
        return _sized("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 ":
        return _sized("webp", _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF)
    return None


def _sized(form: Format, width: int, height: int) -> Sniffed | None:
    return Sniffed(form, width, height) if width and height else None


def _big(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "big")


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
