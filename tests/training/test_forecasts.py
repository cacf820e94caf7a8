"""The fitted forecasts that ship beside the trained pipelines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import maskfx
from bench.quality.metrics import psnr, ssim
from maskfx.cli.training_runs import arguments_for, edit_for
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.reuse.fitted_forecast import FILE, load_table
from maskfx.runtime.reuse.step_selection import StepSelection
from maskfx.serve.models.model_source import load_pipeline, told_by
from maskfx.serve.models.pipeline_set import PipelineSet
from maskfx.shipped import FOLDER, names
from training.forecasts import EDITS, FITTED

each = pytest.mark.parametrize("name", names())


@each
def test_a_table_has_each_schedule_and_selection(name: str) -> None:
    table = load_table(FOLDER / name / FILE)
    found = [(run.masked, len(run.times), run.computed) for run in table.runs]
    wanted = []
    for masked, fitted in ((False, FITTED), (True, EDITS[name])):
        for steps, strength, every, least in fitted:
            calls, selection = int(steps * strength), StepSelection(every, least=least)
            wanted.append((masked, calls, selection.selected(calls)))
    for (masked, calls, computed), (kind, length, usual) in zip(found, wanted, strict=True):
        assert (masked, calls) == (kind, length)
        if masked:
            assert computed == usual
        assert len(computed) == len(usual)
        assert computed[0] == 0
        assert list(computed) == sorted(set(computed))
        assert computed[-1] < calls
    assert table.denoiser == ("unet" if name == "unet" else "transformer")
    assert (FOLDER / name / FILE).stat().st_size < 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "every"), [("dit", 20, 7), ("unet", 20, 7), ("dit", 30, 8)]
)
def test_pictures_that_no_weights_were_fitted_on_are_closer_than_by_extrapolation(
    name: str, steps: int, every: int
) -> None:
    pipe = load_pipeline(name, "float32", "cpu")
    family = PipelineSet.of(pipe, maskfx.compile, told_by(name))
    member = family.main
    likeness: dict[str, list[float]] = {"output": [], "fitted": []}
    for seed, prompt in ((70, "a shiny red ball on the sand"), (71, "a blue cube on the grass")):
        made = {}
        for kind in ("dense", *likeness):
            given = arguments_for(family, member, seed, steps, prompt, 1.0)
            quality = maskfx.Quality(every=every, least=2, unmasked=True)
            if kind == "dense":
                quality = maskfx.Quality()
            elif kind == "fitted":
                quality = replace(quality, forecast="fitted")
            with torch.no_grad():
                made[kind] = np.asarray(member.pipe(**given, quality=quality).images[0])
        for kind, found in likeness.items():
            found.append(ssim(made[kind], made["dense"]))
    assert sum(likeness["fitted"]) > sum(likeness["output"]) + 0.005, likeness
    missing = any("no weights" in note for note in pipeline_state_of(member.pipe).notes)
    assert not missing or steps != 20  # those of other numbers of steps have weights in part


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if EDITS[name]])
def test_edits_that_no_weights_were_fitted_on_are_closer_than_by_extrapolation(name: str) -> None:
    family = PipelineSet.of(load_pipeline(name, "float32", "cpu"), maskfx.compile, told_by(name))
    member, plain = family.main, maskfx.Quality.of("balanced")
    likeness: dict[str, list[float]] = {"output": [], "auto": []}
    for seed, prompt in ((70, "a shiny red ball on the sand"), (71, "a blue cube on the grass")):
        made = {}
        for kind in ("all", *likeness):
            given = edit_for(family, member, seed, 25, prompt, 1.0)
            quality = replace(plain, every=1) if kind == "all" else replace(plain, forecast=kind)
            with torch.no_grad():
                made[kind] = np.asarray(member.pipe(**given, quality=quality).images[0])
        for kind, found in likeness.items():
            found.append(psnr(made[kind], made["all"]))
    assert sum(likeness["auto"]) > sum(likeness["output"]) + 0.5, likeness
    assert plain.forecast == "auto"
