"""Parts of an entry of a store, read when they are needed instead of the whole entry.

The hash of an entry covers all of it, so parts are checked by the checksums that the payload itself
has (`serialize.py`). Knows nothing of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from maskfx.errors import CacheError
from maskfx.runtime.cache.stores.filesystem import Disk
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.cache.stores.store_entry import HEADER, MAGIC, VERSION, Buffer, new_buffer


class EntryParts(Protocol):
    """The payload of an entry, of which any range can be read."""

    @property
    def nbytes(self) -> int: ...

    @property
    def speed(self) -> ReadSpeed: ...

    def read(self, begin: int, end: int) -> Buffer:
        """Return a range of the payload; raise CacheError if the entry is gone or changed."""
        ...

    def is_damaged(self) -> None:
        """Remove the entry, whose bytes aren't what was written, and count it."""
        ...

    @property
    def elsewhere(self) -> bool:
        """Whether it can be pickled, so that another process of this machine reads it."""
        ...


@dataclass(frozen=True)
class FileParts:
    """The payload of an entry's file.

    Args:
        disk: The file system operations.
        path: The file.
        header: Its first bytes; another file under its name is not read.
        nbytes: The bytes of the payload.
        speed: Counts the reads.
        remove: Removes the damaged file.
        clock: Returns the time in seconds.
    """

    disk: Disk
    path: Path
    header: bytes
    nbytes: int
    speed: ReadSpeed
    remove: Callable[[Path], object]
    clock: Callable[[], float] = time.perf_counter

    def read(self, begin: int, end: int) -> memoryview:
        with self.speed.time.reading():
            return self._read_timed(begin, end)

    def _read_timed(self, begin: int, end: int) -> memoryview:
        began = self.clock()
        found = new_buffer(end - begin)
        try:
            file = self.disk.open(self.path)
            try:
                same = header_in(self.disk, file) == self.header
                whole = same and self.disk.read_at(file, found, HEADER.size + begin)
            finally:
                self.disk.close(file)
        except OSError as error:
            raise CacheError(
                f"{self.path.name}: rows of a recorded step can't be read: {error.strerror}; "
                "record its template again"
            ) from error
        if whole < len(found):
            raise CacheError(
                f"{self.path.name}: a recorded step was replaced or cut short while an edit reads "
                "it; record its template again"
            )
        self.speed.add(len(found), self.clock() - began)
        return found

    def is_damaged(self) -> None:
        self.remove(self.path)

    @property
    def elsewhere(self) -> bool:
        return True

    def __reduce__(self) -> tuple[object, ...]:
        return reopened, (self.disk, self.path, self.header, self.nbytes)


def reopened(disk: Disk, path: Path, header: bytes, nbytes: int) -> FileParts:
    """Return the payload in another process, whose reads are counted there alone."""
    return FileParts(disk, path, header, nbytes, ReadSpeed(), disk.remove)


def header_in(disk: Disk, file: int) -> bytes:
    """Return the first bytes of an open file."""
    found = bytearray(HEADER.size)
    count = disk.read_at(file, memoryview(found), 0)
    return bytes(found[:count])


def length_in(header: bytes, digest: bytes) -> int | None:
    """Return the bytes of an entry's payload; None if this isn't the header of the entry."""
    if len(header) < HEADER.size:
        return None
    magic, version, found, length, _ = HEADER.unpack(header)
    return int(length) if (magic, version, found) == (MAGIC, VERSION, digest) else None
