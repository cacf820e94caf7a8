"""Speed against likeness of pictures whose patches are reused across steps.

    OMP_NUM_THREADS=1 python -m bench.patches --model dit --pictures 4

All of a picture is made: from noise (text-to-image), or from a picture (image-to-image, --strength
below 1). The reference of each picture is diffusers' run with the same noise and all steps. Sides
alternate; speed is the CPU time of the whole call, encoders and autoencoder included, because
machines are shared. Likeness is SSIM and PSNR to the reference.

With --judge-runs a judge is trained on runs of other pictures first (`maskfx train-judge`).
The oracle knows each picture's course in advance; it shows what a judge could reach at most.

Writes patches-<model>.json to --out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.patches.sides import DENSE, Bench, Made, Side, sides_of
from bench.quality.bed import WARM_UP, Bed
from bench.quality.metrics import psnr, ssim
from bench.report import columns
from maskfx.pipelines.call_defaults import call_of
from maskfx.runtime.reuse.judge_training import train_judge
from maskfx.runtime.reuse.judges import TableJudge
from maskfx.shipped import FOLDER, reference

Row = dict[str, Any]
STEPS = 20
PLANS: dict[str, dict[str, Any]] = {
    "unet": {
        "steps": (12, 8),
        "every": (2, 3, 4),
        "settings": (
            *(("step", "alike", 2, value) for value in (0.1, 0.2)),
            ("step", "alike", 4, 0.1),
            ("step", "each", 2, 0.1),
            *(("stretch", "each", 2, value) for value in (0.1, 0.2)),
            ("stretch", "each", 4, 0.1),
            *(("stretch", "alike", 2, value) for value in (0.1, 0.2)),
        ),
        "tolerances": (0.1,),
        "age": 4,
    },
    "dit": {
        "steps": (12, 8),
        "every": (2, 3, 4),
        "settings": (
            *(("step", "alike", 4, value) for value in (0.003, 0.005, 0.01)),
            ("step", "alike", 2, 0.005),
            ("step", "each", 4, 0.005),
            *(("stretch", "each", 4, value) for value in (0.003, 0.005, 0.01)),
            ("stretch", "each", 2, 0.005),
            *(("stretch", "alike", 4, value) for value in (0.003, 0.005, 0.01)),
            ("stretch", "alike", 2, 0.005),
        ),
        "tolerances": (0.1,),
        "age": 4,
    },
}
TOLERANCE = 0.1  # of a trained judge
# Families of which one side runs before all others.
WARMED = (DENSE, "patches, threshold, step", "patches, threshold, stretch")


def trained(bench: Bench, runs: int, age: int) -> TableJudge:
    """A judge of runs of other pictures."""
    observed = [[bench.observed(bench.bed.case(WARM_UP + 1 + n))] for n in range(runs)]
    return train_judge(observed, age, TOLERANCE, {"side": bench.side, "steps": bench.bed.steps})


def contest(bench: Bench, sides: Sequence[Side], pictures: int) -> Iterator[Row]:
    """A row for each side and picture; a side that the model can't take is left out."""
    absent: set[str] = set()
    warm = bench.bed.case(WARM_UP)  # captures are no part of any time
    for side in {side.family: side for side in sides if side.family in WARMED}.values():
        side.run(bench, warm)
    for index in range(pictures):
        case = bench.bed.case(index)
        dense: Made | None = None
        shift = index % max(1, len(sides) - 1)
        for side in [sides[0], *sides[1 + shift :], *sides[1 : 1 + shift]]:
            if side.name in absent:
                continue
            try:
                made = side.run(bench, case)
            except Exception as error:
                if side.family.startswith(("patches", "whole", DENSE)):
                    raise
                absent.add(side.name)
                yield {"side": side.name, "absent": harness.describe(error)}
                continue
            dense = made if side.name == DENSE else dense
            assert dense is not None, "dense is the first side"
            print(f"picture {index}: {side.name}", flush=True)
            yield {
                "side": side.name,
                "picture": index,
                "seconds": made.seconds,
                "times_faster": dense.seconds / made.seconds,
                "ssim": ssim(made.pixels, dense.pixels),
                "psnr": psnr(made.pixels, dense.pixels),
                "patches": made.share,
            }


def summary(rows: Sequence[Row], sides: Sequence[Side]) -> list[Row]:
    """Means over the pictures of each side; the median of the speeds."""
    found = []
    for side in sides:
        own = [row for row in rows if row["side"] == side.name and "picture" in row]
        if not own:
            continue
        means = {k: statistics.fmean(row[k] for row in own) for k in ("ssim", "psnr", "patches")}
        speed = statistics.median(row["times_faster"] for row in own)
        found.append({"side": side.name, "family": side.family, "times_faster": speed, **means})
    return found


def frontier(rows: Sequence[Row]) -> list[str]:
    """The sides than which no other is both faster and more alike."""
    found: list[str] = []
    best = -1.0
    for row in sorted(rows, key=lambda row: (-row["times_faster"], -row["ssim"])):
        if row["ssim"] > best:
            best = row["ssim"]
            found.append(row["side"])
    return found[::-1]


def table(rows: Sequence[Row]) -> str:
    lines = [["side", "times faster", "SSIM", "PSNR", "patches computed"]]
    for row in rows:
        figures = [f"{row['times_faster']:.2f}", f"{row['ssim']:.4f}", f"{row['psnr']:.1f}"]
        lines.append([row["side"], *figures, f"{row['patches']:.0%}"])
    return columns(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=sorted(PLANS), default="dit")
    parser.add_argument("--pictures", type=int, default=2)
    parser.add_argument("--strength", type=float, nargs="*", default=[1.0])
    parser.add_argument("--judge-runs", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one setting of each family")
    parser.add_argument("--only", nargs="*", default=[], help="families of sides, by beginning")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=harness.ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = {**harness.header("bench.patches", arguments), "model": options.model, "steps": STEPS}
    plan = PLANS[options.model]
    if options.quick:
        plan = {k: v[-1:] if isinstance(v, tuple) else v for k, v in plan.items()}
    began = time.monotonic()
    bed = Bed(options.model, reference(options.model), STEPS, call_of(FOLDER / options.model))
    runs = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        judge = None
        for strength in options.strength:
            bench = Bench(bed, strength)
            if options.judge_runs and judge is None:
                found = trained(bench, options.judge_runs, plan["age"])
                judge = Path(folder) / "judge.npz"
                found.save(judge)
                result["judge"] = found.card
            sides = sides_of(bed, plan, judge)
            if options.only:
                kept = (DENSE, *options.only)
                sides = [side for side in sides if side.family.startswith(kept)]
            rows = list(contest(bench, sides, options.pictures))
            means = summary(rows, sides)
            task = "text-to-image" if strength == 1 else f"image-to-image, strength {strength}"
            absent = {row["side"]: row["absent"] for row in rows if "absent" in row}
            runs.append(
                {"task": task, "sides": means, "frontier": frontier(means), "absent": absent}
            )
            print(f"{options.model}, {task}\n{table(means)}", flush=True)
            print("frontier:", "; ".join(runs[-1]["frontier"]), flush=True)
    result |= {"pictures": options.pictures, "seconds": time.monotonic() - began, "tasks": runs}
    name = f"patches-{options.model}{'-quick' if options.quick else ''}.json"
    harness.write_json(options.out / name, result)
    return 0
