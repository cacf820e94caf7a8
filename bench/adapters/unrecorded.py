"""Edits with a LoRA that read a template recorded without it: how alike are the pictures?

    python -m bench.adapters.unrecorded --edits 10

For each LoRA that ships for the trained UNet, held-out edits run with the same noise: densely with
the LoRA; as an edit whose template was recorded with it; as one whose template was recorded without
(`Lora(recorded=False)`), which saves a recording per LoRA; and as an edit without the LoRA. SSIM is
that of the window around what was painted; the picture's own pixels stand outside the mask in all.
Beside it stands the greatest difference of the masked pixels' mean colours, of 255, because most of
what a style changes is colour. Writes adapters-unrecorded.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import maskfx
from bench import harness
from bench.adapters.profiled import arguments
from bench.quality.edits import draw_edit
from bench.quality.metrics import ssim, window_of
from bench.report import columns
from maskfx.pipelines.adapters.lora_files import LoraTarget, converted
from maskfx.runtime.lora.adapter import Adapter
from maskfx.runtime.lora.files import AdapterFile, FileLimits, read_adapter_file
from maskfx.shipped import loras, reference

MODEL = "unet"
DENSE = replace(maskfx.Quality.of("all-steps"), reuse="steps", refresh=1)
QUALITIES = ("all-steps", "balanced")
PAIRS = {
    "recorded with it, against dense": ("with", "dense"),
    "recorded without, against dense": ("without", "dense"),
    "recorded without, against with": ("without", "with"),
    "no LoRA, against dense with it": ("none", "dense"),
}


def load(pipe: Any, path: Path) -> Adapter:
    tensors, settings = read_adapter_file(AdapterFile.of(path), FileLimits())
    return converted(path.name, tensors, settings, LoraTarget.of(pipe), FileLimits())


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    pipe: Any = maskfx.compile(reference(MODEL))
    pipe.set_progress_bar_config(disable=True)

    def picture(number: int, quality: Any, *lora: Any) -> NDArray[np.uint8]:
        more = {"lora": list(lora)} if lora else {}
        return np.asarray(pipe(**arguments(number, asked.steps), quality=quality, **more).images[0])

    rows: dict[str, Any] = {}
    for path in sorted(loras(MODEL).glob("*.safetensors")):
        adapter = load(pipe, path)
        alike: dict[str, dict[str, list[float]]] = {q: {p: [] for p in PAIRS} for q in QUALITIES}
        colour: dict[str, dict[str, list[float]]] = {q: {p: [] for p in PAIRS} for q in QUALITIES}
        for number in range(asked.edits):
            mask = draw_edit(number).mask > 0
            dense = picture(number, DENSE, adapter)
            for quality in QUALITIES:
                made = {
                    "dense": dense,
                    "with": picture(number, quality, adapter),
                    "without": picture(number, quality, maskfx.Lora(adapter, recorded=False)),
                    "none": picture(number, quality),
                }
                for pair, (one, other) in PAIRS.items():
                    window = window_of(draw_edit(number).mask)
                    alike[quality][pair].append(ssim(made[one][window], made[other][window]))
                    means = [made[side][mask].astype(float).mean(0) for side in (one, other)]
                    colour[quality][pair].append(float(np.abs(means[0] - means[1]).max()))
        rows[path.stem] = {
            quality: {
                pair: {
                    "mean_ssim": float(np.mean(alike[quality][pair])),
                    "min_ssim": min(alike[quality][pair]),
                    "mean_colour": float(np.mean(colour[quality][pair])),
                }
                for pair in PAIRS
            }
            for quality in QUALITIES
        }
    return rows


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--edits", type=int, default=10)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    found = measure(asked)
    table = [["LoRA", "quality", "pair", "mean SSIM", "least", "colour, of 255"]]
    for name, qualities in found.items():
        for quality, pairs in qualities.items():
            for pair, own in pairs.items():
                numbers = [f"{own['mean_ssim']:.4f}", f"{own['min_ssim']:.4f}"]
                table.append([name, quality, pair, *numbers, f"{own['mean_colour']:.1f}"])
    print(columns(table))
    header = harness.header("bench.adapters.unrecorded", given)
    sizes = {"edits": asked.edits, "steps": asked.steps}
    harness.write_json(asked.out / "adapters-unrecorded.json", {**header, **sizes, "loras": found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
