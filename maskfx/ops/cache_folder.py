"""The folder of what operators measured or compiled on this machine.

`MASKFX_KERNEL_CACHE` names it; `~/.cache/maskfx` by default, or `maskfx` in an absolute
`XDG_CACHE_HOME`.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "MASKFX_KERNEL_CACHE"


def kept_folder() -> Path:
    """Return the folder; RuntimeError if it is in the home directory and there is none."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "maskfx"
