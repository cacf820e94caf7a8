"""The judges of the shipped pipelines: which patches have to be computed (`maskfx.PatchReuse`).

    OMP_NUM_THREADS=1 python -m training.judges unet dit

Runs `maskfx train-judge` with captions of the training's scenes. The last quarter of the runs is
held out; the card, judge.json, and the pipeline's README.md have the scores. `training.build` makes
the pipeline's folder anew, so this comes after it. Takes about a minute per pipeline.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from maskfx.cli.train_judge import train_judge_of
from maskfx.runtime.reuse.judges import FILE, load_judge
from maskfx.serve.config import ServeSettings
from maskfx.shipped import FOLDER, names
from training.captions import caption
from training.cards import judge_section
from training.scenes import draw_scene

SIDES = {"unet": 8, "dit": 4}  # sites along a patch: 16 patches in a picture of 256x256
RUNS, STEPS, AGE, TOLERANCE = 16, 20, 6, 0.1


def prompts(count: int) -> list[str]:
    """Return captions of scenes, another for each run."""
    return [caption(draw_scene("train", n), np.random.default_rng((14, n))) for n in range(count)]


def write_section(name: str) -> None:
    """Write the scores at the end of the pipeline's card."""
    path = FOLDER / name / "README.md"
    begin, _, _ = path.read_text(encoding="utf-8").partition("## Judge\n")
    section = judge_section(load_judge(FOLDER / name / FILE).card)
    path.write_text(begin.rstrip() + "\n\n" + section, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=names())
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    for name in given.names:
        settings = ServeSettings(model=name)
        side = SIDES.get(name, 8)
        train_judge_of(settings, None, given.runs, STEPS, AGE, side, TOLERANCE, prompts(given.runs))
        write_section(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
