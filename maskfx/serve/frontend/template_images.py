"""Images of templates: held in memory by the front end, and on disk if `cache_dir` is set.

On disk, an image is one file that is written atomically; a file that fails its check is removed.
Knows nothing of the recordings that workers make of templates.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import structlog
import xxhash

from maskfx.serve.errors import ApiError
from maskfx.serve.request import Pixels, TemplateInfo

FOLDER, ENDING, UNFINISHED = "pictures", ".picture", ".unfinished"
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

    def __init__(self, cache_dir: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self._folder = None if cache_dir is None else cache_dir / FOLDER
        self._most = most_bytes
        self._leaves: dict[str, TemplateImage] = {}
        self._naming = threading.Lock()  # keeps file names on disk consistent with memory
        if self._folder is not None:
            self._read(self._folder)

    def __iter__(self) -> Iterator[TemplateImage]:
        return iter(tuple(self._leaves.values()))

    def __contains__(self, id: str) -> bool:
        return id in self._leaves

    def knows(self, id: str) -> bool:
        """Return True if the template is in memory or on disk.

        A template may be only on disk if another server wrote it or it couldn't be read.
        """
        on_disk = self._folder is not None and (self._folder / (id + ENDING)).exists()
        return id in self or on_disk

    def get(self, id: str) -> TemplateImage:
        leaf = self._leaves.get(id)
        if leaf is None:
            message = "there is no such template; register it first"
            raise ApiError("template_not_found", message, param="template_id")
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
        with self._naming:
            self._leaves[id] = leaf = TemplateImage(id, pixels, created)
        return leaf

    def write(self, leaf: TemplateImage) -> None:
        """Write an image to disk. Blocking; callable from any thread.

        Failures such as a full disk are logged as warnings, as the image is in memory.
        """
        if self._folder is None:
            return
        path = self._folder / (leaf.id + ENDING)
        fresh = path.with_name(f"{leaf.id}-{secrets.token_hex(4)}{UNFINISHED}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with fresh.open("xb") as file:
                file.write(encoded(leaf))
                file.flush()
                os.fsync(file.fileno())
            with self._naming:
                if self._leaves.get(leaf.id) is leaf:
                    fresh.rename(path)
                else:  # deleted or replaced in the meantime
                    fresh.unlink()
        except OSError as error:
            log.warning("picture_not_written", template=leaf.id, error=error.strerror)
            remove(fresh)

    def forget(self, id: str) -> None:
        """Delete an image from memory and disk.

        Raises ApiError template_not_found if there is none.
        """
        self.get(id)
        with self._naming:
            del self._leaves[id]
            if self._folder is not None:
                remove(self._folder / (id + ENDING))

    def _read(self, folder: Path) -> None:
        held = 0
        for path in sorted(folder.glob("*" + ENDING)):
            try:
                leaf = decoded(path)
            except OSError as error:  # the file may be intact: keep it
                log.warning("picture_unreadable", file=path.name, error=error.strerror)
                continue
            if leaf is None:
                log.warning("picture_removed", file=path.name, why="not what was written")
                remove(path)
            elif held + leaf.pixels.nbytes <= self._most:
                held += leaf.pixels.nbytes
                self._leaves[leaf.id] = leaf
        for path in folder.glob("*" + UNFINISHED):
            remove(path)


def remove(path: Path) -> None:
    """Delete a file, ignoring OS errors."""
    with contextlib.suppress(OSError):
        path.unlink()


def encoded(leaf: TemplateImage) -> bytes:
    height, width, _ = leaf.pixels.shape
    pixels = leaf.pixels.tobytes()
    digest = xxhash.xxh3_128_digest(pixels)
    return msgspec.msgpack.encode(StoredImage(leaf.id, leaf.created, height, width, pixels, digest))


def decoded(path: Path) -> TemplateImage | None:
    """Read an image file; return None if it is damaged or its name doesn't match its id."""
    try:
        kept = msgspec.msgpack.decode(path.read_bytes(), type=StoredImage)
    except msgspec.MsgspecError:
        return None
    whole = min(kept.height, kept.width) > 0
    whole = whole and len(kept.pixels) == kept.height * kept.width * 3
    named = NAME.fullmatch(kept.id) is not None and path.name == kept.id + ENDING
    if not (whole and named) or xxhash.xxh3_128_digest(kept.pixels) != kept.digest:
        return None
    pixels = np.frombuffer(kept.pixels, np.uint8).reshape(kept.height, kept.width, 3)
    return TemplateImage(kept.id, pixels, kept.created)
