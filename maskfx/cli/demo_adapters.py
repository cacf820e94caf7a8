"""Demo of adapters: one edit without any, with each LoRA and each ControlNet of the package.

`maskfx demo --adapters`; edits the image of a trained pipeline and writes a sheet to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import maskfx
from maskfx.cli.demo import OUT, QUALITY, SEED, STEPS, Example, quiet_libraries
from maskfx.cli.demo_sheet import Panel, masked, sheet
from maskfx.errors import InputError
from maskfx.pipelines.call_defaults import call_of
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.shipped import CONTROLNETS, FOLDER, loras, names, reference


def main(name: str | None = None, folder: Path = FOLDER, out: Path = OUT) -> Path:
    """Edit an image with and without the adapters of a trained pipeline, and write the sheet."""
    trained = [one for one in names(folder) if any(loras(one, folder).glob("*.safetensors"))]
    chosen = trained[0] if name is None and trained else name
    if chosen not in trained:
        known = ", ".join(map(repr, trained)) or "none"
        raise InputError(f"demo: {chosen!r} has no adapters in {folder}; with adapters: {known}")
    with quiet_libraries():
        return edit_with_each(chosen, folder, out)


def edit_with_each(name: str, folder: Path, out: Path) -> Path:
    example = Example.of(folder / name)
    call = {**call_of(folder / name), "prompt": example.prompt}
    picture = np.asarray(example.image)
    panels = [
        Panel(picture, "the picture"),
        Panel(masked(picture, example.masked), "what to change"),
        *with_loras(name, example, call, folder),
        *with_controlnets(name, example, call, folder),
    ]
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-adapters.png"
    sheet(f"“{example.prompt}”, without and with adapters", panels).save(path)
    print(f"to look at: {path}")
    return path


def with_loras(
    name: str, example: Example, call: Mapping[str, object], folder: Path
) -> Iterator[Panel]:
    """Yield the edit without a LoRA, and with each one; all by one pipeline."""
    adapters = maskfx.Adapters(loras(name, folder), deadline=300)
    pipe = maskfx.compile(reference(name, folder=folder), quality=QUALITY, adapters=adapters)
    try:
        yield Panel(edited(pipe, example, call), "no adapter")
        for path in sorted(loras(name, folder).glob("*.safetensors")):
            styled = edited(pipe, example, {**call, "lora": path.stem})
            yield Panel(styled, f"LoRA {path.stem!r}")
    finally:
        adapters.close()


def with_controlnets(
    name: str, example: Example, call: Mapping[str, object], folder: Path
) -> Iterator[Panel]:
    """Yield each ControlNet's control picture, and the edit that follows it."""
    for net in sorted((folder / name / CONTROLNETS).glob("*/config.json")):
        given = net.parent / "example"
        control = Image.open(given / "control.png").convert("RGB")
        prompt = (given / "prompt.txt").read_text(encoding="utf-8").strip()
        led = reference(name, controlnet=net.parent.name, folder=folder)
        pipe = maskfx.compile(led, quality=QUALITY)
        made = edited(pipe, example, {**call, "prompt": prompt, "control_image": control})
        yield Panel(np.asarray(control), f"control picture of {net.parent.name!r}")
        yield Panel(made, f"ControlNet {net.parent.name!r}", (f"“{prompt}”",))


def edited(pipe: Pipeline, example: Example, call: Mapping[str, object]) -> np.ndarray:
    """Return the pixels of the edit."""
    pipe.set_progress_bar_config(disable=True)  # type: ignore[attr-defined]
    given = {
        **call,
        "image": example.image,
        "mask_image": example.mask,
        "num_inference_steps": STEPS,
        "height": example.image.height,
        "width": example.image.width,
        "generator": torch.Generator().manual_seed(SEED),
    }
    return np.asarray(pipe(**given).images[0])
