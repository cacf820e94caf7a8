"""Images of templates: held in memory by the front end, and in `cache_dir` if that is set.

There, an image is one file that is written as a whole; a file that fails its check is removed.
Knows nothing of the recordings that workers make of templates.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import structlog
import xxhash

from maskfx.runtime.cache.stores.small_files import files_of
from maskfx.serve.errors import ApiError, no_template
from maskfx.serve.request import Pixels, TemplateInfo

FOLDER, ENDING = "pictures", ".picture"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
MOST_BYTES = 1 << 30  # of pixels in memory, all templates together

log = structlog.get_logger(__name__)


class StoredImage(msgspec.Struct, frozen=True):
    """The image of a template as a file."""

    id: str
    created: int  # Unix time
    height: int
    width: int
    pixels: bytes
    digest: bytes


@dataclass(frozen=True, eq=False)
class TemplateImage:
    """The image of a template in memory."""

    id: str
    pixels: Pixels
    created: int

    def info(self, bytes: dict[str, int], workers: tuple[str, ...]) -> TemplateInfo:
        """Describe the template: its bytes by tier, and the workers that have its recording."""
        height, width, _ = self.pixels.shape
        return TemplateInfo(self.id, width, height, self.created, bytes=bytes, workers=workers)


class TemplateImages:
    """The images of all templates."""

    def __init__(self, cache_dir: Path | str | None, most_bytes: int = MOST_BYTES) -> None:
        self._files = files_of(cache_dir)
        self._most = most_bytes
        self._leaves: dict[str, TemplateImage] = {}
        self._looking: set[asyncio.Task[None]] = set()
        self._naming = threading.Lock()  # keeps file names consistent with memory
        self._read()

    def __iter__(self) -> Iterator[TemplateImage]:
        return iter(tuple(self._leaves.values()))

    def __contains__(self, id: str) -> bool:
        return id in self._leaves

    def report_unknown(self, ids: Iterable[str], report: Callable[[str], None]) -> None:
        """Call `report`, soon, for each template that is neither in memory nor in `cache_dir`.

        A template may be only there if another server wrote it or it couldn't be read.
        """
        task = asyncio.get_running_loop().create_task(self._report(list(ids), report))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _report(self, ids: list[str], report: Callable[[str], None]) -> None:
        for id in ids:
            if id not in self and not await asyncio.to_thread(self._is_written, id):
                report(id)

    def _is_written(self, id: str) -> bool:
        try:
            return self._files is not None and self._files.exists(file_of(id))
        except OSError:  # it may be there
            return True

    def get(self, id: str) -> TemplateImage:
        leaf = self._leaves.get(id)
        if leaf is None:
            raise no_template(id)
        return leaf

    def check(self, id: str, pixels: Pixels) -> None:
        """Raise ApiError if the image can't be stored; call before recording the template."""
        if NAME.fullmatch(id) is None:
            message = "a template's name has 1 to 128 letters, digits, '-', '_' and '.'"
            raise ApiError("invalid_value", message, param="id")
        held = sum(leaf.pixels.nbytes for leaf in self if leaf.id != id)
        if held + pixels.nbytes > self._most:
            message = "there is no room for one more template; delete some"
            raise ApiError("out_of_resources", message, retry_after=60.0)

    def keep(self, id: str, pixels: Pixels, created: int) -> TemplateImage:
        self.check(id, pixels)
        self._leaves[id] = leaf = TemplateImage(id, pixels, created)
        return leaf

    def write(self, leaf: TemplateImage) -> None:
        """Write an image to `cache_dir`. Blocking; callable from any thread.

        Failures such as a full disk are logged as warnings, as the image is in memory.
        """
        if self._files is None:
            return
        with self._naming:
            if self._leaves.get(leaf.id) is not leaf:  # deleted or replaced in the meantime
                return
            try:
                self._files.write(file_of(leaf.id), encoded(leaf))
            except OSError as error:
                log.warning("picture_not_written", template=leaf.id, error=error.strerror)

    def forget(self, id: str) -> None:
        """Delete an image from memory and `cache_dir`; waits while one is written.

        Raises ApiError template_not_found if there is none.
        """
        with self._naming:
            self.get(id)
            del self._leaves[id]
            if self._files is not None:
                self._files.remove(file_of(id))
                self._files.settle()

    def _read(self) -> None:
        files, held = self._files, 0
        if files is None:
            return
        for name in self._names():
            try:
                leaf = decoded(name, files.read(name))
            except OSError as error:  # the file may be intact: keep it
                log.warning("picture_unreadable", file=name, error=error.strerror)
                continue
            if leaf is None:
                log.warning("picture_removed", file=name, why="not what was written")
                files.remove(name)
            elif held + leaf.pixels.nbytes <= self._most:
                held += leaf.pixels.nbytes
                self._leaves[leaf.id] = leaf
        files.remove_unfinished(FOLDER)

    def _names(self) -> list[str]:
        assert self._files is not None, "only files have names"
        try:
            return [name for name in self._files.names(FOLDER) if name.endswith(ENDING)]
        except OSError as error:
            log.warning("pictures_unreadable", error=error.strerror)
            return []


def file_of(id: str) -> str:
    return f"{FOLDER}/{id}{ENDING}"


def encoded(leaf: TemplateImage) -> bytes:
    height, width, _ = leaf.pixels.shape
    pixels = leaf.pixels.tobytes()
    digest = xxhash.xxh3_128_digest(pixels)
    return msgspec.msgpack.encode(StoredImage(leaf.id, leaf.created, height, width, pixels, digest))


def decoded(name: str, data: bytes) -> TemplateImage | None:
    """Read an image file; return None if it is damaged or its name doesn't match its id."""
    try:
        kept = msgspec.msgpack.decode(data, type=StoredImage)
    except msgspec.MsgspecError:
        return None
    whole = min(kept.height, kept.width) > 0
    whole = whole and len(kept.pixels) == kept.height * kept.width * 3
    named = NAME.fullmatch(kept.id) is not None and name == file_of(kept.id)
    if not (whole and named) or xxhash.xxh3_128_digest(kept.pixels) != kept.digest:
        return None
    pixels = np.frombuffer(kept.pixels, np.uint8).reshape(kept.height, kept.width, 3)
    return TemplateImage(kept.id, pixels, kept.created)
