"""The identity of a directory: two paths on two machines with the same one are the same directory.

It is a random text in a file of the directory, written by the first process that asks for it. An
object store has such an object.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from maskfx.runtime.cache.stores.bounded_calls import open_remote

NAME = "directory-id"
LETTERS = 64  # that are read


def directory_id(place: Path | str) -> str:
    """Return the identity of a directory or URL; a new one each time if it can't be written."""
    new = secrets.token_hex(8)
    try:
        return id_below(place, new) if isinstance(place, str) else id_in(place, new)
    except (OSError, UnicodeError):
        return new


def id_below(url: str, new: str) -> str:
    """Return the identity of an object store; `new`, if it has none yet."""
    remote = open_remote(url)
    found = remote.reads.run(lambda: remote.objects.get(NAME, LETTERS))
    if found is None:
        if remote.writes.run(lambda: remote.objects.put_new(NAME, new.encode())):
            return new
        found = remote.reads.run(lambda: remote.objects.get(NAME, LETTERS))
    return new if found is None else found[1].decode()


def id_in(folder: Path, new: str) -> str:
    """Return the identity of a directory; `new`, if it has none yet."""
    path = folder / NAME
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_once(path, new)
    with path.open() as file:
        return file.read(LETTERS)


def write_once(path: Path, text: str) -> None:
    """Write a file as a whole, unless another process was faster."""
    fresh = path.with_name(f"{path.name}.{text}")
    try:
        fresh.write_text(text)
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
