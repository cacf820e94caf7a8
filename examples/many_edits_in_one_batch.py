"""Run four edits of two pictures in one engine: each step computes the masked sites of all four.

    .venv/bin/python examples/many_edits_in_one_batch.py

The requests differ in picture, mask, prompt and number of steps. Writes the results, side by side,
to `demo-out/many_edits.png`.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageOps

import maskfx
from maskfx.shipped import FOLDER

EXAMPLE = FOLDER / "unet" / "example"
OUT = Path("demo-out")


def ellipse(*box: int) -> Image.Image:
    mask = Image.new("L", (256, 256))
    ImageDraw.Draw(mask).ellipse(box, fill=255)
    return mask


def main() -> None:
    picture = Image.open(EXAMPLE / "picture.png").convert("RGB")
    mirrored = ImageOps.mirror(picture)
    edits = [  # picture, mask, prompt, steps
        (picture, ellipse(110, 110, 210, 200), "a shiny blue ball on a green field", 25),
        (picture, ellipse(100, 185, 180, 250), "a small yellow cube on the grass", 20),
        (mirrored, ellipse(45, 110, 145, 200), "a red heart on a green field", 25),
        (mirrored, ellipse(150, 70, 250, 180), "a large purple cone on grass", 20),
    ]
    pipe = maskfx.compile(maskfx.reference("unet"))
    pipe.set_progress_bar_config(disable=True)
    with maskfx.Engine() as engine:
        start = time.perf_counter()
        tickets = [
            engine.submit(
                pipe,
                prompt,
                image=one,
                mask_image=mask,
                guidance_scale=3.0,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(7),
            )
            for one, mask, prompt, steps in edits
        ]
        pictures = [ticket.result().images[0] for ticket in tickets]
        seconds = time.perf_counter() - start
    sheet = Image.new("RGB", (256 * len(pictures), 256))
    for index, one in enumerate(pictures):
        sheet.paste(one, (index * 256, 0))
    OUT.mkdir(exist_ok=True)
    sheet.save(OUT / "many_edits.png")
    calls, largest = sum(s.requests for s in engine.steps), max(s.requests for s in engine.steps)
    print(
        f"{len(edits)} edits in {seconds:.1f} s, with compiling and recording; {calls} calls ran "
        f"in {len(engine.steps)} steps, {largest} at once at most: {OUT / 'many_edits.png'}"
    )


if __name__ == "__main__":
    main()
