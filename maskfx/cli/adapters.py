"""Commands on LoRA files: profile one on a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import isfinite
from pathlib import Path

import torch
from PIL import Image

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.fitting.profile import AdapterProfile, profile_adapter
from maskfx.runtime.lora.files import AdapterFile, check_header
from maskfx.runtime.lora.profile import store_profile
from maskfx.runtime.lora.registry import RegisteredAdapter
from maskfx.serve.config import ServeSettings
from maskfx.serve.models.model_source import load_pipeline, told_by
from maskfx.serve.models.pipeline_set import PipelineMember, PipelineSet

PROMPTS = ("a photo of a person", "a house by a lake", "a bowl of fruit", "a street at night")
GREY = (128, 128, 128)


def profile(
    settings: ServeSettings,
    adapter: Path,
    prompts: list[str],
    weight: float,
    steps: int | None,
    cosine: float,
) -> int:
    """Print how an adapter's latents diverge from the model's, and write its profile."""
    if not 0 < cosine < 1:
        raise InputError(f"--cosine {cosine}: give a number between 0 and 1, such as 0.99")
    if steps is not None and steps < 1:
        raise InputError(f"--steps {steps}: give 1 or more")
    if not isfinite(weight):
        raise InputError(f"--weight {weight}: give a finite number, such as 0.8")
    known = RegisteredAdapter(adapter.stem, AdapterFile.of(adapter))
    check_header(adapter)
    if not os.access(adapter.parent, os.W_OK):
        raise InputError(f"{adapter.parent}: the profile is written there, and it isn't writable")
    told = told_by(settings.model)
    pipe = load_pipeline(settings.model, settings.dtype, settings.device, settings.controlnets)
    family = PipelineSet.of(pipe, maskfx.compile, told)
    member = family.main
    calls = [
        call_of(family, member, prompt, seed, steps)
        for seed, prompt in enumerate(prompts or PROMPTS)
    ]
    found = profile_adapter(member.pipe, known, calls, weight, cosine)
    show(found)
    print(f"written to {store_profile(adapter, found.base, found.profile)}")
    return 0


def call_of(
    family: PipelineSet, member: PipelineMember, prompt: str, seed: int, steps: int | None
) -> Callable[[], dict[str, object]]:
    """Return a function that makes the arguments of a call with the model's own settings."""
    signature, (width, height) = member.signature, family.size()

    def arguments() -> dict[str, object]:
        found = {**signature.told, "prompt": prompt}
        found["generator"] = torch.Generator().manual_seed(seed)
        if signature.has("height") and signature.has("width"):
            found |= {"height": height, "width": width}
        if signature.has("image"):
            found["image"] = Image.new("RGB", (width, height), GREY)
        if signature.has("mask_image"):
            found["mask_image"] = Image.new("L", (width, height), 255)
        if signature.has("strength"):
            found["strength"] = 1.0
        if steps is not None:
            found["num_inference_steps"] = steps
        return found

    return arguments


def show(found: AdapterProfile) -> None:
    """Print the similarity per step, and the start."""
    print("step  lowest cosine of latents with and without the adapter")
    for step, own in enumerate(zip(*found.cosines, strict=False)):
        mark = " <- acts from here" if step == found.profile.start else ""
        print(f"{step:4}  {min(own):.5f}{mark}")
    if found.early:
        print(
            f"it changes {', '.join(found.early)}, which runs before the first step: it acts from "
            "the beginning"
        )
