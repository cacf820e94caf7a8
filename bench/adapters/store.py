"""A store that is as slow as a network: read functions of the loading processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

SECONDS = "MASKFX_BENCH_STORE"  # environment variable: seconds for one file, whatever its size


def read(path: str) -> bytes:
    time.sleep(float(os.environ.get(SECONDS, "0")))
    return Path(path).read_bytes()
