"""LoRAs that act from the step that their profile names: how alike are the pictures?

    python -m bench.adapters.profiled --edits 20

For each LoRA that ships for the trained UNet, `maskfx adapters profile`'s function finds the first
step K at which the latents with and without it have a cosine below 0.99, from held-out edits. Other
held-out edits then run with the LoRA from the first step on, and from step K on, densely and with
the same noise. SSIM is that of the window around what was painted. Beside it stand the SSIM of the
edits without the LoRA, which shows how much it changes, and that of a start twice as late.

Asked for: 0.97. Writes adapters-profiled.json to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import maskfx
from bench import harness
from bench.quality.edits import draw_edit
from bench.quality.metrics import ssim, window_of
from bench.report import columns
from maskfx.pipelines.call_defaults import call_of
from maskfx.pipelines.fitting.profile import profile_adapter
from maskfx.runtime.lora.files import AdapterFile
from maskfx.runtime.lora.registry import RegisteredAdapter
from maskfx.shipped import FOLDER, loras, reference
from training.scenes import SIDE

MODEL, ASKED, PROFILED = "unet", 0.97, 4  # edits that the profile is made from
DENSE = replace(maskfx.Quality.of("all-steps"), reuse="steps", refresh=1)


def arguments(number: int, steps: int) -> dict[str, Any]:
    """The call of a held-out edit, each time with the same noise."""
    edit = draw_edit(number)
    return {
        **call_of(FOLDER / MODEL),
        "prompt": edit.prompt,
        "image": Image.fromarray(edit.pixels),
        "mask_image": Image.fromarray(edit.mask),
        "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(number),
        "height": SIDE,
        "width": SIDE,
    }


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    adapters = maskfx.Adapters()
    pipe = maskfx.compile(reference(MODEL), adapters=adapters)
    pipe.set_progress_bar_config(disable=True)

    def picture(number: int, lora: str | None) -> np.ndarray:
        more = {} if lora is None else {"lora": lora}
        made = pipe(**arguments(number, asked.steps), quality=DENSE, **more).images[0]
        return np.asarray(made)[window_of(draw_edit(number).mask)]

    rows = {}
    for path in sorted(loras(MODEL).glob("*.safetensors")):
        known = RegisteredAdapter(path.stem, AdapterFile.of(path))
        calls = [
            lambda number=number: arguments(number, asked.steps)
            for number in range(asked.edits, asked.edits + PROFILED)
        ]
        found = profile_adapter(pipe, known, calls)
        start = int(found.profile.start)
        sides = {"from the profile's step": start, "from twice that step": 2 * start + 1}
        adapters.register("strict", path, start=0)
        alike: dict[str, list[float]] = {name: [] for name in (*sides, "without")}
        for number in range(asked.edits):
            strict = picture(number, "strict")
            for name, first in sides.items():
                adapters.register("later", path, start=first)
                alike[name].append(ssim(strict, picture(number, "later")))
            alike["without"].append(ssim(strict, picture(number, None)))
        rows[path.stem] = {
            "start": start,
            "cosines": [min(own) for own in zip(*found.cosines, strict=False)],
            "ssim": {
                name: {"mean": float(np.mean(own)), "min": min(own)} for name, own in alike.items()
            },
        }
    adapters.close()
    return rows


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--edits", type=int, default=20)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    asked = parser.parse_args(given)
    found = measure(asked)
    table = [["LoRA", "step", "edits", "mean SSIM", "least"]]
    for name, row in found.items():
        for side, own in row["ssim"].items():
            table.append([name, f"{row['start']}", side, f"{own['mean']:.4f}", f"{own['min']:.4f}"])
    print(columns(table))
    result = {**harness.header("bench.adapters.profiled", given), "asked": ASKED}
    sizes = {"edits": asked.edits, "steps": asked.steps}
    harness.write_json(asked.out / "adapters-profiled.json", {**result, **sizes, "loras": found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
