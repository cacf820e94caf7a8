"""SmallFiles: files beside the entries of a store, in its directory or below its URL.

They are written as a whole. Failures raise OSError; those of an object store come in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from maskfx.runtime.cache.stores.bounded_calls import (
    RemoteAccess,
    Unavailable,
    loop_of,
    open_remote,
)

UNFINISHED = ".unfinished"
MOST = 256 << 20  # bytes of a file in an object store that is read
LISTING = 4  # times the time of one call


class SmallFiles(Protocol):
    """Named files; a name may have folders: `pictures/cat.picture`."""

    def names(self, folder: str) -> list[str]:
        """Return the sorted names of the files in a folder and below; none if it is absent."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None: ...

    def write_later(self, name: str, data: bytes, failed: Callable[[OSError], None]) -> None:
        """Write a file, in the background if that may take long."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or start to; failures are ignored."""
        ...

    def exists(self, name: str) -> bool: ...

    def remove_unfinished(self, folder: str) -> None:
        """Remove what writers that died left in a folder."""
        ...

    def settle(self) -> None:
        """Wait until what was begun is done."""
        ...


class LocalFiles:
    """The files of a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self, folder: str) -> list[str]:
        found = (self.root / folder).rglob("*")
        kept = (path for path in found if path.suffix != UNFINISHED and path.is_file())
        return sorted(path.relative_to(self.root).as_posix() for path in kept)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        path = self.root / name
        fresh = path.with_name(f"{path.stem}-{secrets.token_hex(4)}{UNFINISHED}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise

    def write_later(self, name: str, data: bytes, failed: Callable[[OSError], None]) -> None:
        try:
            self.write(name, data)
        except OSError as error:
            failed(error)

    def remove(self, name: str) -> None:
        path = self.root / name
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            if path.parent.parent != self.root:
                path.parent.rmdir()  # fails while it has other files

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def settle(self) -> None:
        return

    def remove_unfinished(self, folder: str) -> None:
        for path in (self.root / folder).glob("*" + UNFINISHED):
            with contextlib.suppress(OSError):
                path.unlink()


class RemoteFiles:
    """The files below the URL of an object store; writes and removals keep their order."""

    def __init__(self, access: RemoteAccess) -> None:
        self._access = access
        self._turn = asyncio.Lock()

    def names(self, folder: str) -> list[str]:
        objects = self._access.objects
        found = self._access.reads.run(lambda: objects.names(folder), LISTING)
        return sorted(info.name for info in found)

    def read(self, name: str) -> bytes:
        found = self._access.reads.run(lambda: self._access.objects.get(name, MOST), 4)
        if found is None:
            raise FileNotFoundError(name)
        return found[1]

    def write(self, name: str, data: bytes) -> None:
        self._start(self._write(name, data)).result()

    def write_later(self, name: str, data: bytes, failed: Callable[[OSError], None]) -> None:
        async def write() -> None:
            try:
                await self._write(name, data)
            except OSError as error:
                failed(error)

        self._start(write())

    def remove(self, name: str) -> None:
        self._start(self._remove(name))

    def exists(self, name: str) -> bool:
        return self._access.reads.run(lambda: self._access.objects.status(name)) is not None

    def remove_unfinished(self, folder: str) -> None:
        return  # an object is visible once it is whole

    def settle(self) -> None:
        self._start(self._pass()).result()

    async def _write(self, name: str, data: bytes) -> None:
        async with self._turn:
            await self._access.writes.run_in_loop(lambda: self._access.objects.put(name, data), 4)

    async def _remove(self, name: str) -> None:
        async with self._turn:
            with contextlib.suppress(Unavailable):
                await self._access.writes.run_in_loop(lambda: self._access.objects.remove(name))

    async def _pass(self) -> None:
        async with self._turn:
            return

    def _start(self, call: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop_of(os.getpid()))


def files_of(place: Path | str | None) -> SmallFiles | None:
    """Return the files of a directory or a URL; None without one."""
    if place is None:
        return None
    return LocalFiles(place) if isinstance(place, Path) else RemoteFiles(open_remote(place))
