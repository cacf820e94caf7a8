"""The pictures at the top of README.md: two edits by the shipped transformer, dense and masked.

    OMP_NUM_THREADS=1 python -m bench.teaser

Makes edits of `bench.quality` by diffusers and with the default quality, from the same noise.
Writes teaser-dit.png, a row for each edit: template, mask, dense, maskfx; and teaser-dit.json with
the prompts and the likeness. Times are those of quality-dit.json, which has many edits.

The edits were chosen by eye from the dense pictures of edits 12 to 59, because they show the shape
that the prompt names. The transformer draws it in 69 % of the edits of quality-dit.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bench import harness
from bench.masks import production_ratios
from bench.quality.bed import Bed, Case, Made
from bench.quality.metrics import psnr
from bench.quality.ours import Kept, Ours
from maskfx.pipelines.call_defaults import call_of
from maskfx.pipelines.quality import Quality
from maskfx.shipped import FOLDER, reference

MODEL, STEPS, EDITS, QUALITY = "dit", 25, (32, 26), "balanced"
GREY = 128


def sheet(cases: Sequence[Case], dense: Sequence[Made], ours: Sequence[Made]) -> Image.Image:
    """Template, mask, dense and maskfx side by side, a row for each edit."""
    rows = []
    for case, one, other in zip(cases, dense, ours, strict=True):
        mask = np.where(case.edit.mask[..., None], np.uint8(GREY), case.edit.pixels)
        rows.append(np.concatenate([case.edit.pixels, mask, one.pixels, other.pixels], 1))
    return Image.fromarray(np.concatenate(rows))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.teaser")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    header = harness.header("bench.teaser", arguments)
    bed = Bed(MODEL, reference(MODEL), STEPS, call_of(FOLDER / MODEL))
    ours, kept = Ours(bed), Kept(any_mask=True)
    cases = [bed.case(index) for index in EDITS]
    dense = bed.dense(cases)
    with ours.opened(cases, kept, records=True) as opened:
        edited = ours.edit(cases, kept, opened, Quality.of(QUALITY))
    edits = [
        {
            "edit": case.index,
            "prompt": case.edit.prompt,
            "masked": float(case.edit.mask.mean()),
            "psnr_inside": psnr(other.pixels, one.pixels, case.edit.mask),
        }
        for case, one, other in zip(cases, dense, edited, strict=True)
    ]
    result = {
        **header,
        "model": MODEL,
        "steps": STEPS,
        "quality": QUALITY,
        "mask_ratios": "those of the service"
        if production_ratios()
        else "the distribution fitted to them",
        "chosen": "by eye from the dense pictures of edits 12 to 59, as they show the named shape",
        "edits": edits,
    }
    sheet(cases, dense, edited).save(options.out / f"teaser-{MODEL}.png", optimize=True)
    harness.write_json(options.out / f"teaser-{MODEL}.json", result)
    for edit in edits:
        print(f"{edit['prompt']}: {edit['psnr_inside']:.1f} dB inside the mask")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
