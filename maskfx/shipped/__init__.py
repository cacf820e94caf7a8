"""Small trained pipelines that ship with the package, one folder each.

A folder is a diffusers pipeline with a model card and a call.json (`pipelines/call_defaults.py`).
Knows nothing of how it was trained.

May import: errors. Begin with `__init__.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from maskfx.errors import InputError

FOLDER = Path(__file__).resolve().parent
FIRST = "unet"


def reference(name: str, *, folder: Path = FOLDER, **options: Any) -> Any:
    """Return a trained pipeline that inpaints 256x256 scenes, such as "unet".

    `options` are passed to diffusers' `from_pretrained`; `dtype` defaults to float32.
    """
    shipped = names(folder)
    if name not in shipped:
        there = ", ".join(repr(one) for one in shipped) or "none"
        raise InputError(
            f"reference({name!r}): no such trained pipeline in {folder}; there: {there}. "
            "A checkout builds them with: python -m training.build"
        )
    import diffusers

    # weights are stored in 16 bits; without a dtype, each library chooses one for its components
    if "torch_dtype" not in options:
        options.setdefault("dtype", torch.float32)
    # a component that the pipeline lacks, such as a T5, must be passed as None
    index = json.loads((folder / name / "model_index.json").read_text(encoding="utf-8"))
    for part, kind in index.items():
        if kind == [None, None]:
            options.setdefault(part, None)
    load: Any = diffusers.DiffusionPipeline.from_pretrained
    return load(folder / name, **options)


def names(folder: Path = FOLDER) -> list[str]:
    """Return the pipelines of a folder; the first is the default."""
    found = sorted(path.parent.name for path in folder.glob("*/model_index.json"))
    return sorted(found, key=lambda name: name != FIRST)
