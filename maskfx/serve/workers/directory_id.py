"""The identity of a directory: two paths on two machines with the same one are the same directory.

It is a random text in a file of the directory, written by the first process that asks for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

NAME = "directory-id"
LETTERS = 64  # that are read


def directory_id(folder: Path) -> str:
    """Return the identity of a directory; a new one each time if it can't be written."""
    path, new = folder / NAME, secrets.token_hex(8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_once(path, new)
        with path.open() as file:
            return file.read(LETTERS)
    except (OSError, UnicodeError):
        return new


def write_once(path: Path, text: str) -> None:
    """Write a file as a whole, unless another process was faster."""
    fresh = path.with_name(f"{path.name}.{text}")
    try:
        fresh.write_text(text)
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
