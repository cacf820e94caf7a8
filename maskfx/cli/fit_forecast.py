"""Fit the forecasts of a model's skipped steps, on runs of the model itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

import maskfx
from maskfx.cli.edit import opened
from maskfx.cli.training_runs import PROMPTS, arguments_for, beside, check_out, edit_for
from maskfx.errors import InputError
from maskfx.ir import progress
from maskfx.pipelines.fitting.fitted_runs import FitReport, fit_forecasts
from maskfx.runtime.reuse.fitted_forecast import FILE, ForecastTable, load_table
from maskfx.serve.config import ServeSettings
from maskfx.serve.models.model_source import load_pipeline, told_by
from maskfx.serve.models.pipeline_set import PipelineSet
from maskfx.serve.request import Pixels

MARGIN = 2  # of the edits: that of most named qualities


def fit_forecast_of(
    settings: ServeSettings,
    out: Path | None,
    every: int,
    least: int,
    steps: int | None,
    strength: float | None,
    runs: int,
    prompts: Sequence[str],
    edits: bool = False,
    pictures: Sequence[Pixels] = (),
) -> int:
    """Write the weights, beside those of other schedules in the file, and print how they fit."""
    wanted = (("--runs", runs, 2), ("--every", every, 2), ("--least", least, 2))
    for name, value, lowest in (*wanted, ("--steps", steps, 2)):
        if value is not None and value < lowest:
            raise InputError(f"{name} {value}: give {lowest} or more")
    if strength is not None and not 0 < strength <= 1:
        raise InputError(f"--strength {strength}: give a number above 0, 1 at most")
    path = out or beside(settings.model, "fit-forecast", FILE)
    if path.suffix != ".json":
        raise InputError(f"--out {path}: expected a file name with .json")
    check_out(path)
    began = time.perf_counter()
    quality = maskfx.Quality(margin=MARGIN, every=every, least=least, unmasked=not edits)
    texts = tuple(prompts) or PROMPTS
    pipeline, report = fitted(settings, quality, steps, strength, runs, texts, pictures)
    known = load_table(path) if path.is_file() else ForecastTable(report.denoiser)
    if known.denoiser != report.denoiser:
        raise InputError(
            f"--out {path}: it has forecasts of {known.denoiser}, not {report.denoiser}; give "
            "another file"
        )
    table = known.with_run(report.run)
    table.card = {"model": settings.model or "shipped", "pipeline": pipeline}
    table.save(path)
    print(summary(report, path, time.perf_counter() - began))
    return 0


def fitted(
    settings: ServeSettings,
    quality: maskfx.Quality,
    steps: int | None,
    strength: float | None,
    runs: int,
    prompts: Sequence[str],
    pictures: Sequence[Pixels] = (),
) -> tuple[str, FitReport]:
    """Return the pipeline's class and what was fitted on its runs, each of another prompt."""
    pipe = load_pipeline(settings.model, settings.dtype, settings.device, settings.controlnets)
    family = PipelineSet.of(pipe, maskfx.compile, told_by(settings.model))
    member = family.main if quality.unmasked else family.editor
    if member is None:
        raise InputError(
            f"fit-forecast --edits: {type(family.main.plain).__name__} edits no pictures; leave "
            "--edits out"
        )
    texts = [prompts[n % len(prompts)] for n in range(runs)]
    calls: list[Callable[[], Mapping[str, object]]] = []
    for n, text in enumerate(texts):
        given = family, member, n, steps, text, strength
        if quality.unmasked:
            calls.append(partial(arguments_for, *given))
        else:
            calls.append(partial(edit_for, *given, pictures))
    with torch.no_grad(), progress.hidden(False):
        report = fit_forecasts(member.pipe, calls, quality, partial(print, flush=True))
    return type(member.plain).__name__, report


def pixels_of(paths: Sequence[Path], edits: bool) -> list[Pixels]:
    """Return the pictures of files; raise InputError if there are any and no edits."""
    if paths and not edits:
        raise InputError(f"--picture {paths[0]}: it is for edits; give --edits too")
    return [np.asarray(opened(path).convert("RGB")) for path in paths]


def summary(report: FitReport, path: Path, seconds: float) -> str:
    run, kind = report.run, "edits" if report.run.masked else "whole pictures"
    computed = ", ".join(map(str, run.computed))
    errors = ", ".join(f"{error:.1%}" for error in report.errors.values())
    return "\n".join(
        (
            f"{path}: {report.denoiser}, {kind}, {len(run.times)} calls of which "
            f"{len(run.computed)} are computed ({computed}), in {seconds:.0f} s",
            f"latents differ from those of full runs, behind each gap and at the end: {errors}",
        )
    )
