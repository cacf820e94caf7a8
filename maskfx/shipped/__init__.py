"""Small trained pipelines that ship with the package, one folder each.

A folder is a diffusers pipeline with a model card and a call.json (`pipelines/call_defaults.py`);
its `loras/` and `controlnets/` are trained for it. Knows nothing of how they were trained.

May import: errors. Begin with `__init__.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maskfx.errors import InputError

FOLDER = Path(__file__).resolve().parent
FIRST = "unet"
LORAS, CONTROLNETS = "loras", "controlnets"  # folders in that of a pipeline


def reference(
    name: str, *, controlnet: str | None = None, folder: Path = FOLDER, **options: Any
) -> Any:
    """Return a trained pipeline that inpaints 256x256 scenes, such as "unet".

    Args:
        name: The pipeline's name.
        controlnet: A ControlNet that was trained for it, such as "edges"; diffusers' class for both
            is returned then.
        folder: Where the pipelines are.
        options: Passed to diffusers' `from_pretrained`; `dtype` defaults to float32.
    """
    shipped = names(folder)
    if name not in shipped:
        there = ", ".join(repr(one) for one in shipped) or "none"
        raise InputError(
            f"reference({name!r}): no such trained pipeline in {folder}; there: {there}. "
            "A checkout builds them with: python -m training.build"
        )
    net_folder = None if controlnet is None else trained_for(name, CONTROLNETS, controlnet, folder)
    import diffusers
    import torch

    # weights are stored in 16 bits; without a dtype, each library chooses one for its components
    if "torch_dtype" not in options:
        options.setdefault("dtype", torch.float32)
    # a component that the pipeline lacks, such as a T5, must be passed as None
    index = json.loads((folder / name / "model_index.json").read_text(encoding="utf-8"))
    for part, kind in index.items():
        if kind == [None, None]:
            options.setdefault(part, None)
    load: Callable[..., Any] = diffusers.DiffusionPipeline.from_pretrained
    pipe = load(folder / name, **options)
    if net_folder is None:
        return pipe
    precision = {key: options[key] for key in ("dtype", "torch_dtype") if key in options}
    read: Callable[..., Any] = diffusers.ControlNetModel.from_pretrained
    net = read(net_folder, **precision)
    return diffusers.AutoPipelineForInpainting.from_pipe(pipe, controlnet=net, **precision)


def lora(name: str, of: str = FIRST, folder: Path = FOLDER) -> Path:
    """Return the LoRA file of a name, such as "sepia", that was trained for a pipeline."""
    return trained_for(of, LORAS, name, folder)


def loras(of: str = FIRST, folder: Path = FOLDER) -> Path:
    """Return the directory of a pipeline's LoRA files, as `Adapters` takes it."""
    return folder / of / LORAS


def trained_for(pipeline: str, kind: str, name: str, folder: Path = FOLDER) -> Path:
    """Return a LoRA's file or a ControlNet's folder; InputError if the pipeline has none so named.

    Args:
        pipeline: The pipeline's name.
        kind: `LORAS` or `CONTROLNETS`.
        name: Of the LoRA or the ControlNet.
        folder: Where the pipelines are.
    """
    found = {
        path.stem: path
        for path in sorted((folder / pipeline / kind).glob("*"))
        if path.suffix == ".safetensors" or (path / "config.json").exists()
    }
    if name not in found:
        there = ", ".join(map(repr, found)) or "none"
        raise InputError(f"{kind} of {pipeline!r}: none is named {name!r}; there: {there}")
    return found[name]


def names(folder: Path = FOLDER) -> list[str]:
    """Return the pipelines of a folder; the first is the default."""
    found = sorted(path.parent.name for path in folder.glob("*/model_index.json"))
    return sorted(found, key=lambda name: name != FIRST)
