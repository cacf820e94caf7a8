"""Try out a model: explain what was compiled, and compare dense and masked edits in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

import maskfx
from maskfx.errors import InputError
from maskfx.serve.config import ServeSettings
from maskfx.serve.models.canvas import Canvas
from maskfx.serve.models.pipeline_model import PipelineModel
from maskfx.serve.models.pipeline_set import PipelineMember, PipelineSet
from maskfx.serve.models.warmup import arguments_of, scene
from maskfx.serve.request import Mask, Pixels

Found = TypeVar("Found")


def explain_model(settings: ServeSettings, mask_ratio: float) -> int:
    """Print the output of `maskfx.explain` for a model that has made one edit."""
    check_ratio(mask_ratio)
    model = loaded(settings)
    print(maskfx.explain(model.family.main.pipe, mask_ratio))
    model.close()
    return 0


def bench_model(
    settings: ServeSettings, mask_ratio: float, steps: int, size: int | None, rounds: int
) -> int:
    """Print the times of dense and masked edits, and the difference of their images."""
    check_ratio(mask_ratio)
    for name, value in (("--steps", steps), ("--rounds", rounds), ("--size", size)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value}: give 1 or more")
    model = loaded(settings)
    family, editor = model.family, model.family.editor
    if editor is None:
        raise InputError(
            f"bench: {type(family.main.plain).__name__} has no image input, so it can't edit; give "
            "a model that does"
        )
    canvas = canvas_of(family, (size, size) if size is not None else family.size(), mask_ratio)
    recorded, _ = timed(lambda: edited(editor, canvas, steps, dense=False))
    dense, masked = [], []
    for _ in range(rounds):
        seconds, one = timed(lambda: edited(editor, canvas, steps, dense=True))
        dense.append(seconds)
        seconds, other = timed(lambda: edited(editor, canvas, steps, dense=False))
        masked.append(seconds)
    model.close()
    slow, fast = statistics.median(dense), statistics.median(masked)
    apart = np.abs(one.astype(int) - other)[canvas.mask].mean()
    print(
        f"{type(editor.plain).__name__}, {canvas.padded[0]}x{canvas.padded[1]}, {steps} steps, "
        f"{canvas.mask.mean():.1%} masked, {settings.device} ({torch.get_num_threads()} threads)\n"
        f"dense   {slow:8.3f} s\n"
        f"masked  {fast:8.3f} s, {slow / fast:.2f} times as fast (medians of {rounds} rounds)\n"
        f"first   {recorded:8.3f} s: records the template and sees the size for the first time\n"
        f"inside the mask the pictures differ by {apart:.1f} of 255 on average"
    )
    return 0


def loaded(settings: ServeSettings) -> PipelineModel:
    return PipelineModel(settings.for_one_call(), lambda _: None)


def check_ratio(ratio: float) -> None:
    if not 0 < ratio < 1:
        raise InputError(f"--mask-ratio {ratio}: give a share between 0 and 1")


def canvas_of(family: PipelineSet, size: tuple[int, int], ratio: float) -> Canvas:
    """Return an image with a rectangle of this share masked in its center."""
    width, height = size
    mask: Mask = np.zeros((height, width), bool)
    tall, wide = (max(1, round(side * ratio**0.5)) for side in (height, width))
    top, left = (height - tall) // 2, (width - wide) // 2
    mask[top : top + tall, left : left + wide] = True
    return Canvas(scene(1, size), mask, family.multiple)


def call_arguments(member: PipelineMember, canvas: Canvas, steps: int) -> dict[str, object]:
    """Return the arguments of a call of the original pipeline, with the canvas where it has one."""
    given = arguments_of(member, canvas, steps)
    if member.signature.has("image"):
        given["image"] = canvas.image()
    if member.signature.has("mask_image"):
        given["mask_image"] = canvas.mask_image()
    return given


def edited(editor: PipelineMember, canvas: Canvas, steps: int, dense: bool) -> Pixels:
    """Run one edit, by the original pipeline (`dense`) or by the compiled one."""
    given = call_arguments(editor, canvas, steps)
    if not dense:
        given["mask_image"] = canvas.mask_image()
    with torch.no_grad():
        pipe = editor.plain if dense else editor.pipe
        return canvas.finished(pipe(**given).images[0])


def timed(work: Callable[[], Found]) -> tuple[float, Found]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found
