"""Record a template within a byte budget, on disk, and edit it from another pipeline.

    .venv/bin/python examples/budget_and_disk.py

The second pipeline stands for another process: it shares the folder with the first, and records
nothing. Writes the template to `demo-out/templates` and the result to `demo-out/budget.png`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

import maskfx
from maskfx.shipped import FOLDER

STEPS, MB = 12, 60
EXAMPLE = FOLDER / "unet" / "example"
OUT = Path("demo-out")


def compiled() -> Any:
    """Return the shipped pipeline; its templates have `MB` megabytes each, and lie on disk."""
    tiers = maskfx.Tiers(maskfx.Store(OUT / "templates"), host_bytes=1 << 30)
    budget = maskfx.Budget(
        MB * 1e6,
        steps=STEPS,
        branches=2,  # the two of classifier-free guidance
        allow=("16bit", "8bit", "share2", "share3"),  # what may change the picture a little
    )
    pipe = maskfx.compile(maskfx.reference("unet"), plans=True, tiers=tiers, budget=budget)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main() -> None:
    call = {
        "image": Image.open(EXAMPLE / "picture.png").convert("RGB"),
        "guidance_scale": 3.0,
        "num_inference_steps": STEPS,
    }
    mask = Image.open(EXAMPLE / "mask.png").convert("L")
    maskfx.template(compiled(), mask_image=mask, **call)

    other = compiled()
    edited = other(
        "a shiny blue ball",
        mask_image=mask,
        generator=torch.Generator().manual_seed(7),
        **call,
    ).images[0]
    edited.save(OUT / "budget.png")
    [template] = other.templates()
    size = template.nbytes["disk"] / 1e6
    print(f"the template takes {size:.0f} of {MB} MB on disk: {OUT / 'budget.png'}")


if __name__ == "__main__":
    main()
