"""Crop and stitch: what editors do today to save work or gain detail, beside maskfx.

    OMP_NUM_THREADS=1 python -m bench.crop_and_stitch --model unet --edits 40

The box of the mask is enlarged by a context factor, cut out, resized to the size that the model was
trained for, edited in full and pasted back, as ComfyUI's CropAndStitch, "only masked" of A1111 and
`padding_mask_crop` of diffusers do. Sides alternate edit by edit: diffusers dense, crops with each
context, and maskfx with a template that was recorded before. With --parts 2 a second mask lies
elsewhere in the picture, so that the box holds both.

A crop's result isn't the dense one's, for its noise and scale differ; SSIM compares it with
it. Whether the picture shows what was asked for is seen by the probe. Writes
results/crop-and-stitch-<model>.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

import maskfx
from bench.harness import ROOT, figure, header, ratio, write_json
from bench.quality.bed import WARM_UP, Bed, Case, Made, noise
from bench.quality.edits import draw_edit
from bench.quality.metrics import ssim
from bench.quality.ours import Kept, Opened, Ours
from maskfx.pipelines.call_defaults import call_of
from maskfx.pipelines.quality import NAMED
from maskfx.shipped import FOLDER
from training.edits import load_probe
from training.probe import crop_around, scores
from training.scenes import COLOURS, SHAPES, SIDE
from training.train import RUNS

CONTEXTS = (1.2, 1.5, 2.0)
QUALITIES = ("fast", "balanced", "all-steps")
Box = tuple[int, int, int, int]


def box_around(mask: np.ndarray, context: float) -> Box:
    """Return left, top, right, bottom of the square around the mask, enlarged and kept inside."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    edge = int(max(rows[-1] - rows[0], columns[-1] - columns[0])) + 1
    edge = min(round(edge * context), *mask.shape)

    def start(line: np.ndarray, size: int) -> int:
        middle = (int(line[0]) + int(line[-1]) + 1) / 2
        return int(max(0, min(round(middle - edge / 2), size - edge)))

    top, left = start(rows, mask.shape[0]), start(columns, mask.shape[1])
    return left, top, left + edge, top + edge


def crop_and_stitch(bed: Bed, case: Case, context: float) -> Made:
    """Edit the enlarged box at the model's size and paste the masked pixels back."""
    begun = time.perf_counter()
    left, top, right, bottom = box = box_around(case.edit.mask, context)
    cut = Image.fromarray(case.edit.mask).convert("L").crop(box)
    change = {
        "image": case.image.crop(box).resize((SIDE, SIDE), Image.Resampling.LANCZOS),
        "mask_image": cut.resize((SIDE, SIDE), Image.Resampling.NEAREST),
        "latents": noise(case.own.shape, 40_000_000 + case.index),
    }
    [made] = bed.run([case], lambda _: change)
    size = right - left, bottom - top
    small = Image.fromarray(made.pixels).resize(size, Image.Resampling.LANCZOS)
    pixels = case.edit.pixels.copy()
    pixels[top:bottom, left:right] = np.asarray(small)
    laid = case.laid(replace(made, pixels=pixels))
    return replace(laid, whole_seconds=time.perf_counter() - begun)


def dense(bed: Bed, case: Case) -> Made:
    return bed.dense([case])[0]


def masked(ours: Ours, case: Case, kept: Kept, opened: Opened, quality: maskfx.Quality) -> Made:
    return ours.edit([case], kept, opened, quality)[0]


def case_of(bed: Bed, index: int, parts: int) -> Case:
    case = bed.case(index)
    mask = case.edit.mask
    for part in range(1, parts):
        mask = mask | draw_edit(index + 500_000 * part).mask
    return replace(case, edit=replace(case.edit, mask=mask))


def measure(model: str, edits: int, steps: int, parts: int) -> dict[str, Any]:
    """Return seconds and likeness of all sides."""
    bed = Bed(model, maskfx.reference(model), steps, call_of(FOLDER / model))
    ours, probe = Ours(bed), load_probe(RUNS)
    crops = {f"crop, context {c:g}": c for c in CONTEXTS}
    kept = Kept(any_mask=NAMED["balanced"].any_mask)
    names = ["dense", *crops, *QUALITIES]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number, index in enumerate([WARM_UP, *range(edits)]):
        case = case_of(bed, index, parts)
        made: dict[str, Made] = {}
        with ours.opened([case], kept, records=True) as opened:
            sides: dict[str, Callable[[], Made]] = {"dense": partial(dense, bed, case)}
            for name, context in crops.items():
                sides[name] = partial(crop_and_stitch, bed, case, context)
            for name in QUALITIES:
                sides[name] = partial(masked, ours, case, kept, opened, NAMED[name])
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                made[name] = sides[name]()
        if not number:
            continue  # captures and first calls
        for name, one in made.items():
            thing = case.edit.thing
            crop = crop_around(one.pixels, thing.x, thing.y, thing.radius)[None].copy()
            with torch.no_grad():
                shape, colour = (int(score.argmax()) for score in scores(probe, crop))
            rows[name].append(
                {
                    "seconds": one.seconds,
                    "whole_seconds": one.whole_seconds,
                    "ssim": ssim(one.pixels, made["dense"].pixels),
                    "shape": SHAPES[shape] == thing.shape,
                    "colour": COLOURS[colour] == thing.colour,
                    "masked": float(case.edit.mask.mean()),
                }
            )
    return {"model": model, "edits": edits, "steps": steps, "parts": parts} | summary(rows)


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def column(name: str, key: str) -> list[float]:
        return [float(row[key]) for row in rows[name]]

    return {
        "masked": statistics.mean(column("dense", "masked")),
        "sides": {
            name: {
                "times_faster": ratio(column("dense", "seconds"), column(name, "seconds")),
                "whole_times_faster": ratio(
                    column("dense", "whole_seconds"), column(name, "whole_seconds")
                ),
                "seconds": figure(column(name, "seconds")),
                "ssim_to_dense": statistics.mean(column(name, "ssim")),
                "shape": statistics.mean(column(name, "shape")),
                "colour": statistics.mean(column(name, "colour")),
            }
            for name in rows
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="bench.crop_and_stitch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=("unet", "dit"), required=True)
    parser.add_argument("--edits", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--parts", type=int, default=1, choices=(1, 2))
    options = parser.parse_args(given)
    result = header("bench.crop_and_stitch", given) | measure(
        options.model, options.edits, options.steps, options.parts
    )
    name = f"crop-and-stitch-{options.model}{'-parts' if options.parts > 1 else ''}.json"
    write_json(ROOT / "bench" / "results" / name, result)
    print(f"masked {result['masked']:.3f}")
    for side, row in result["sides"].items():
        print(
            f"{side:20} {row['times_faster']['median']:6.2f} x  whole "
            f"{row['whole_times_faster']['median']:5.2f} x  SSIM to dense "
            f"{row['ssim_to_dense']:.4f}  shape {row['shape']:.2f}  colour {row['colour']:.2f}"
        )


if __name__ == "__main__":
    main()
