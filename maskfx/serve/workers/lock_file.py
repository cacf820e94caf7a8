"""A file kept locked by the process that made it: whoever gets the lock knows its owner is dead.

A process id alone can't say that: ids come round again, and containers that share a directory
don't share ids. Locks end with their process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

PREFIX = "maskfx-"


def new_name() -> str:
    """A name for something of this process, that nobody guesses or has."""
    return f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


class LockFile:
    """A locked file. Closing gives it up and removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fresh = path.with_name(path.name + ".new")  # nobody sees it before it is locked
        self._lock: int | None = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(path)

    def close(self) -> None:
        if self._lock is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def orphaned(path: Path) -> bool:
    """Whether the owner of a locked file is dead. Of files that can't be opened: no.

    Nor of other users', in directories that all may write to: with a file named as if it were ours
    one could have what is in use removed.
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
