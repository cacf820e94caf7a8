"""Edits whose skipped steps are forecast by fitted weights, against extrapolated ones.

    OMP_NUM_THREADS=1 python -m bench.edit_forecasts --model dit --pictures 12 --edits 5

Each picture is of a scene that nothing was fitted on; its edits turn things into others, under
masks of irregular shape. The reference of an edit is the same edit with all steps, from the same
template. Sides alternate; speed is the CPU time of the whole call. Likeness is SSIM and PSNR inside
the mask, and the share of edits in which the probe names the same shape and colour as in the
reference. Templates are recorded before, and not counted.

With --seconds a run ends after the picture during which they are over. Writes
edit-forecasts-<model>.json to --out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import maskfx
from bench import harness
from bench.quality.bed import WARM_UP
from bench.quality.edits import blob_around, fitting_scene, ratio_of
from bench.quality.metrics import psnr, ssim
from bench.report import columns
from maskfx.pipelines.call_defaults import call_of
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.shipped import FOLDER
from training.captions import caption_of
from training.edits import Edit, load_probe, seen
from training.paint import paint
from training.scenes import COLOURS, SHAPES, SIDE
from training.train import RUNS

Row = dict[str, float]
REFERENCE = "all steps"
SIDES = {
    f"every={every}, {forecast}": maskfx.Quality(margin=2, every=every, forecast=forecast)
    for every in (4, 5)
    for forecast in ("output", "fitted")
}


def edits_of(picture: int, count: int) -> Iterator[Edit]:
    """Some edits of one picture: things, masks, shapes and colours are drawn."""
    scene, _ = fitting_scene(picture, ratio_of(picture))
    rng = np.random.default_rng((17, picture))
    for number in range(count):
        at = int(rng.integers(len(scene.things)))
        old = scene.things[at]
        shape = str(rng.choice([one for one in SHAPES if one != old.shape]))
        colour = str(rng.choice([one for one in COLOURS if one != old.colour]))
        changed = scene.replaced(at, shape=shape, colour=colour)
        mask = blob_around(old, ratio_of(picture * count + number), rng)
        prompt, new = caption_of(changed.things[at], changed, rng), changed.things[at]
        yield Edit(paint(scene).pixels, mask, prompt, new, paint(changed).pixels)


class Bench:
    """A compiled pipeline, the probe, and the rows of each side."""

    def __init__(self, model: str, steps: int, runs: Path) -> None:
        pipe = maskfx.reference(model)
        pipe.set_progress_bar_config(disable=True)
        self.pipe = maskfx.compile(pipe)
        self.told = call_of(FOLDER / model) | {"num_inference_steps": steps}
        self.probe = load_probe(runs)
        self.rows: dict[str, list[Row]] = {name: [] for name in (REFERENCE, *SIDES)}

    def run(self, edit: Edit, seed: int, quality: maskfx.Quality) -> tuple[Any, float]:
        began = time.process_time()
        image = self.pipe(
            **self.told,
            prompt=edit.prompt,
            image=Image.fromarray(edit.pixels),
            mask_image=Image.fromarray(edit.mask),
            generator=torch.Generator().manual_seed(seed),
            height=SIDE,
            width=SIDE,
            quality=quality,
        ).images[0]
        return np.asarray(image), time.process_time() - began

    def picture(self, number: int, count: int, kept: bool = True) -> None:
        """Make a picture's edits by all sides, in changing order, and forget its template."""
        plain = maskfx.Quality(margin=2)
        for at, edit in enumerate(edits_of(number, count)):
            seed = 100_000 * at + number
            if at == 0:
                self.run(edit, seed, plain)  # records the template
            wanted, seconds = self.run(edit, seed, plain)
            found = {REFERENCE: (wanted, seconds)}
            shift = (number + at) % len(SIDES)
            names = list(SIDES)
            for name in names[shift:] + names[:shift]:
                found[name] = self.run(edit, seed, SIDES[name])
            if kept:
                for name, (pixels, spent) in found.items():
                    self.rows[name].append(self.row(edit, pixels, wanted, spent))
        for template in self.pipe.templates():
            self.pipe.forget(template.name)
        notes = pipeline_state_of(self.pipe).notes
        if notes:
            raise RuntimeError(f"picture {number}: {dict(notes)}")

    def row(self, edit: Edit, pixels: Any, wanted: Any, seconds: float) -> Row:
        names = seen(self.probe, pixels, edit.thing)
        return {
            "seconds": seconds,
            "ssim": ssim(pixels, wanted),
            "psnr_inside": psnr(pixels, wanted, edit.mask),
            "alike": names == seen(self.probe, wanted, edit.thing),
            "shape": names[0] == edit.thing.shape,
            "colour": names[1] == edit.thing.colour,
        }

    def summary(self) -> dict[str, Row]:
        """Means of each side; the time as a part of that with all steps, in sum."""
        whole = sum(row["seconds"] for row in self.rows[REFERENCE])
        found = {}
        for name, rows in self.rows.items():
            means = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
            worst = float(np.quantile([row["psnr_inside"] for row in rows], 0.1))
            share = sum(row["seconds"] for row in rows) / whole
            found[name] = {**means, "psnr_inside_tenth": worst, "share_of_time": share}
        return found


def table(found: dict[str, Row]) -> str:
    lines = [["side", "share of time", "SSIM", "dB inside", "named alike", "shape", "colour"]]
    for name, row in found.items():
        figures = [f"{row['share_of_time']:.3f}", f"{row['ssim']:.5f}", f"{row['psnr_inside']:.2f}"]
        parts = [f"{row[key]:.1%}" for key in ("alike", "shape", "colour")]
        lines.append([name, *figures, *parts])
    return columns(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=("unet", "dit"), required=True)
    parser.add_argument("--pictures", type=int, default=12)
    parser.add_argument("--edits", type=int, default=5, help="of each picture")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=inf, help="after which a run ends")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=RUNS, help="where the probe was trained")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    header = harness.header("bench.edit_forecasts", arguments)
    began, made = time.monotonic(), 0
    with torch.no_grad():
        bench = Bench(options.model, options.steps, options.runs)
        bench.picture(WARM_UP, 1, kept=False)  # captures are no part of any time
        for number in range(options.pictures):
            if made and time.monotonic() - began >= options.seconds:
                break
            bench.picture(number, options.edits)
            made += 1
            print(f"picture {number}: {time.monotonic() - began:.0f} s", flush=True)
    found = bench.summary()
    print(table(found))
    about = {"model": options.model, "steps": options.steps, "threads": options.threads}
    counts = {"pictures": made, "edits": made * options.edits}
    result = {**header, **about, **counts, "seconds": time.monotonic() - began, "sides": found}
    harness.write_json(options.out / f"edit-forecasts-{options.model}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
