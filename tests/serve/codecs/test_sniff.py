"""Headers only: formats and sizes are known before anything decodes."""

from __future__ import annotations

import struct
import time
import zlib

import pytest

from maskfx.serve.codecs.sniff import sniff
from maskfx.serve.errors import ApiError
from tests.serve.served import file, mask, picture

LIMIT = 4 << 20


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_reads_format_and_size(form: str) -> None:
    found = sniff(file(picture(40, 24), form), "image", LIMIT)
    assert (found.format, found.width, found.height) == (form, 40, 24)


def test_reads_every_kind_of_webp_and_jpeg() -> None:
    for data in (
        file(picture(40, 24), "webp", lossless=True),
        file(mask(40, 24), "webp"),
        file(picture(40, 24), "webp", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"),
        file(picture(40, 24), "jpeg", progressive=True),
        file(picture(40, 24), "jpeg", exif=b"Exif\0\0" + bytes(60_000)),
    ):
        found = sniff(data, "image", LIMIT)
        assert (found.width, found.height) == (40, 24)


def test_a_marker_may_be_padded_but_not_for_long() -> None:
    whole = file(picture(40, 24), "jpeg")
    found = sniff(whole[:2] + b"\xff" * 60 + whole[2:], "image", LIMIT)
    assert (found.width, found.height) == (40, 24)
    began = time.process_time()
    with pytest.raises(ApiError, match="not a picture"):
        sniff(whole[:2] + b"\xff" * (8 << 20) + whole[2:], "image", LIMIT)
    assert time.process_time() - began < 0.1


def test_counts_pixels_before_decoding() -> None:
    with pytest.raises(ApiError) as refused:
        sniff(bomb(13_000, 13_000), "image", LIMIT)
    assert (refused.value.code, refused.value.param) == ("image_too_large", "image")
    assert sniff(bomb(2048, 2048), "image", LIMIT).width == 2048
    with pytest.raises(ApiError):
        sniff(bomb(2048, 2049), "image", LIMIT)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xe0\x00\x00" * 9,
        b"RIFF\0\0\0\0WEBPVP8X",
        b"II*\0" + bytes(60),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<!doctype html><html></html>",
        b"BM" + bytes(60),
    ],
)
def test_refuses_what_is_no_picture(data: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        sniff(data, "mask", LIMIT)
    assert (refused.value.code, refused.value.param) == ("invalid_image_file", "mask")


def test_refuses_gif_and_animated_webp() -> None:
    for data in (b"GIF89a" + bytes(60), b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\x02" + bytes(60)):
        with pytest.raises(ApiError) as refused:
            sniff(data, "image", LIMIT)
        assert refused.value.code == "unsupported_image"


def chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def bomb(width: int, height: int) -> bytes:
    """A PNG of one bit a pixel, all black: few bytes, many pixels."""
    rows = zlib.compress(bytes((width + 7) // 8 + 1) * height, 9)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text_bomb(inflated: int, kind: bytes = b"zTXt") -> bytes:
    """A small picture with a text that inflates to a number of bytes."""
    plain = file(picture(8, 8))
    data = zlib.compress(bytes(inflated), 9)
    head = b"key\0\0" if kind == b"zTXt" else b"key\0\x01\0\0\0"
    return plain[:33] + chunk(kind, head + data) + plain[33:]
