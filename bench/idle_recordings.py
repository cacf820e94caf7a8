"""Three edits of one picture, by when its template is recorded, with pauses between them.

    python -m bench.idle_recordings --model unet --pictures 8

Each way has an engine of its own: the template is recorded at once, in the first edit; in the
second edit; while the engine is idle; or ahead, as the page of `maskfx serve` asks for: the engine
is asked for the recording, and the first edit comes after a pause. The edits of a picture have one
mask and prompt and seeds of their own; each pause has pictures of its own, whose ways take turns in
changing order. Beside them diffusers' dense call of the same edit. Seconds are of the wall clock,
so that waiting counts; a picture's recording in idle time has ended before the next picture.
Likeness is to the dense call inside the mask; `first_answers` compares the first edit by its own
steps with the same edit of a template. Writes results/idle-recordings-<model>.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import maskfx
from bench.harness import ROOT, figure, header, write_json
from bench.quality.edits import draw_edit
from bench.quality.metrics import psnr, ssim
from bench.whole_calls import HOST_BYTES, run
from maskfx.pipelines.call_defaults import call_of

RESULTS = ROOT / "bench" / "results"
PAUSES = (0.0, 1.0, 5.0)
EDITS = ("first", "second", "third")
DENSE, ONCE, SECOND, IDLE = "dense", "at once", "in the second edit", "in idle time"
AHEAD = "ahead of the first edit"
REUSE = {ONCE: "template", SECOND: "auto", IDLE: "idle", AHEAD: "template"}
BALANCED = replace(maskfx.Quality.of("balanced"), refresh=4)  # as in `maskfx serve`


class Images(NamedTuple):
    """What a pipeline returns."""

    images: list[Any]


class Way:
    """A pipeline with its engine; submits one edit after another."""

    def __init__(self, model: str, reuse: str) -> None:
        self.pipe = maskfx.reference(model)
        self.pipe.set_progress_bar_config(disable=True)
        tiers = maskfx.Tiers(host_bytes=HOST_BYTES)
        maskfx.compile(self.pipe, quality=replace(BALANCED, reuse=reuse), tiers=tiers)
        self.engine = maskfx.Engine()

    def __call__(self, **given: Any) -> Any:
        return self.engine.submit(self.pipe, **given).result()

    def record(self, **given: Any) -> Any:
        """Ask for the recording of an edit's template in idle time."""
        wanted = {k: v for k, v in given.items() if k not in ("prompt", "mask_image", "generator")}
        self.engine.record_idle(self.pipe, **wanted)
        return Images([None])

    def settle(self) -> None:
        """Wait until no recording is left."""
        while len(self.engine.idle):
            time.sleep(0.05)


def measure(model: str, pictures: int) -> dict[str, Any]:
    told = call_of(Path(maskfx.__file__).parent / "shipped" / model)
    dense = maskfx.reference(model)
    dense.set_progress_bar_config(disable=True)
    ways = {name: Way(model, reuse) for name, reuse in REUSE.items()}
    seconds: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    likeness: dict[str, list[tuple[float, float]]] = defaultdict(list)
    between: list[tuple[float, float]] = []
    for number in range(-1, pictures * len(PAUSES)):  # the first one compiles, and isn't judged
        pause, edit = PAUSES[number % len(PAUSES)], draw_edit(3_000 + number)
        made, took = {}, {}
        for name in [*ways][number % len(ways) :] + [*ways][: number % len(ways)]:
            if name == AHEAD:
                run(ways[name].record, edit, 10 * number, told)
            for index, which in enumerate(EDITS):
                time.sleep(pause if index or name == AHEAD else 0.0)
                start = time.perf_counter()
                made[name, which] = np.asarray(run(ways[name], edit, 10 * number + index, told))
                took[name, which] = time.perf_counter() - start
            ways[name].settle()
        for index, which in enumerate(EDITS):
            start = time.perf_counter()
            whole = np.asarray(run(dense, edit, 10 * number + index, told))
            spent = time.perf_counter() - start
            wanted = np.where(edit.mask[..., None], whole, edit.pixels)
            for name in ways if number >= 0 else ():
                side, found = f"{name}, pause {pause:g} s, {which} edit", made[name, which]
                seconds[side].append(took[name, which])
                times[side].append(spent / took[name, which])
                likeness[side].append((psnr(wanted, found, edit.mask), ssim(wanted, found)))
            if number >= 0:
                seconds[DENSE].append(spent)
        first, other = made[IDLE, "first"], made[ONCE, "first"]
        if number >= 0:
            between.append((psnr(other, first, edit.mask), ssim(other, first)))
    kept = {name: ways[name].engine.idle for name in (IDLE, AHEAD)}
    counts = {n: {"finished": i.finished, "dropped": i.dropped} for n, i in kept.items()}
    for way in ways.values():
        way.engine.close()
    return {
        "model": model,
        "pictures": pictures * len(PAUSES),
        "sides": {
            side: {
                "times_faster": figure(times[side]),
                "psnr_inside": statistics.mean(p for p, _ in found),
                "psnr_least": min(p for p, _ in found),
                "ssim": statistics.mean(s for _, s in found),
            }
            for side, found in likeness.items()
        },
        "first_answers": {
            "psnr_inside": statistics.mean(p for p, _ in between),
            "psnr_least": min(p for p, _ in between),
            "ssim": statistics.mean(s for _, s in between),
            "ssim_least": min(s for _, s in between),
        },
        "recordings": counts,
        "seconds": {name: figure(values) for name, values in seconds.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="bench.idle_recordings", description=__doc__)
    parser.add_argument("--model", default="unet", choices=("unet", "dit"))
    parser.add_argument("--pictures", type=int, default=8, help="of each pause")
    options = parser.parse_args(given)
    result = header("bench.idle_recordings", given) | measure(options.model, options.pictures)
    write_json(RESULTS / f"idle-recordings-{options.model}.json", result)
    for name, side in result["sides"].items():
        print(f"{name:44} " + "  ".join(f"{k} {v}" for k, v in side.items()))
    print("first answers", result["first_answers"], result["recordings"])


if __name__ == "__main__":
    main()
