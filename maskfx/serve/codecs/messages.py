"""The messages between the front end and a codec process: a struct, then files or pixels."""

from __future__ import annotations

import msgspec

Shape = tuple[int, ...]
Size = tuple[int, int]  # width, height


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """Task: decode a file to EXIF-oriented pixels and, with alpha, a plane of its transparency."""

    format: str
    pixels: int  # maximum


class DecodeMask(msgspec.Struct, frozen=True, tag="mask"):
    """Task: decode a mask file to one byte per pixel, 1 = edit."""

    format: str
    pixels: int
    luminance: bool  # white = edit, instead of transparent = edit


class Resize(msgspec.Struct, frozen=True, tag="fit"):
    """Task: resize images, then masks; a mask keeps its thinnest strokes."""

    shapes: list[Shape]
    size: Size


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Task: encode a result as a file in base64, pasted into an original by a mask if given."""

    format: str
    quality: int | None
    shapes: list[Shape]
    size: Size


class CodecRequest(msgspec.Struct, frozen=True):
    """A message to a codec process."""

    task: Decode | DecodeMask | Resize | Encode
    seconds: int  # time limit, after which the process ends itself


class Planes(msgspec.Struct, frozen=True, tag="planes"):
    """Reply: pixels; `edits` is the number of pixels to edit in a mask or an alpha channel."""

    shapes: list[Shape]
    alpha: bool = False
    edits: int = 0


class File(msgspec.Struct, frozen=True, tag="file"):
    """Reply: a file in base64."""


class CodecRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """Reply: the image is refused."""

    code: str
    reason: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """Reply: the codec process failed by a bug in maskfx."""

    reason: str


CodecReply = Planes | File | CodecRefusal | Broken

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(CodecRequest).decode
decode_reply = msgspec.msgpack.Decoder(CodecReply).decode
