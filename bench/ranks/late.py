"""Pictures and times of steps whose ranks read each other's rows of the step before.

    OMP_NUM_THREADS=1 python -m bench.ranks.late --model unet --pictures 2

The shipped models, two ranks of one thread each. Runs of a picture: `edit`, a template's edit under
a held-out mask, and `dense`, an edit of all sites. Each is made with `sync`, in which ranks wait,
and with `late`; `one` is one process without ranks. All compute every step, with the same noise.
Likeness is that of `late` to `sync`: SSIM of the picture, SSIM of the mask's bounding box, and the
relative difference of the latents. Beside it stands `sync` to `one`, which differs by rounding.
Times are medians of the steps after the first one. With fewer idle cores than ranks they mean
nothing. Writes ranks-late-<model>.json to bench/results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import maskfx
from bench.harness import ROOT, header, write_json
from bench.quality.edits import draw_edit
from bench.quality.metrics import ssim, window_of
from bench.report import columns
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.rank_group import RankGroup
from maskfx.pipelines.call_defaults import call_of
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.shipped import FOLDER, reference

ASKED = {"ssim": 0.95}
SYNC = maskfx.Quality.of("all-steps")
QUALITIES = {"one": SYNC, "sync": SYNC, "late": replace(SYNC, parallel="late")}
RUNS = ("edit", "dense")
FREE = LinkCosts(exchange=0.0, send=0.0)  # every step is cut
WAITS = Waits(step=900.0, exchange=600.0, start=900.0)  # a busy machine is no failure here


class Bed:
    """A shipped pipeline, and two engines: of one process, and of two ranks."""

    def __init__(self, model: str, steps: int) -> None:
        origin = reference(model)
        origin.set_progress_bar_config(disable=True)
        self.pipe = maskfx.compile(origin, quality="all-steps")
        self.told = {**call_of(FOLDER / model), "num_inference_steps": steps}
        self.engines = {"one": maskfx.Engine()}
        self.engines["sync"] = self.engines["late"] = maskfx.Engine(ranks=2)
        runner = self.engines["sync"].runner
        self.groups = [
            RankGroup(denoiser, 2, waits=WAITS, costs=FREE)
            for denoiser in pipeline_state_of(self.pipe).denoisers.values()
        ]
        for group in self.groups:
            runner._groups[group.denoiser.module] = group

    def made(self, side: str, run: str, index: int) -> tuple[Tensor, list[float]]:
        """Return the latents of one run, and the seconds of its steps."""
        edit, engine = draw_edit(index), self.engines[side]
        mask = edit.mask if run == "edit" else np.ones_like(edit.mask)
        height, width = edit.mask.shape
        given = {
            **self.told,
            "height": height,
            "width": width,
            "image": Image.fromarray(edit.pixels),
            "mask_image": Image.fromarray(mask),
            "generator": torch.Generator().manual_seed(index),
            "quality": QUALITIES[side],
            "output_type": "latent",
        }
        latents = engine.submit(self.pipe, edit.prompt, **given).result().images
        own = list(engine.steps)[-self.told["num_inference_steps"] :]
        return latents, [step.seconds for step in own]

    def pixels(self, latents: Tensor, index: int, run: str) -> Any:
        """Decode latents; an edit keeps the original's pixels outside the mask."""
        vae, edit = self.pipe.vae, draw_edit(index)
        if latents.dim() == 3:  # packed
            side = int(edit.pixels.shape[0] / self.pipe.vae_scale_factor / 2) * 2
            latents = self.pipe._unpack_latents(
                latents, *edit.pixels.shape[:2], self.pipe.vae_scale_factor
            )
            assert latents.shape[-1] == side
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        image = vae.decode(latents / vae.config.scaling_factor + shift, return_dict=False)[0]
        found = self.pipe.image_processor.postprocess(image, output_type="np")[0]
        found = (found * 255).round().astype(np.uint8)
        return found if run == "dense" else np.where(edit.mask[..., None], found, edit.pixels)

    def check(self) -> None:
        """Fail if a step wasn't computed by the ranks."""
        for group in self.groups:
            assert group.computed_here == group.failures == 0, "a step ran in this process"

    def close(self) -> None:
        for engine in {id(one): one for one in self.engines.values()}.values():
            engine.close()


def likeness(bed: Bed, index: int, run: str, one: Tensor, other: Tensor) -> dict[str, float]:
    """How alike two runs of a picture are."""
    pictures = [bed.pixels(latents, index, run) for latents in (one, other)]
    box = window_of(draw_edit(index).mask)
    crops = [picture[box] if run == "edit" else picture for picture in pictures]
    return {
        "ssim": ssim(*pictures),
        "ssim_of_mask": ssim(*crops),
        "difference": float((one - other).norm() / other.norm()),
    }


def measure(bed: Bed, pictures: int) -> list[dict[str, Any]]:
    found = []
    for index in range(pictures):
        for run in RUNS:
            made = {side: bed.made(side, run, index) for side in ("one", "sync", "late")}
            row = {"picture": index, "run": run, "mask": float(draw_edit(index).mask.mean())}
            for side, other in (("late", "sync"), ("sync", "one")):
                row[f"{side} to {other}"] = likeness(bed, index, run, made[side][0], made[other][0])
            count = bed.told["num_inference_steps"]
            row["seconds"] = {
                side: statistics.median(seconds[-count:][1:]) for side, (_, seconds) in made.items()
            }
            found.append(row)
            bed.check()
            print(f"picture {index}: {run}: {row}", flush=True)
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the likeness by run, its least SSIM, and medians of the times."""
    found: dict[str, Any] = {}
    for run in RUNS:
        own = [row for row in rows if row["run"] == run]
        late = [row["late to sync"] for row in own]
        found[run] = {
            **{name: statistics.fmean(one[name] for one in late) for name in late[0]},
            "least_ssim": min(one["ssim"] for one in late),
            "difference_of_sync": max(row["sync to one"]["difference"] for row in own),
            "seconds": {
                side: statistics.median(row["seconds"][side] for row in own) for side in QUALITIES
            },
        }
        found[run]["met"] = found[run]["ssim"] >= ASKED["ssim"]
    return found


def table(found: dict[str, Any]) -> str:
    lines = [["run", "SSIM", "of the mask", "least", "latents", "ms: one", "sync", "late"]]
    for run, row in found.items():
        times = [f"{1000 * row['seconds'][side]:.0f}" for side in QUALITIES]
        numbers = [f"{row[name]:.4f}" for name in ("ssim", "ssim_of_mask", "least_ssim")]
        lines.append([run, *numbers, f"{row['difference']:.3f}", *times])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.late", description=__doc__)
    parser.add_argument("--model", choices=("unet", "dit"), default="unet")
    parser.add_argument("--pictures", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    result = header("bench.ranks.late", given)
    result["load"], result["asked"] = os.getloadavg(), ASKED
    bed = Bed(options.model, options.steps)
    try:
        with torch.no_grad():
            result["rows"] = measure(bed, options.pictures)
    finally:
        bed.close()
    result["summary"] = summary(result["rows"])
    result["load_after"] = os.getloadavg()
    print(table(result["summary"]))
    write_json(options.out / f"ranks-late-{options.model}.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
