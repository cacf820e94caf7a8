"""Train the judge that decides which patches a model computes, on runs of the model itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

import torch

import maskfx
from maskfx.cli.training_runs import PROMPTS, arguments_for, beside, check_out
from maskfx.errors import InputError
from maskfx.ir import progress
from maskfx.pipelines.fitting.observed_runs import observed_run
from maskfx.runtime.reuse.judge_training import AGREEING, ObservedRun, train_judge
from maskfx.runtime.reuse.judges import FILE, TableJudge
from maskfx.serve.config import ServeSettings
from maskfx.serve.models.model_source import load_pipeline, told_by
from maskfx.serve.models.pipeline_set import PipelineSet


def train_judge_of(
    settings: ServeSettings,
    out: Path | None,
    runs: int,
    steps: int | None,
    age: int,
    side: int,
    tolerance: float,
    prompts: Sequence[str],
) -> int:
    """Write the judge of a model and print its card."""
    wanted = (("--runs", runs, 2), ("--age", age, 1), ("--side", side, 1), ("--steps", steps, 1))
    for name, value, least in wanted:
        if value is not None and value < least:
            raise InputError(f"{name} {value}: give {least} or more")
    if not 0 < tolerance < inf:
        raise InputError(f"--tolerance {tolerance}: give a relative error, such as 0.1")
    path = out or beside(settings.model, "train-judge", FILE)
    if path.suffix != ".npz":
        raise InputError(
            f"--out {path}: expected a file name with .npz; the card is written as .json"
        )
    check_out(path)
    began = time.perf_counter()
    judge = trained(settings, runs, steps, age, side, tolerance, tuple(prompts) or PROMPTS)
    judge.card["seconds"] = round(time.perf_counter() - began, 1)
    judge.save(path)
    print(summary(judge, path))
    return 0


def trained(
    settings: ServeSettings,
    runs: int,
    steps: int | None,
    age: int,
    side: int,
    tolerance: float,
    prompts: Sequence[str],
) -> TableJudge:
    """Run the model with other noise, prompts and pictures each time, and train a judge."""
    pipeline, rows = observed_runs(settings, range(runs), steps, side, prompts)
    name = max(rows[0], key=lambda one: len(rows[0][one][0].calls[0].rates))
    about = {
        "model": settings.model or "shipped",
        "pipeline": pipeline,
        "denoiser": name,
        "stretches": len(rows[0][name][0].calls[0].rates),
        "steps": len(rows[0][name][0].calls),
        "side": side,
        "prompts": list(prompts),
    }
    return train_judge([row[name] for row in rows], age, tolerance, about)


def observed_runs(
    settings: ServeSettings,
    seeds: Sequence[int],
    steps: int | None,
    side: int,
    prompts: Sequence[str],
) -> tuple[str, list[dict[str, list[ObservedRun]]]]:
    """Return the pipeline's class, and by seed what a run that computes everything shows."""
    pipe = load_pipeline(settings.model, settings.dtype, settings.device, settings.controlnets)
    quality = maskfx.Quality(patches=maskfx.PatchReuse(side=side), reuse="steps")
    family = PipelineSet.of(
        pipe, lambda one: maskfx.compile(one, quality=quality), told_by(settings.model)
    )
    member = family.main
    rows: list[dict[str, list[ObservedRun]]] = []
    with torch.no_grad(), progress.hidden(False):
        for seed in seeds:
            arguments = arguments_for(family, member, seed, steps, prompts[seed % len(prompts)])
            rows.append(observed_run(member.pipe, arguments, side))
            print(f"run {len(rows)} of {len(seeds)}", flush=True)
    return type(member.plain).__name__, rows


def summary(judge: TableJudge, path: Path) -> str:
    card = judge.card
    area = "-" if card["auc"] is None else f"{card['auc']:.3f}"
    weights = ", ".join(f"{name} {value:.2f}" for name, value in card["importance"].items())
    lines = [
        f"{path}: {card['pipeline']}, {card['denoiser']} of {card['stretches']} stretches, "
        f"{card['samples']} samples of {card['runs'] - card['held_out']} runs",
        f"held out: accuracy {card['accuracy']:.3f}, AUC {area}",
        f"the table decides as the forest in {card['table_agreement']:.2%} of the samples",
        f"importance: {weights}",
    ]
    if card["table_agreement"] < AGREEING:
        lines.append(f"that is less than {AGREEING:.0%}; more --runs may help")
    return "\n".join(lines)
