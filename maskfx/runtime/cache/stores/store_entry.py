"""An entry of the store: its key, and the format of its file.

A file is `magic | version | key digest | length | xxh3-128 | payload`; any other content is
corrupt. Knows nothing of directories and of the payload's meaning.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import xxhash

from maskfx.errors import InputError
from maskfx.runtime.cache.stores.filesystem import Disk

MAGIC = b"maskfx\r\n"
VERSION = 1
HEADER = struct.Struct("<8sI32sQ16s")  # magic, version, key digest, length, xxh3-128
HASHED = struct.Struct("<8sI32sQ")  # the hash covers these too
DIGEST_SIZE = 32
PIECE = 8 << 20  # bytes per read or write

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class EntryKey:
    """The inputs that determine a recorded step."""

    template: str
    model: str
    revision: str
    dtype: str
    numerics: str
    schema: int
    step: int  # the ordinal of the call: schedulers may repeat timesteps
    branch: str = ""

    def __post_init__(self) -> None:
        for name, wanted in KINDS:
            value = getattr(self, name)
            if type(value) is not wanted:
                raise InputError(
                    f"EntryKey.{name}={value!r} is a {type(value).__name__}; "
                    f"give a{'n int' if wanted is int else ' str'}"
                )

    def digest(self) -> bytes:
        """Return a digest of 32 bytes, the same in every process and on every machine."""
        text = json.dumps(["maskfx entry", asdict(self)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).digest()

    def labels(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


KINDS = [(item.name, int if item.type == "int" else str) for item in fields(EntryKey)]


@dataclass(frozen=True)
class StoreEntry:
    """One file of the store, described by its name and the file system."""

    digest: bytes
    path: Path
    nbytes: int
    used: float  # seconds since the epoch


class CorruptEntry(Exception):
    """Raised for a file that isn't an intact entry; the store catches and counts it."""


def header_of(digest: bytes, payload: memoryview) -> bytes:
    hashed = HASHED.pack(MAGIC, VERSION, digest, len(payload))
    return hashed + _hash(hashed, payload)


def _hash(header: bytes, payload: Buffer) -> bytes:
    state = xxhash.xxh3_128(header)
    state.update(payload)
    return state.digest()


def read_payload(disk: Disk, file: int, digest: bytes) -> bytearray:
    """Read the payload of an open entry; raise CorruptEntry if it isn't what was written."""
    if not disk.is_file(file):
        raise CorruptEntry("no regular file")
    header = bytearray(HEADER.size)
    if disk.read(file, memoryview(header)) < HEADER.size:
        raise CorruptEntry("shorter than a header")
    magic, version, found, length, hashed = HEADER.unpack(header)
    if (magic, version, found) != (MAGIC, VERSION, digest):
        raise CorruptEntry("another magic, version or key")
    if length != disk.status(file).st_size - HEADER.size:
        raise CorruptEntry("another length")
    payload = bytearray(length)
    view = memoryview(payload)
    for start in range(0, length, PIECE):
        piece = view[start : start + PIECE]
        if disk.read(file, piece) < len(piece):
            raise CorruptEntry("cut short")
    if _hash(bytes(header[: HASHED.size]), payload) != hashed:
        raise CorruptEntry("another hash")
    return payload


def new_buffer(nbytes: int) -> memoryview:
    """Return memory to read into, which isn't set to zero first."""
    return np.empty(nbytes, np.uint8).data


def payload_prefix(entry: StoreEntry, nbytes: int = 1 << 20) -> bytes:
    """Return the first bytes of an entry's payload, unchecked, or b"" if it can't be read."""
    try:
        with entry.path.open("rb") as file:
            file.seek(HEADER.size)
            return file.read(nbytes)
    except OSError:
        return b""
