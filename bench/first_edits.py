"""First edits of pictures, which record a template, beside dense calls and later edits.

    python -m bench.first_edits --model unet --edits 60

Every edit is of another picture. Sides: diffusers as it is; the first edit in "balanced", whose
recording computes the steps that its edits compute; the same with a recording of every step; the
edit after the first, of either; and an edit that goes by its own steps, without a template. They
run one after another, in an order that changes from edit to edit. Likeness is to the dense call
inside the mask. Seconds are of the processor. Writes results/first-edits-<model>.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import maskfx
from bench.harness import ROOT, figure, header, write_json
from bench.quality.edits import draw_edit
from bench.quality.metrics import psnr, ssim
from bench.whole_calls import run
from maskfx.pipelines.call_defaults import call_of

RESULTS = ROOT / "bench" / "results"
HOST_BYTES = 1 << 30  # of the templates of each
DENSE, SOME, ALL, OWN = "dense", "some steps recorded", "all steps recorded", "own steps"
LATER = ", the next edit"
BALANCED = maskfx.Quality.of("balanced")
OWN_STEPS = replace(BALANCED, reuse="steps", refresh=4)


def pipes_of(model: str) -> dict[str, Any]:
    """The pipeline of each side; one that is compiled with all steps records all steps."""
    made = {name: maskfx.reference(model) for name in (DENSE, SOME, ALL)}
    for name, pipe in made.items():
        pipe.set_progress_bar_config(disable=True)
        if name != DENSE:
            quality = BALANCED if name == SOME else replace(BALANCED, every=1)
            tiers = maskfx.Tiers(host_bytes=HOST_BYTES)
            maskfx.compile(pipe, quality=quality, tiers=tiers)
    return made


def measure(model: str, edits: int) -> dict[str, Any]:
    told = call_of(Path(maskfx.__file__).parent / "shipped" / model)
    pipes = pipes_of(model)
    pipes[OWN] = pipes[SOME]
    qualities = {SOME: BALANCED, ALL: BALANCED, OWN: OWN_STEPS}
    sides = [*pipes, SOME + LATER, ALL + LATER]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    likeness: dict[str, list[tuple[float, float]]] = {name: [] for name in sides if name != DENSE}
    for index in range(-1, edits):  # the first one compiles, and isn't judged
        edit = draw_edit(2_000 + index)
        order = [*pipes][index % len(pipes) :] + [*pipes][: index % len(pipes)]
        made = {}
        for name in order:
            more = {} if name == DENSE else {"quality": qualities[name]}
            for side in (name, name + LATER) if name in (SOME, ALL) else (name,):
                start = time.process_time()
                made[side] = np.asarray(run(pipes[name], edit, index + 1, told, **more))
                if index >= 0:
                    seconds[side].append(time.process_time() - start)
        wanted = np.where(edit.mask[..., None], made[DENSE], edit.pixels)
        for name in likeness if index >= 0 else ():
            likeness[name].append((psnr(wanted, made[name], edit.mask), ssim(wanted, made[name])))
    dense = seconds[DENSE]
    return {
        "model": model,
        "edits": edits,
        "sides": {
            name: {
                "times_faster": figure([d / s for d, s in zip(dense, seconds[name], strict=True)]),
                "times_faster_together": sum(dense) / sum(seconds[name]),
                "psnr_inside": statistics.mean(p for p, _ in found),
                "psnr_least": min(p for p, _ in found),
                "ssim": statistics.mean(s for _, s in found),
            }
            for name, found in likeness.items()
        },
        "seconds": {name: figure(values) for name, values in seconds.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="bench.first_edits", description=__doc__)
    parser.add_argument("--model", default="unet", choices=("unet", "dit"))
    parser.add_argument("--edits", type=int, default=60)
    options = parser.parse_args(given)
    result = header("bench.first_edits", given) | measure(options.model, options.edits)
    write_json(RESULTS / f"first-edits-{options.model}.json", result)
    for name, side in result["sides"].items():
        print(f"{name:36} " + "  ".join(f"{k} {v}" for k, v in side.items()))


if __name__ == "__main__":
    main()
