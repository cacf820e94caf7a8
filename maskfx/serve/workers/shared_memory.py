"""Transfers pixels between front end and workers: in blocks of shared memory, else in frames.

A frame is a part of a ZeroMQ message. The front end creates, names and unlinks all blocks, so a
killed worker leaks nothing; blocks of a killed front end are removed by the next one. A block has
room for a job's input images and its result. Blocks are read and written, never mapped: a full or
truncated one raises OSError, where a mapping would raise SIGBUS. If there is no room, the pixels
are sent as frames.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from maskfx.serve.messages import PixelBlock
from maskfx.serve.workers.lock_file import PREFIX, LockFile, new_name, orphaned

SHARED = Path("/dev/shm")
SMALL = 1 << 16  # bytes up to which pixels are sent as frames instead of in a block
LOCK = ".lock"
WARN_SECONDS = 60.0
Bytes = NDArray[np.uint8]
Frame = memoryview | bytes

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PackedPixels:
    """A job's pixels, packed for sending."""

    blocks: tuple[PixelBlock, ...]
    frames: tuple[Frame, ...] = ()
    result: PixelBlock | None = None
    memory: str | None = None  # the block to drop when the job is answered or lost


class Blocks:
    """The front end's blocks of shared memory."""

    def __init__(self, directory: Path = SHARED, small: int = SMALL) -> None:
        self.directory, self._small = directory, small
        self._name, self._made = new_name(), 0
        self._held: set[str] = set()
        self._warned = -WARN_SECONDS
        self._lock: LockFile | None = None
        try:
            collect(directory)
            self._lock = LockFile(directory / (self._name + LOCK))
        except OSError as error:
            log.warning("shared_memory_unusable", error=error.strerror, instead="frames")

    def __len__(self) -> int:
        return len(self._held)

    def pack(self, arrays: Sequence[NDArray[np.uint8 | np.bool_]], room: int) -> PackedPixels:
        """Pack arrays for a worker, with `room` bytes for its result."""
        views = [flat(x) for x in arrays]
        total = sum(view.nbytes for view in views)
        if self._lock is not None and total + room > self._small:
            name = self._make(views, total + room)
            if name is not None:
                ends = np.cumsum([view.nbytes for view in views]).tolist()
                starts = [0, *ends]
                blocks = tuple(
                    PixelBlock(x.shape, name, at) for x, at in zip(arrays, starts, strict=False)
                )
                return PackedPixels(
                    blocks, (), PixelBlock((room,), name, total) if room else None, name
                )
        return PackedPixels(tuple(PixelBlock(x.shape) for x in arrays), tuple(views))

    def read(self, block: PixelBlock, frames: Iterator[Frame]) -> Bytes:
        """Read the pixels that a worker sent; ValueError if they don't match the block."""
        if block.memory is not None and block.memory not in self._held:
            raise ValueError("the block isn't one that is lent")
        return read(self.directory, block, frames)

    def drop(self, name: str | None) -> None:
        """Unlink a block; unknown names are ignored."""
        if name is not None and name in self._held:
            self._held.remove(name)
            (self.directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        for name in tuple(self._held):
            self.drop(name)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make(self, views: Sequence[memoryview], size: int) -> str | None:
        """Create a block and write the views into it; None if there is no room or descriptor."""
        self._made += 1
        name = f"{self._name}-{self._made}"
        path = self.directory / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            self._warn(error, size)
            return None
        try:
            os.posix_fallocate(descriptor, 0, size)  # reserves the room of the result, too
            at = 0
            for view in views:
                write_all(descriptor, view, at)
                at += view.nbytes
        except OSError as error:
            path.unlink(missing_ok=True)
            self._warn(error, size)
            return None
        finally:
            os.close(descriptor)
        self._held.add(name)
        return name

    def _warn(self, error: OSError, size: int) -> None:
        """Log that shared memory is unavailable, at most once in `WARN_SECONDS`."""
        if time.monotonic() - self._warned >= WARN_SECONDS:
            self._warned = time.monotonic()
            log.warning("no_shared_memory", error=error.strerror, bytes=size, instead="frames")


def collect(directory: Path) -> int:
    """Remove the blocks of dead front ends, and return their number."""
    removed = 0
    for lock in directory.glob(f"{PREFIX}*{LOCK}"):
        if orphaned(lock):
            for path in directory.glob(f"{lock.name.removesuffix(LOCK)}-*"):
                path.unlink(missing_ok=True)
                removed += 1
            lock.unlink(missing_ok=True)
    return removed


def read(directory: Path, block: PixelBlock, frames: Iterator[Frame]) -> Bytes:
    """Read pixels from a block or the next frame; ValueError if their size doesn't match."""
    wanted = prod(block.shape)
    if wanted < 0 or any(side < 0 for side in block.shape) or block.at < 0:
        raise ValueError(f"pixels of shape {block.shape} at {block.at}")
    if block.memory is None:
        got = np.frombuffer(next(frames, b""), np.uint8)
    else:
        got = np.empty(wanted, np.uint8)
        got = got[: read_all(directory / safe(block.memory), flat(got), block.at)]
    if got.size != wanted:
        raise ValueError(f"{got.size} bytes of pixels came, not the {wanted} of {block.shape}")
    return got.reshape(block.shape)


def write(directory: Path, room: PixelBlock | None, pixels: Bytes) -> PixelBlock | None:
    """Write a result into its reserved room; return None if it doesn't fit or the room is gone."""
    if room is None or room.memory is None or pixels.nbytes > prod(room.shape):
        return None
    try:
        descriptor = os.open(directory / safe(room.memory), os.O_WRONLY)
    except OSError:
        return None  # the front end has dropped the block and doesn't expect the result any more
    try:
        write_all(descriptor, flat(pixels), room.at)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return PixelBlock(pixels.shape, room.memory, room.at)


def flat(array: NDArray[np.uint8 | np.bool_]) -> memoryview:
    """Return an array's bytes, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def safe(name: str) -> str:
    if not name.startswith(PREFIX) or "/" in name:
        raise ValueError("a block's name that no front makes")
    return name


def read_all(path: Path, into: memoryview, at: int) -> int:
    """Fill a buffer from an offset in a file; return the number of bytes read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < into.nbytes:
            count = os.preadv(descriptor, [into[done:]], at + done)
            if count == 0:
                break
            done += count
        return done
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(descriptor, data[done:], at + done)
