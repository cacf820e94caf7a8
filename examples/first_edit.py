"""Edit a picture twice with the shipped UNet: the first edit records, the second reads.

    .venv/bin/python examples/first_edit.py

Writes the picture and both results, side by side, to `demo-out/first_edit.png`.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from PIL import Image

import maskfx
from maskfx.shipped import FOLDER

PROMPTS = ("a red heart on a green field", "a shiny blue ball on a green field")
EXAMPLE = FOLDER / "unet" / "example"
OUT = Path("demo-out")


def main() -> None:
    picture = Image.open(EXAMPLE / "picture.png").convert("RGB")
    mask = Image.open(EXAMPLE / "mask.png").convert("L")  # white is edited
    pipe = maskfx.compile(maskfx.reference("unet"))
    pipe.set_progress_bar_config(disable=True)
    pictures, seconds = [picture], []
    for prompt in PROMPTS:
        start = time.perf_counter()
        edited = pipe(
            prompt,
            image=picture,
            mask_image=mask,
            guidance_scale=3.0,
            num_inference_steps=25,
            generator=torch.Generator().manual_seed(7),
        ).images[0]
        seconds.append(time.perf_counter() - start)
        pictures.append(edited)
    sheet = Image.new("RGB", (picture.width * len(pictures), picture.height))
    for index, one in enumerate(pictures):
        sheet.paste(one, (index * picture.width, 0))
    OUT.mkdir(exist_ok=True)
    sheet.save(OUT / "first_edit.png")
    print(
        f"first edit {seconds[0]:.1f} s, with compiling and recording; "
        f"second edit {seconds[1]:.1f} s: {OUT / 'first_edit.png'}"
    )


if __name__ == "__main__":
    main()
