"""Disk: the file system operations that the store uses, one method each.

Tests pass the store a disk that fails, or dies, in any of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path


class Disk:
    """The file system of this machine; every method raises OSError if it fails."""

    def make_directory(self, path: Path) -> None:
        try:
            os.makedirs(path, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error

    def create(self, path: Path) -> int:
        """Create a new file, open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def lock(self, file: int) -> None:
        """Lock the file until it is closed or the process ends, even by a crash."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                raise

    def held(self, path: Path) -> bool:
        """Return True if a living process holds the lock of the file."""
        file = self.open(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def write(self, file: int, data: memoryview) -> None:
        """Write all of the data; a partial write is continued."""
        while data:
            data = data[self.write_some(file, data) :]

    def write_some(self, file: int, data: memoryview) -> int:
        return os.write(file, data)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def sync_directory(self, path: Path) -> None:
        """Make a rename durable; on file systems that can't, the entry exists nevertheless."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.fsync(file)
        except OSError:
            return
        finally:
            os.close(file)

    def open(self, path: Path) -> int:
        """Open an existing file for reading; doesn't wait for a pipe, doesn't follow a link."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(path, flags)

    def read(self, file: int, into: memoryview) -> int:
        """Fill a buffer and return the bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(into) and (count := os.readv(file, [into[done:]])):
            done += count
        return done

    def read_at(self, file: int, into: memoryview, offset: int) -> int:
        """Fill a buffer from a place in the file and return the bytes read, fewer at its end."""
        done = 0
        while done < len(into) and (count := os.preadv(file, [into[done:]], offset + done)):
            done += count
        return done

    def status(self, file: int | Path) -> os.stat_result:
        return os.fstat(file) if isinstance(file, int) else os.lstat(file)

    def is_file(self, file: int) -> bool:
        return stat.S_ISREG(os.fstat(file).st_mode)

    def set_used(self, file: int, seconds: float) -> None:
        os.utime(file, ns=(int(seconds * 1e9), int(seconds * 1e9)))

    def names(self, path: Path) -> list[Path]:
        with os.scandir(path) as entries:
            return [path / entry.name for entry in entries]

    def remove(self, path: Path) -> None:
        os.unlink(path)


DISK = Disk()
