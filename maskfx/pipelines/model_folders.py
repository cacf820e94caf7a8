"""The folders of models: what was fitted or trained for a model is kept beside its weights."""

from __future__ import annotations

from pathlib import Path

from torch import nn


def model_folders(module: nn.Module) -> list[Path]:
    """Return the folder that a module was loaded from and the one around it; or nothing."""
    name = getattr(getattr(module, "config", None), "_name_or_path", None)
    if not isinstance(name, str) or not name or not Path(name).is_dir():
        return []
    return [Path(name), Path(name).parent]
