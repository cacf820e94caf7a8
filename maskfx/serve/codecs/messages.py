"""What the front and a codec process say to each other, and how it is framed.

A message is a length, a msgspec struct, then the parts that it names the lengths of. Both ends
block in the kernel with large parts, so that a copy never holds an interpreter's lock.
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
MOST = 1 << 30  # bytes of a part; more is a fault of ours


class Decode(msgspec.Struct, frozen=True, tag="decode"):
    """A file -> its upright pixels and, if it has alpha, what of it is transparent."""

    format: str
    pixels: int  # at most


class DecodeMask(msgspec.Struct, frozen=True, tag="mask"):
    """A file -> one byte a pixel, 1 = edit."""

    format: str
    pixels: int
    luminance: bool  # white = edit, instead of transparent = edit


class Resize(msgspec.Struct, frozen=True, tag="fit"):
    """Pictures, then masks -> the same at another size; a mask keeps its thinnest strokes."""

    shapes: list[Shape]
    size: Size


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """A result, or it and the original and mask that it is pasted into -> base64 of a file."""

    format: str
    quality: int | None
    shapes: list[Shape]
    size: Size


class CodecRequest(msgspec.Struct, frozen=True):
    """A message to a codec process."""

    task: Decode | DecodeMask | Resize | Encode
    parts: list[int]
    seconds: int  # it may take; the process ends itself later


class Planes(msgspec.Struct, frozen=True, tag="planes"):
    """Pixels; `edits` of a mask or of an alpha channel: how many pixels are to be edited."""

    shapes: list[Shape]
    alpha: bool = False
    edits: int = 0


class File(msgspec.Struct, frozen=True, tag="file"):
    """A file in base64."""


class CodecRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """The picture is to blame."""

    code: str
    reason: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """We are to blame."""

    reason: str


class CodecReply(msgspec.Struct, frozen=True):
    """A message of a codec process."""

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
    """So many bytes. EOFError if the other end is gone, TimeoutError if it is silent."""
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
