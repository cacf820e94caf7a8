"""The messages between the front end and a codec process, and their framing.

A message is a length, a msgspec struct, then the parts whose lengths are in the struct. Both ends
block in the kernel while large parts are copied, so that a copy never holds the GIL.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import msgspec

Part = bytes | bytearray | memoryview
Shape = tuple[int, ...]
Size = tuple[int, int]  # width, height

LENGTH = struct.Struct("<I")
MOST = 1 << 30  # bytes of a part; a longer one is a bug in maskfx


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
    parts: list[int]
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


class CodecReply(msgspec.Struct, frozen=True):
    """A message from a codec process."""

    reply: Planes | File | CodecRefusal | Broken
    parts: list[int]


encode = msgspec.msgpack.Encoder().encode
decode_asked = msgspec.msgpack.Decoder(CodecRequest).decode
decode_answered = msgspec.msgpack.Decoder(CodecReply).decode


def send(line: socket.socket, head: bytes, parts: Sequence[Part]) -> None:
    line.sendall(LENGTH.pack(len(head)) + head)
    for part in parts:
        line.sendall(part)


def receive(line: socket.socket, size: int) -> bytearray:
    """Read `size` bytes.

    Raises EOFError if the other end closed, TimeoutError if it sends nothing for too long.
    """
    if size > MOST:
        raise EOFError(f"a part of {size} bytes can't be meant")
    room = bytearray(size)
    view, got = memoryview(room), 0
    while got < size:
        try:
            count = line.recv_into(view[got:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("the other end is silent") from None
        if not count:
            raise EOFError("the other end is gone")
        got += count
    return room


def receive_head(line: socket.socket) -> bytearray:
    (size,) = LENGTH.unpack(receive(line, LENGTH.size))
    return receive(line, size)
