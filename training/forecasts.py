"""The fitted forecasts of the shipped pipelines (`Quality(forecast="fitted")`).

    OMP_NUM_THREADS=1 python -m training.forecasts unet dit

Runs `maskfx fit-forecast` with prompts that name a thing of the training's scenes, for pictures
from noise and from a picture, and for edits of these scenes. `training.build` makes the pipeline's
folder anew, so this comes after it. Took 80 minutes for the whole pictures of the UNet beside
other work.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from maskfx.cli.fit_forecast import fit_forecast_of
from maskfx.runtime.reuse.fitted_forecast import FILE, load_table
from maskfx.serve.config import ServeSettings
from maskfx.serve.request import Pixels
from maskfx.shipped import FOLDER, names
from training.captions import caption_of
from training.cards import forecast_section
from training.paint import paint
from training.scenes import draw_scene

RUNS, SCENES = 12, 6  # of edits: scenes that are edited
# steps, strength, `every` and `least` of what is fitted for whole pictures
FITTED = (
    (20, 1.0, 4, 6),
    (20, 1.0, 5, 2),
    (20, 1.0, 7, 2),
    (20, 0.6, 7, 2),
    (20, 0.6, 11, 2),
    (25, 1.0, 5, 2),
)
# for edits; those of the UNet are closer by extrapolation (bench.edit_forecasts)
EDITS: dict[str, tuple[tuple[int, float, int, int], ...]] = {
    "dit": ((25, 1.0, 4, 6), (25, 1.0, 5, 2)),
    "unet": (),
}


def prompts(count: int) -> list[str]:
    """Return prompts that name a thing, as those of edits do, another for each run."""
    found = []
    for number in range(count):
        scene = draw_scene("train", number)
        found.append(caption_of(scene.things[0], scene, np.random.default_rng((15, number))))
    return found


def pictures() -> list[Pixels]:
    """Return the scenes that are edited."""
    return [paint(draw_scene("train", number)).pixels for number in range(SCENES)]


def write_section(name: str) -> None:
    """Write what was fitted into the pipeline's card, before the part about its judge."""
    path = FOLDER / name / "README.md"
    begin, mark, judge = path.read_text(encoding="utf-8").partition("## Judge\n")
    begin, _, _ = begin.partition("## Forecasts\n")
    section = forecast_section(name, load_table(FOLDER / name / FILE))
    path.write_text(f"{begin.rstrip()}\n\n{section}\n{mark}{judge}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=names())
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    captions, scenes = prompts(given.runs), pictures()
    for name in given.names:
        settings = ServeSettings(model=name)
        for steps, strength, every, least in FITTED:
            fit_forecast_of(settings, None, every, least, steps, strength, given.runs, captions)
        for steps, strength, every, least in EDITS[name]:
            fit_forecast_of(
                settings, None, every, least, steps, strength, given.runs, captions, True, scenes
            )
        write_section(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
