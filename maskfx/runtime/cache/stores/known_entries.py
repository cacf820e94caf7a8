"""KnownEntries: what a process has seen of a remote store's entries a short while ago."""

from __future__ import annotations

import time
from threading import Lock

from maskfx.ir.lru import LruCache

FRESH = 10.0  # seconds for which an entry that was seen counts as there
KNOWN = 1 << 16  # entries whose size and use are remembered


class KnownEntries:
    """Sizes of entries, and when this process noted their last use in the store; thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._seen = LruCache[bytes, tuple[int, float]](KNOWN)  # size, and when it was seen
        self._noted = LruCache[bytes, float](KNOWN)

    def see(self, digest: bytes, nbytes: int) -> None:
        with self._lock:
            self._seen.put(digest, (nbytes, time.monotonic()))

    def forget(self, digest: bytes) -> None:
        """Forget an entry's size; it is written or removed now."""
        with self._lock:
            self._seen.remove(digest)

    def size(self, digest: bytes) -> int | None:
        """Return the size of an entry that was seen `FRESH` seconds ago or later, else None."""
        with self._lock:
            seen = self._seen.get(digest)
        return seen[0] if seen is not None and time.monotonic() - seen[1] <= FRESH else None

    def note(self, digest: bytes, recent: float = 0.0) -> bool:
        """Note a use now; return False if one of the last `recent` seconds is noted already."""
        now = time.monotonic()
        with self._lock:
            noted = self._noted.get(digest)
            if noted is not None and now - noted < recent:
                return False
            self._noted.put(digest, now)
            return True
