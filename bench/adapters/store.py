"""A store that is as slow as a network: the read function of the loading processes."""

from __future__ import annotations

import time
from pathlib import Path


def slow_down(path: Path, seconds: float) -> None:
    """Let every read of a file take this time, whatever its size."""
    delay(path).write_text(str(seconds))


def delay(path: str | Path) -> Path:
    return Path(f"{path}.seconds")


def read(path: str) -> bytes:
    time.sleep(float(delay(path).read_text()))
    return Path(path).read_bytes()
