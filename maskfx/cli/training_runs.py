"""Runs of a model by which something is fitted for it: their calls, and where the result goes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from maskfx.errors import InputError
from maskfx.serve.model_folder import found
from maskfx.serve.models.canvas import Canvas, resized
from maskfx.serve.models.pipeline_set import PipelineMember, PipelineSet
from maskfx.serve.models.warmup import arguments_of, scene
from maskfx.serve.request import Mask, Pixels

PROMPTS = (
    "a cat on a chair",
    "a red house by the sea",
    "a bowl of fruit",
    "a street at night in the rain",
)
SCENES = 4  # synthetic pictures that are edited: each has a template


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
    given = call_on(canvas, member, seed, steps, prompt, strength)
    if member is family.editor:
        given["image"] = canvas.image()
    if member.signature.has("mask_image"):
        given["mask_image"] = canvas.mask_image()
    return given


def edit_for(
    family: PipelineSet,
    member: PipelineMember,
    seed: int,
    steps: int | None,
    prompt: str,
    strength: float | None = None,
    pictures: Sequence[Pixels] = (),
) -> dict[str, object]:
    """Return a call that edits an ellipse of one of these pictures, or of synthetic ones."""
    size = family.size()
    if pictures:
        picture = resized(pictures[seed % len(pictures)], size)
    else:
        picture = scene(seed % SCENES, size)
    canvas = Canvas(picture, ellipse(seed, size), family.multiple)
    given = call_on(canvas, member, seed, steps, prompt, strength)
    return given | {"image": canvas.image(), "mask_image": canvas.mask_image()}


def ellipse(seed: int, size: tuple[int, int]) -> Mask:
    """Return a mask of 4 to 25 % of a picture, at a place that the seed draws."""
    width, height = size
    draw = np.random.default_rng(seed)
    across, down = draw.uniform(0.11, 0.28, 2)
    x, y = draw.uniform(across, 1 - across), draw.uniform(down, 1 - down)
    rows, columns = np.mgrid[:height, :width] + 0.5
    found: Mask = np.hypot((columns / width - x) / across, (rows / height - y) / down) <= 1
    return found


def call_on(
    canvas: Canvas,
    member: PipelineMember,
    seed: int,
    steps: int | None,
    prompt: str,
    strength: float | None,
) -> dict[str, object]:
    """Return a call's arguments, except for its picture and mask."""
    usual = member.signature.number("num_inference_steps")
    given = arguments_of(member, canvas, steps or int(usual or 20)) | {"prompt": prompt}
    if member.signature.has("generator"):
        given["generator"] = torch.Generator().manual_seed(seed)
    if strength is not None:
        if not member.signature.has("strength"):
            raise InputError(f"--strength: {type(member.plain).__name__} has no such argument")
        given["strength"] = strength
    return given
