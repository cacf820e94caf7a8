"""Settings that name a directory or an object store."""

from __future__ import annotations

from pathlib import Path

from maskfx.runtime.cache.stores.objects import is_url


def directory_or_url(value: object) -> object:
    """Return a URL as it is, and another text as a path; raise ValueError for that of a file."""
    found = Path(value) if isinstance(value, str) and not is_url(value) else value
    if isinstance(found, Path) and (file := first_existing(found)) is not None:
        raise ValueError(f"{file} is a file; give a directory")
    return found


def first_existing(path: Path) -> Path | None:
    """Return the file that a path runs into, or None where a directory is or can be made."""
    try:
        return next(
            (one for one in (path, *path.parents) if one.exists() and not one.is_dir()), None
        )
    except OSError:  # unreadable, which what opens it reports
        return None
