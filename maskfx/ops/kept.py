"""The folder of what operators measured or compiled on this machine.

`MASKFX_KERNEL_CACHE` names it; `~/.cache/maskfx` by default.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "MASKFX_KERNEL_CACHE"


def kept_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(FOLDER) or Path(base) / "maskfx")
