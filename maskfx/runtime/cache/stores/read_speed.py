"""ReadSpeed: seconds that reads from a store take by their bytes, from the latest ones."""

from __future__ import annotations

from collections import deque
from threading import Lock

import numpy as np

from maskfx.runtime.cache.stores.read_time import ReadTime

KEPT = 64  # reads
ENOUGH = 1 << 18  # bytes of reads from which seconds can be predicted
DIGITS = 0.1  # in predictions: seconds are rounded to powers of about 10 %


class ReadSpeed:
    """Predicts the seconds of a read of rows as a line over its bytes; thread-safe.

    `time` also has the reads of whole entries.
    """

    def __init__(self) -> None:
        self.time = ReadTime()
        self._lock = Lock()
        self._reads: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._line: tuple[float, float] | None = None

    def add(self, nbytes: int, seconds: float) -> None:
        """Take a read into account."""
        self.time.add(nbytes)
        with self._lock:
            self._reads.append((nbytes, max(seconds, 1e-9)))
            self._line = None

    @property
    def line(self) -> tuple[float, float] | None:
        """Return the seconds per read and per byte, rounded; None before enough is read."""
        with self._lock:
            if self._line is None and sum(nbytes for nbytes, _ in self._reads) >= ENOUGH:
                self._line = fitted(list(self._reads))
            return self._line

    def describe(self) -> str:
        """Return the bandwidth in words."""
        line = self.line
        if line is None:
            return "not measured yet"
        return f"{1e-6 / line[1]:.0f} MB/s" if line[1] else "as fast as memory"


def fitted(reads: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the line of least relative error through reads, with an offset and a slope from 0."""
    nbytes, seconds = np.array(reads, dtype=np.float64).T
    weights = 1 / seconds**2
    total, size = weights.sum(), weights @ nbytes
    square, spread = weights @ nbytes**2, weights.sum() * (weights @ nbytes**2) - size**2
    taken, both = weights @ seconds, weights @ (nbytes * seconds)
    slope = float((total * both - size * taken) / spread) if spread > 1e-9 * square else -1.0
    fixed = float((taken - slope * size) / total)
    if slope < 0 or fixed < 0:  # reads of one size, or the offset is lost in the noise
        slope, fixed = float(both / square), 0.0
    return rounded(fixed), rounded(slope)


def rounded(value: float) -> float:
    return float(np.exp(np.round(np.log(value) / DIGITS) * DIGITS)) if value > 0 else 0.0
