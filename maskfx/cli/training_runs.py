"""Runs of a model by which something is fitted for it: their calls, and where the result goes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from maskfx.errors import InputError
from maskfx.serve.model_folder import found
from maskfx.serve.models.canvas import Canvas
from maskfx.serve.models.pipeline_set import PipelineMember, PipelineSet
from maskfx.serve.models.warmup import arguments_of, scene

PROMPTS = (
    "a cat on a chair",
    "a red house by the sea",
    "a bowl of fruit",
    "a street at night in the rain",
)


def check_out(path: Path) -> None:
    """Raise InputError unless files can be written beside `path`; makes their folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        wrong = "it is a directory" if path.is_dir() else None
    except OSError as error:
        wrong = str(error.strerror)
    if wrong is not None:
        raise InputError(f"--out {path}: can't be written: {wrong}; give another path")


def beside(model: str | None, command: str, file: str) -> Path:
    """Return a file's path in the model's folder."""
    where = found(model)
    if not isinstance(where, Path):
        raise InputError(f"{command} {model}: it isn't a folder; give the file to write with --out")
    return where / file


def arguments_for(
    family: PipelineSet,
    member: PipelineMember,
    seed: int,
    steps: int | None,
    prompt: str,
    strength: float | None = None,
) -> dict[str, object]:
    """Return a call that makes a whole picture."""
    width, height = family.size()
    canvas = Canvas(scene(seed, (width, height)), np.ones((height, width), bool), family.multiple)
    usual = member.signature.number("num_inference_steps")
    given = arguments_of(member, canvas, steps or int(usual or 20)) | {"prompt": prompt}
    if member.signature.has("generator"):
        given["generator"] = torch.Generator().manual_seed(seed)
    if member is family.editor:
        given["image"] = canvas.image()
    if member.signature.has("mask_image"):
        given["mask_image"] = canvas.mask_image()
    if strength is not None:
        if not member.signature.has("strength"):
            raise InputError(f"--strength: {type(member.plain).__name__} has no such argument")
        given["strength"] = strength
    return given
