"""Store: a directory of entries, one file each; stores bytes under a key atomically.

A file is written under another name, synced and renamed, so a reader sees all of it or nothing; a
file that is damaged nevertheless is a miss, removed and counted. The index is the directory: any
number of processes may share it.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from maskfx.ir.argument_checks import check_number, check_path
from maskfx.runtime.cache.stores.entry_parts import FileParts, header_in, length_in
from maskfx.runtime.cache.stores.filesystem import DISK, Disk
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.cache.stores.store_entry import (
    DIGEST_SIZE,
    HEADER,
    PIECE,
    Buffer,
    CorruptEntry,
    EntryKey,
    StoreEntry,
    header_of,
    payload_prefix,
    read_payload,
)

SUFFIX = ".maskfx"
TEMPORARY = ".maskfx-tmp"
FOREIGN = (errno.ELOOP, errno.ENXIO)  # opening a link or a socket: not an entry
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """The result of `verify` or `gc`."""

    entries: int = 0  # that remain in the store
    nbytes: int = 0
    removed: int = 0
    freed: int = 0
    unreadable: int = 0  # neither read nor removed: no permission, input/output errors


@dataclass
class StoreCounters:
    """Counts of what one Store object did so far."""

    hits: int = 0
    misses: int = 0
    expired: int = 0
    corrupt: int = 0  # damaged or foreign, and removed where possible
    writes: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    removed: int = 0  # by `drop` and `gc`
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass
class Store:
    """Stores entries in one directory; safe between threads and processes.

    Args:
        root: The directory; it is created at the first write.
        disk: The file system operations.
        clock: Returns the time in seconds since the epoch.
        abandoned_after: Seconds after which a temporary file that no writer holds is removed.
        counters: Counts of what this object did.
    """

    root: Path
    disk: Disk = DISK
    clock: Callable[[], float] = time.time
    abandoned_after: float = 60.0
    counters: StoreCounters = field(default_factory=StoreCounters)

    def __post_init__(self) -> None:
        check_path("Store", "root", self.root)
        check_number("Store", "abandoned_after", self.abandoned_after, "seconds")
        self.root = Path(self.root)
        self.speed = ReadSpeed()  # of parts
        self._lock = Lock()
        # bytes of the smallest entry that could not be written, until one of as many is
        self._failing: int | None = None
        self._told = False  # whether a damaged file was logged

    def path(self, digest: bytes) -> Path:
        return self.root / (digest.hex() + SUFFIX)

    # Writing.

    def put(self, key: EntryKey, payload: Buffer) -> bool:
        """Store an entry; return False, and count it, if it can't be written.

        A failed write doesn't affect readers.
        """
        digest = key.digest()
        temporary = self.root / f"{digest.hex()}.{os.getpid()}.{os.urandom(8).hex()}{TEMPORARY}"
        try:
            self._write(temporary, digest, memoryview(payload).cast("B"))
        except BaseException as error:
            self._remove(temporary)
            if not isinstance(error, OSError):
                raise
            self._count(failed_writes=1)
            if self._failing is None:
                log.warning(
                    "%s: entries can't be written: %s; each further one is tried",
                    self.root,
                    error.strerror,
                )
            self._failing = min(len(payload), self._failing or len(payload))
            return False
        self._count(writes=1, bytes_written=HEADER.size + len(payload))
        if self._failing is not None and len(payload) >= self._failing:
            log.warning("%s: entries can be written again", self.root)
            self._failing = None
        return True

    def _write(self, temporary: Path, digest: bytes, payload: memoryview) -> None:
        disk = self.disk
        disk.make_directory(self.root)
        file = disk.create(temporary)
        try:
            disk.lock(file)  # shows `gc` of any process that the writer is alive
            disk.write(file, memoryview(header_of(digest, payload)))
            for start in range(0, len(payload), PIECE):
                disk.write(file, payload[start : start + PIECE])
            disk.set_used(file, self.clock())
            disk.sync(file)
            disk.rename(temporary, self.path(digest))
        finally:
            disk.close(file)
        disk.sync_directory(self.root)

    # Reading.

    def get(self, key: EntryKey, ttl: float | None = None) -> bytearray | None:
        """Return the payload, or None; with `ttl`, an entry unused for longer is removed."""
        digest = key.digest()
        path = self.path(digest)
        try:
            file = self.disk.open(path)
        except (FileNotFoundError, NotADirectoryError):
            self._count(misses=1)
            return None
        except OSError as error:
            if error.errno in FOREIGN:
                self._corrupt(path, None)
                self._count(misses=1)
            else:
                self._count(misses=1, failed_reads=1)
            return None
        try:
            if ttl is not None and self.clock() - self.disk.status(file).st_mtime > ttl:
                self._drop(path)
                self._count(misses=1, expired=1)
                return None
            payload = read_payload(self.disk, file, digest)
            self._touch(file)
        except CorruptEntry:
            self._corrupt(path, file)
            self._count(misses=1)
            return None
        except (OSError, MemoryError):
            self._count(misses=1, failed_reads=1)
            return None
        finally:
            self._close(file)
        self._count(hits=1, bytes_read=HEADER.size + len(payload))
        return payload

    def parts(self, key: EntryKey, ttl: float | None = None) -> FileParts | None:
        """Return the payload to be read in parts, or None: the same entries as of `get`.

        The hash of the whole isn't checked.
        """
        digest = key.digest()
        path = self.path(digest)
        try:
            file = self.disk.open(path)
        except OSError:
            return None
        try:
            status, header = self.disk.status(file), header_in(self.disk, file)
            length = length_in(header, digest) if stat.S_ISREG(status.st_mode) else None
            old = ttl is not None and self.clock() - status.st_mtime > ttl
            if old or length != status.st_size - HEADER.size:
                return None
            self._touch(file)
        except OSError:
            return None
        finally:
            self._close(file)
        self._count(hits=1)
        return FileParts(self.disk, path, header, length, self.speed, self._found_damaged)

    def touch(self, key: EntryKey) -> bool:
        """Mark an entry as used now; return True if it exists."""
        try:
            file = self.disk.open(self.path(key.digest()))
        except OSError:
            return False
        self._touch(file)
        self._close(file)
        return True

    def touch_all(self, keys: Sequence[EntryKey]) -> bool:
        """Mark entries as used now; return True if all of them exist."""
        return all(self.touch(key) for key in keys)

    def nbytes(self, key: EntryKey) -> int:
        """Return the size of an entry's file, or 0 if there is none."""
        return self._size(self.path(key.digest()))

    def drop(self, key: EntryKey) -> bool:
        """Remove an entry; return True if it was there."""
        return self._drop(self.path(key.digest()))

    # The whole directory.

    def ls(self) -> list[StoreEntry]:
        """List the entries, least recently used first, without reading their content."""
        found = []
        for path in self._names(SUFFIX):
            digest = _digest_in(path)
            try:
                status = self.disk.status(path)
            except OSError:  # removed meanwhile
                continue
            if digest is not None and stat.S_ISREG(status.st_mode):
                found.append(StoreEntry(digest, path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: (entry.used, entry.path))

    def total_bytes(self) -> int:
        """Return the size of all entries."""
        return sum(entry.nbytes for entry in self.ls())

    def prefix(self, entry: StoreEntry) -> bytes:
        """Return the first bytes of an entry's payload, unchecked, or b"" if it can't be read."""
        return payload_prefix(entry)

    def verify(self) -> Report:
        """Read every entry; remove damaged, foreign (but with our suffix) and abandoned files."""
        removed, freed = self._remove_abandoned()
        entries = nbytes = unreadable = 0
        for path in self._names(SUFFIX):
            size, digest = self._size(path), _digest_in(path)
            file: int | None = None
            try:
                file = self.disk.open(path)
                if digest is None:
                    raise CorruptEntry("the name is no digest")
                read_payload(self.disk, file, digest)
            except FileNotFoundError:
                continue
            except (CorruptEntry, OSError) as error:
                bad = isinstance(error, CorruptEntry) or error.errno in FOREIGN
                if bad and self._corrupt(path, file):
                    removed, freed = removed + 1, freed + size
                else:
                    unreadable += 1
            else:
                entries, nbytes = entries + 1, nbytes + size
            finally:
                if file is not None:
                    self._close(file)
        return Report(entries, nbytes, removed, freed, unreadable)

    def gc(
        self,
        budget_bytes: int | None = None,
        ttl: float | None = None,
        keep: Collection[bytes] = (),
    ) -> Report:
        """Remove entries unused for `ttl` seconds, then the least recently used over a budget.

        Entries whose digest is in `keep` stay. Files that dead writers left are removed too.
        """
        removed, freed = self._remove_abandoned()
        left = self.ls()
        total, now = sum(entry.nbytes for entry in left), self.clock()
        for entry in list(left):
            expired = ttl is not None and now - entry.used > ttl
            over = budget_bytes is not None and total > budget_bytes
            if (expired or over) and entry.digest not in keep and self._drop(entry.path):
                left.remove(entry)
                removed, freed = removed + 1, freed + entry.nbytes
                total -= entry.nbytes
        return Report(len(left), total, removed, freed)

    def trim(self, budget_bytes: int | None, ttl: float | None, keep: Collection[bytes]) -> None:
        """Do what `gc` does."""
        self.gc(budget_bytes, ttl, keep)

    def settle(self) -> bool:
        """Return True: every write is finished when `put` returns."""
        return True

    def _remove_abandoned(self) -> tuple[int, int]:
        """Remove old temporary files that no living writer holds; return (files, bytes)."""
        removed = freed = 0
        for path in self._names(TEMPORARY):
            try:
                status = self.disk.status(path)
                if time.time() - status.st_ctime < self.abandoned_after or self.disk.held(path):
                    continue
            except OSError:
                continue
            if self._drop(path):
                removed, freed = removed + 1, freed + status.st_size
        return removed, freed

    # Operations that may fail without harm.

    def _names(self, suffix: str) -> list[Path]:
        try:
            return sorted(p for p in self.disk.names(self.root) if p.name.endswith(suffix))
        except OSError:
            return []

    def _size(self, path: Path) -> int:
        try:
            return self.disk.status(path).st_size
        except OSError:
            return 0

    def _touch(self, file: int) -> None:
        try:
            self.disk.set_used(file, self.clock())
        except OSError:  # a read-only directory: only the order of use is lost
            return

    def _close(self, file: int) -> None:
        try:
            self.disk.close(file)
        except OSError:  # opened for reading: no data is lost
            return

    def _remove(self, path: Path) -> bool:
        try:
            self.disk.remove(path)
        except OSError:
            return False
        return True

    def _drop(self, path: Path) -> bool:
        if not self._remove(path):
            return False
        self._count(removed=1)
        return True

    def _found_damaged(self, path: Path) -> bool:
        return self._corrupt(path, None)

    def _corrupt(self, path: Path, file: int | None) -> bool:
        """Count a damaged file, and remove it unless it was replaced meanwhile."""
        self._count(corrupt=1)
        if not self._told:
            self._told = True
            log.warning(
                "%s: %s isn't what was written; such files are removed and counted, and what they "
                "held is recorded again; further ones aren't logged",
                self.root,
                path.name,
            )
        try:
            if file is not None and self.disk.status(file).st_ino != self.disk.status(path).st_ino:
                return False
        except OSError:
            return False
        return self._remove(path)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, amount in more.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)


def _digest_in(path: Path) -> bytes | None:
    """Return the digest in a file's name, or None."""
    stem = path.name.removesuffix(SUFFIX)
    try:
        digest = bytes.fromhex(stem)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_SIZE and digest.hex() == stem else None
