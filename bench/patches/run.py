"""Speed against likeness of pictures whose patches are reused across steps.

    OMP_NUM_THREADS=1 python -m bench.patches --model dit --pictures 300 \\
        --rows /tmp/dit.json --seconds 300

All of a picture is made: from noise (text-to-image), or from a picture (image-to-image, --strength
below 1). The reference of each picture is diffusers' run with the same noise and all steps. Sides
alternate; speed is the CPU time of the whole call, encoders and autoencoder included, because
machines are shared. Likeness is SSIM and PSNR to the reference, the share of crops (the picture and
its quarters) in which the probe names the same shape and colour, and the Frechet distance of the
probe's features of a side's pictures to those of the references. For each baseline it is reported
whether it crosses our frontier (`bench/patches/frontier.py`).

With --sizes the pictures have these sizes in turn, and are compared with runs of the same size.

With --rows every finished picture is kept in that file, and the same command goes on with those
that are missing; --seconds ends a run after the picture during which they are over. --only adds
sides to the same pictures.

With --judge-runs a judge is trained on runs of other pictures first (`maskfx train-judge`); with
--rows it is kept beside them. The oracle knows each picture's course in advance; it shows what a
judge could reach at most.

Writes patches-<model>.json to --out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench import harness
from bench.patches import frontier
from bench.patches.kept import Kept, common
from bench.patches.sides import DENSE, Bench, Made, Side, sides_of
from bench.quality.bed import WARM_UP, Bed, Pixels
from bench.quality.metrics import frechet, psnr, ssim
from bench.report import columns
from maskfx.pipelines.call_defaults import call_of
from maskfx.runtime.reuse.judge_training import train_judge
from maskfx.runtime.reuse.judges import TableJudge, load_judge
from maskfx.shipped import FOLDER as SHIPPED
from maskfx.shipped import reference
from training.edits import load_probe
from training.probe import crop_around
from training.scenes import COLOURS, SHAPES, SIDE
from training.train import RUNS
from training.vae import as_pictures

Row = dict[str, Any]
STEPS = 20
PLANS: dict[str, dict[str, Any]] = {
    "unet": {
        "steps": (12, 8, 6, 5, 4),
        "forecasts": ("output", "clean", "fitted"),
        "settings": (
            *(("step", "alike", 2, value) for value in (0.1, 0.2)),
            ("step", "alike", 4, 0.1),
            ("step", "each", 2, 0.1),
            *(("stretch", "each", 2, value) for value in (0.1, 0.2)),
            ("stretch", "each", 4, 0.1),
            *(("stretch", "alike", 2, value) for value in (0.1, 0.2)),
        ),
        "variant": {"threshold": 0.1, "age": 2},
        "tolerances": (0.1,),
        "age": 4,
    },
    "dit": {
        "steps": (12, 8, 6, 5, 4),
        "forecasts": ("output", "fitted"),  # a flow model's clean latents aren't continued
        "settings": (
            *(("step", "alike", 4, value) for value in (0.003, 0.005, 0.01)),
            ("step", "alike", 2, 0.005),
            ("step", "each", 4, 0.005),
            *(("stretch", "each", 4, value) for value in (0.003, 0.005, 0.01)),
            ("stretch", "each", 2, 0.005),
            *(("stretch", "alike", 4, value) for value in (0.003, 0.005, 0.01)),
            ("stretch", "alike", 2, 0.005),
        ),
        "variant": {"threshold": 0.005, "age": 2},
        "tolerances": (0.1,),
        "age": 4,
    },
}
TOLERANCE = 0.1  # of a trained judge
FIGURES = ("ssim", "psnr", "patches", "named")  # whose means are taken
# Families of which one side runs before all others.
WARMED = (DENSE, "whole steps", "patches, threshold, step", "patches, threshold, stretch")


def trained(bench: Bench, runs: int, age: int) -> TableJudge:
    """A judge of runs of other pictures."""
    observed = [[bench.observed(bench.bed.case(WARM_UP + 1 + n))] for n in range(runs)]
    return train_judge(observed, age, TOLERANCE, {"side": bench.side, "steps": bench.bed.steps})


class Probe:
    """What the probe sees of a whole picture and of its quarters."""

    def __init__(self, runs: Path) -> None:
        layers: Any = load_probe(runs)
        self._hidden: nn.Module = layers[:-1]
        self._names: nn.Module = layers[-1]

    @torch.no_grad()
    def sees(self, pixels: Pixels) -> tuple[list[float], list[list[int]]]:
        """The features of the picture; shape and colour of the picture and of each quarter."""
        height, width = pixels.shape[:2]
        places = [(x, y, 1 / 6) for y in (1 / 4, 3 / 4) for x in (1 / 4, 3 / 4)]
        crops = [
            crop_around(pixels, x * width, y * height, part * max(height, width))
            for x, y, part in ((1 / 2, 1 / 2, 1 / 3), *places)
        ]
        hidden = self._hidden(as_pictures(np.stack(crops)))
        scores = self._names(hidden).split((len(SHAPES), len(COLOURS)), 1)
        names = torch.stack([one.argmax(1) for one in scores], 1)
        return [round(x, 4) for x in hidden[0].tolist()], names.tolist()


class Contest:
    """All sides on one picture after another, until the time is over.

    Args:
        bench: The pipeline and its task.
        task: The name of the task.
        kept: What was made before, and what is made.
        probe: Sees the pictures.
        until: The end of the time, as `time.monotonic` counts.
    """

    def __init__(self, bench: Bench, task: str, kept: Kept, probe: Probe, until: float) -> None:
        self.bench, self.task, self.kept, self.probe = bench, task, kept, probe
        self.until = until

    def run(self, sides: Sequence[Side], pictures: int) -> None:
        names = [side.name for side in sides]
        left = [n for n in range(pictures) if self.kept.lacking(self.task, n, names)]
        if left and time.monotonic() < self.until:
            self.warm_up(sides)
        for index in left:
            if time.monotonic() >= self.until:
                print(f"{self.task}: the time is over; run the same command again", flush=True)
                return
            self.picture(index, sides)

    def warm_up(self, sides: Sequence[Side]) -> None:
        """Captures are no part of any time."""
        for side in {side.family: side for side in sides if side.family in WARMED}.values():
            for case in self.bench.warm_ups():
                side.run(self.bench, case)

    def picture(self, index: int, sides: Sequence[Side]) -> None:
        """Make what a picture lacks, and the reference; the order of sides changes."""
        lacking = self.kept.lacking(self.task, index, [side.name for side in sides])
        todo = [side for side in sides if side.name in lacking and side.name != DENSE]
        shift = index % max(1, len(todo))
        case = self.bench.bed.case(index)
        dense = sides[0].run(self.bench, case)
        found = {DENSE: self.row(dense, dense)}
        for side in todo[shift:] + todo[:shift]:
            try:
                found[side.name] = self.row(side.run(self.bench, case), dense)
            except Exception as error:
                if side.family.startswith(("patches", "whole", "fewer")):
                    raise
                self.kept.leave_out(self.task, side.name, harness.describe(error))
                continue
            print(f"{self.task}, picture {index}: {side.name}", flush=True)
        self.kept.add(self.task, index, found)

    def row(self, made: Made, dense: Made) -> Row:
        features, names = self.probe.sees(made.pixels)
        _, wanted = self.probe.sees(dense.pixels)
        return {
            "seconds": made.seconds,
            "times_faster": dense.seconds / made.seconds,
            "ssim": ssim(made.pixels, dense.pixels),
            "psnr": psnr(made.pixels, dense.pixels),
            "patches": made.share,
            "named": statistics.fmean(a == b for a, b in zip(names, wanted, strict=True)),
            "features": features,
        }


def summary(kept: Kept, task: str, sides: Sequence[Side]) -> list[Row]:
    """Means over the pictures of each side, the median of the speeds, and the Frechet distance."""
    found = []
    reference_rows = kept.rows(task, DENSE)
    for side in sides:
        rows = kept.rows(task, side.name)
        if not rows:
            continue
        own = rows.values()
        means = {k: statistics.fmean(row[k] for row in own) for k in FIGURES}
        speed = statistics.median(row["times_faster"] for row in own)
        one, other = (np.array(v) for v in common(rows, reference_rows, "features"))
        distance = frechet(one, other) if len(one) > 1 else None
        found.append(
            {
                "side": side.name,
                "family": side.family,
                "pictures": len(rows),
                "times_faster": speed,
                **means,
                "frechet": distance,
            }
        )
    return found


def table(rows: Sequence[Row]) -> str:
    lines = [
        ["side", "pictures", "times faster", "SSIM", "PSNR", "named alike", "Frechet", "patches"]
    ]
    for row in rows:
        figures = [f"{row['times_faster']:.2f}", f"{row['ssim']:.4f}", f"{row['psnr']:.1f}"]
        figures.append(f"{row['named']:.1%}")
        figures.append("" if row["frechet"] is None else f"{row['frechet']:.3f}")
        lines.append([row["side"], str(row["pictures"]), *figures, f"{row['patches']:.0%}"])
    return columns(lines)


def judge_of(bench: Bench, options: argparse.Namespace, place: Path) -> Path | None:
    """The judge's file: one that was kept, or a new one."""
    if not options.judge_runs:
        return None
    if not place.exists():
        found = trained(bench, options.judge_runs, PLANS[options.model]["age"])
        found.save(place)
    return place


def chosen(sides: Sequence[Side], wanted: Sequence[str]) -> list[Side]:
    """The sides whose family or name begins so; dense always."""
    starts = (DENSE, *wanted)
    return [
        side
        for side in sides
        if not wanted or side.family.startswith(starts) or side.name.startswith(starts)
    ]


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=sorted(PLANS), default="dit")
    parser.add_argument("--pictures", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--strength", type=float, nargs="+", default=[1.0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[SIDE], help="pixels, in turn")
    parser.add_argument("--judge-runs", type=int, default=0)
    parser.add_argument("--rows", type=Path, help="the file that keeps finished pictures")
    parser.add_argument("--seconds", type=float, default=inf, help="after which a run ends")
    parser.add_argument("--quick", action="store_true", help="one setting of each family")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of families or names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pipelines", type=Path, default=SHIPPED, help="the trained pipelines")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where the probe was trained")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    header = harness.header("bench.patches", arguments)
    settings = {
        "model": options.model,
        "pipelines": options.pipelines.name,
        "steps": options.steps,
        **({"sizes": options.sizes} if options.sizes != [SIDE] else {}),
        "judge_runs": options.judge_runs,
        "threads": options.threads,
    }
    kept = Kept(options.rows, settings)
    kept.begin(header)
    plan = PLANS[options.model]
    if options.quick:
        plan = {k: v[-1:] if isinstance(v, tuple) else v for k, v in plan.items()}
    tasks: list[Row] = []
    began = time.monotonic()
    origin = reference(options.model, folder=options.pipelines)
    bed = Bed(options.model, origin, options.steps, call_of(options.pipelines / options.model))
    probe = Probe(options.runs)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        place = Path(folder) / "patches" if options.rows is None else options.rows.with_suffix("")
        for strength in options.strength:
            bench = Bench(bed, strength, options.sizes)
            judge = judge_of(bench, options, place.parent / f"{place.name}-judge.npz")
            sides = chosen(sides_of(bench, plan, judge), options.only)
            task = "text-to-image" if strength == 1 else f"image-to-image, strength {strength}"
            Contest(bench, task, kept, probe, began + options.seconds).run(sides, options.pictures)
            means = summary(kept, task, sides)
            absent = {
                n: why for n, why in kept.absent(task).items() if n in {s.name for s in sides}
            }
            best = [row["side"] for row in frontier.frontier(means)]
            asked = frontier.report(means)
            tasks.append(
                {"task": task, "sides": means, "frontier": best, "asked": asked, "absent": absent}
            )
            print(f"{options.model}, {task}\n{table(means)}", flush=True)
            print("frontier:", "; ".join(best), *frontier.lines(asked), sep="\n", flush=True)
        card = {} if judge is None else {"judge": load_judge(judge).card}
    spent = {"pictures": options.pictures, "seconds": time.monotonic() - began}
    earlier = {"earlier_sessions": kept.sessions[:-1]} if len(kept.sessions) > 1 else {}
    result = {**header, **settings, **earlier, **card, **spent, "tasks": tasks}
    name = f"patches-{options.model}{'-quick' if options.quick else ''}.json"
    harness.write_json(options.out / name, result)
    return 0
