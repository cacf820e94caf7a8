"""A file that its creator keeps locked: if another process gets the lock, the creator is dead.

A process id can't show that: ids are reused, and containers that share a directory don't share
ids. The kernel releases locks with their process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

PREFIX = "maskfx-"


def new_name() -> str:
    """Return a unique, unguessable name with this process's id."""
    return f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


class LockFile:
    """A locked file; closing releases the lock and removes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fresh = path.with_name(path.name + ".new")  # renamed once it is locked
        self._lock: int | None = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(path)

    def close(self) -> None:
        if self._lock is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def orphaned(path: Path) -> bool:
    """Return True if the owner of a locked file is dead.

    Returns False for files that can't be opened and for files of other users: in a world-writable
    directory another user could otherwise create a file that makes this process remove files in
    use.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
