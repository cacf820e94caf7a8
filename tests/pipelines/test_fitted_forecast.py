"""Forecasts by weights that were fitted on runs of the model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.fitting.fitted_runs import FitReport, fit_forecasts
from maskfx.pipelines.fitting.logged_runs import logged
from maskfx.pipelines.fitting.selection_search import found_selections, positions
from maskfx.pipelines.schedules import forecasts
from maskfx.pipelines.schedules.forecasts import UNFITTED, Forecasts
from maskfx.runtime.reuse.fitted_forecast import FILE, FittedRun, ForecastTable, load_table
from maskfx.runtime.reuse.forecast_fitting import RunLog, StepRule, fit_gap
from tests.factories.pipelines import PIPES, anew, call_of, compiled, latents, plain, square, white

FLUX, SD = "FluxInpaintPipeline", "StableDiffusionInpaintPipeline"
GUIDED = "FluxInpaintPipeline-truecfg"
STEPS = 10
KINDS = ("output", "fitted", "auto")
RUN = FittedRun((900.0, 600.0, 300.0, 0.0), (0, 2), {1: (0.5, 2.0), 3: (0.1, 0.2, 0.3)})


def call(name: str, seed: int, **more: Any) -> dict[str, Any]:
    """The arguments of a picture; the generator is in the same state each time."""
    given = {"num_inference_steps": STEPS, "strength": 1.0, "mask_image": white(), **more}
    return {**call_of(PIPES[name], seed), **given}


def calls(name: str, count: int = 3) -> list[Callable[[], Mapping[str, object]]]:
    return [partial(call, name, seed) for seed in range(count)]


def edits(name: str, count: int = 3) -> list[Callable[[], Mapping[str, object]]]:
    return [partial(call, name, seed, mask_image=square()) for seed in range(count)]


@cache
def fitted(name: str, masked: bool = False, every: int | None = None) -> FitReport:
    given = edits(name) if masked else calls(name)
    own = quality(unmasked=not masked)
    with torch.no_grad():
        return fit_forecasts(compiled(name), given, replace(own, every=every or own.every))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, FittedRun], Any]:
    """Return a pipeline that finds weights in its model's folder."""

    def placed(name: str, run: FittedRun) -> Any:
        ForecastTable(fitted(name).denoiser, [run]).save(tmp_path / FILE)
        monkeypatch.setattr(forecasts, "model_folders", lambda module: [tmp_path])
        return anew(name, quality=quality())

    return placed


def quality(forecast: str = "fitted", unmasked: bool = True) -> maskfx.Quality:
    every, reuse = (2, "steps") if unmasked else (4, "template")
    return maskfx.Quality(every=every, least=2, unmasked=unmasked, forecast=forecast, reuse=reuse)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


# Tables.


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = ForecastTable("unet", [RUN], {"model": "a"})
    table.save(tmp_path / FILE)
    assert load_table(tmp_path / FILE) == table
    table.runs.append(replace(RUN, masked=True))
    table.save(tmp_path / FILE)
    assert load_table(tmp_path / FILE) == table


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored.update(schema=9),
        lambda stored: stored.pop("runs"),
        lambda stored: stored["runs"][0]["weights"].update({"3": [1.0]}),
        lambda stored: stored["runs"][0].update(computed=[7]),
        lambda stored: stored["runs"][0].update(times="later"),
    ],
)
def test_a_damaged_table_is_refused_by_name(change: Callable[[Any], Any], tmp_path: Path) -> None:
    path = tmp_path / FILE
    ForecastTable("unet", [RUN]).save(path)
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"forecasts .*: can't be read: .*maskfx fit-forecast"):
        load_table(path)


def test_weights_are_of_the_nearest_schedule_and_of_the_steps_that_were_computed() -> None:
    near = FittedRun((910.0, 610.0, 300.0, 0.0), (0, 2), {1: (0.7, 1.0)})
    table = ForecastTable("unet", [near, RUN])
    assert table.weights([(0, 900.0)], 1, 601.0, 4) == (0.5, 2.0)
    assert table.weights([(0, 910.0)], 1, 608.0, 4) == (0.7, 1.0)
    assert table.weights([(0, 900.0), (2, 300.0)], 3, 0.0, 4) == (0.1, 0.2, 0.3)
    assert table.weights([(0, 700.0)], 1, 500.0, 4) is None  # another schedule
    assert table.weights([(0, 900.0), (1, 600.0)], 3, 0.0, 4) is None  # other steps
    assert table.weights([(0, 900.0)], 1, 600.0, 4, masked=True) is None  # of whole pictures
    of_edits = table.with_run(FittedRun(RUN.times, RUN.computed, {1: (0.9, 1.0)}, masked=True))
    assert of_edits.weights([(0, 900.0)], 1, 601.0, 4, masked=True) == (0.9, 1.0)
    assert of_edits.weights([(0, 900.0)], 1, 601.0, 4) == (0.5, 2.0)


def test_other_numbers_of_steps_have_the_weights_of_the_same_time() -> None:
    long = FittedRun(
        (900.0, 700.0, 500.0, 300.0, 100.0, 0.0),
        (0, 3),
        {1: (0.2, 1.2), 2: (0.4, 1.6), 4: (0.1, 0.2, 0.3), 5: (0.3, 0.4, 0.5)},
    )
    table = ForecastTable("unet", [long])

    def weights(known: list[tuple[int, float]], now: int, time: float) -> Any:
        found = table.weights(known, now, time, 9)
        return found if found is None else pytest.approx(found)

    assert weights([(0, 900.0)], 1, 800.0) == (0.1, 1.1)  # half way from the last output
    assert weights([(0, 900.0)], 2, 600.0) == (0.3, 1.4)
    assert weights([(0, 900.0)], 3, 400.0) == (0.5, 1.8)  # behind the last that was fitted
    assert weights([(0, 910.0)], 2, 610.0) == (0.3, 1.4)
    assert weights([(0, 900.0), (4, 320.0)], 5, 70.0) == (0.2, 0.3, 0.4)
    assert weights([(0, 900.0)], 4, 299.0) is None  # beyond the gap
    assert weights([(0, 950.0)], 1, 800.0) is None
    assert weights([(0, 900.0), (2, 500.0)], 3, 400.0) is None  # computed elsewhere
    assert weights([(0, 900.0), (4, 300.0), (5, 100.0)], 6, 0.0) is None
    assert table.weights([(0, 900.0)], 1, 800.0, 9, masked=True) is None


def test_a_run_replaces_that_of_its_own_schedule_and_selection() -> None:
    table = ForecastTable("unet", [RUN])
    anew = FittedRun((905.0, 600.0, 300.0, 0.0), (0, 2), {1: (1.0, 1.0), 3: (1.0, 1.0, 1.0)})
    assert table.with_run(anew).runs == [anew]
    for other in (FittedRun(RUN.times, (0, 1, 2), {}), replace(anew, masked=True)):
        assert table.with_run(other).runs == [RUN, other]
    as_many = FittedRun(RUN.times, (0, 1), {})
    assert table.with_run(as_many).runs == [as_many]
    edits = ForecastTable("unet", [replace(RUN, masked=True)])
    assert len(edits.with_run(replace(as_many, masked=True)).runs) == 2


# Fitting.


def logs(steps: int, count: int, multistep: bool) -> list[RunLog]:
    """Runs whose outputs are sums of two pictures, stepped by a linear rule."""
    made = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        x, one, other = torch.randn(3, 1, 4, 8, 8, generator=draw, dtype=torch.float64).unbind(0)
        log = RunLog()
        for step in range(steps):
            output = one + step * step * other
            log.times.append(float(-step))
            log.scales.append(2.0)
            log.before.append(x)
            log.outputs.append(output)
            x = 0.9 * x - 0.1 * output
            if multistep and step:
                x = x + 0.05 * log.outputs[step - 1] - 0.02 * log.before[step - 1]
            log.after.append(x)
        made.append(log)
    return made


@pytest.mark.parametrize("multistep", [False, True])
def test_outputs_that_are_sums_of_earlier_ones_are_found(multistep: bool) -> None:
    runs = logs(8, 3, multistep)
    weights, errors = fit_gap(runs, runs, [0, 2], range(3, 6))
    assert max(errors.values()) < 1e-3
    for step in range(3, 6):
        of_latents, first, second = weights[step]
        for log in runs:
            made = of_latents * 2 * log.before[step] + first * log.outputs[0]
            torch.testing.assert_close(
                made + second * log.outputs[2], log.outputs[step], rtol=1e-2, atol=1e-2
            )


def test_a_scheduler_that_adds_noise_follows_no_rule() -> None:
    runs = logs(3, 2, False)
    for log in runs:
        log.after[1] = log.after[1] + 0.1 * torch.randn(log.after[1].shape)
    with pytest.raises(InputError, match="step 1 of the scheduler isn't a sum .* adds noise"):
        StepRule.measured(runs, 1)


# Pipelines.


@pytest.mark.parametrize("name", [FLUX, SD, pytest.param(GUIDED, marks=pytest.mark.slow)])
def test_fitted_forecasts_are_closer_than_extrapolated_ones(name: str, place: Any) -> None:
    run = fitted(name).run
    assert run.computed == (0, 1, 3, 5, 7, 9)
    assert sorted(run.weights) == [2, 4, 6, 8]
    pipe = place(name, run)
    errors: dict[str, float] = {"fitted": 0.0, "output": 0.0}
    for seed in (0, 1, 2):
        wanted = latents(plain(name), **call(name, seed))
        for kind in errors:
            errors[kind] += apart(latents(pipe, **call(name, seed), quality=quality(kind)), wanted)
    assert errors["fitted"] < 0.8 * errors["output"], errors
    assert not unfitted(pipe)


def test_the_weights_are_those_of_the_table(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights of the last output alone it is held."""
    run = fitted(FLUX).run
    held = {n: (0.0, *[0.0] * (len(w) - 2), 1.0) for n, w in run.weights.items()}
    pipe = place(FLUX, FittedRun(run.times, run.computed, held))
    outputs: list[Tensor] = []
    original = pipe.scheduler.step

    def step(output: Tensor, *args: Any, **more: Any) -> Any:
        outputs.append(output.clone())
        return original(output, *args, **more)

    monkeypatch.setattr(pipe.scheduler, "step", step)
    latents(pipe, **call(FLUX, 5))
    outputs = outputs[-STEPS:]  # those before are of the recording
    for first in (1, 3, 5, 7):
        assert torch.equal(outputs[first + 1], outputs[first])
    assert not torch.equal(outputs[3], outputs[1])


def test_whole_pictures_compute_the_steps_that_weights_were_fitted_for(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many; an edit of a part computes its own."""
    run = replace(fitted(FLUX).run, computed=(0, 2, 3, 4, 6, 8))
    pipe, times = place(FLUX, replace(run, weights={})), list[float]()
    learn = Forecasts.learn

    def learning(self: Forecasts, key: Any, at: Any, *more: Any) -> None:
        times.append(at[0])
        learn(self, key, at, *more)

    monkeypatch.setattr(Forecasts, "learn", learning)
    own = [replace(quality(kind), refresh=1) for kind in KINDS]
    for one, steps in zip(own, ([0, 1, 3, 5, 7, 9], run.computed, run.computed), strict=True):
        latents(pipe, **call(FLUX, 3), quality=one)
        assert times == pytest.approx([run.times[n] for n in steps])
        times.clear()
    latents(pipe, **call(FLUX, 3, mask_image=square()), quality=own[1])
    assert times == pytest.approx([run.times[n] for n in own[1].selection.selected(STEPS)])


def test_the_better_of_two_selections_is_fitted() -> None:
    lines: list[str] = []
    with torch.no_grad():
        own = quality()
        report = fit_forecasts(compiled(FLUX), calls(FLUX), replace(own, every=4), lines.append)
    found = {}
    for line in lines:
        if line.startswith("computed "):
            steps, error = line.removeprefix("computed ").split(": finished latents differ by ")
            found[steps] = float(error.rstrip("%"))
    assert list(found) == ["0, 3, 6, 9", "0, 3, 6, 8"]
    assert ", ".join(map(str, report.run.computed)) == min(found, key=lambda one: found[one])
    assert 100 * report.error == pytest.approx(min(found.values()), abs=0.06)


def test_a_search_finds_a_selection_that_comes_closest() -> None:
    """The errors that it states are those of runs with the weights that are fitted then."""
    given, own = calls(FLUX), replace(quality(), every=9, least=3)
    with torch.no_grad():
        runs = [logged(compiled(FLUX), call(), replace(own, every=1)) for call in given]
        found = found_selections(compiled(FLUX), given, own, runs, "transformer")
        report = fit_forecasts(compiled(FLUX), given, own)
    assert [one.run.computed[0] for one in found] == [0, 0]
    assert all(len(one.run.computed) == 3 for one in found)
    assert found[0].error < found[1].error
    assert report.run.computed == found[0].run.computed
    assert report.run.weights.keys() == found[0].run.weights.keys()
    for step, weights in report.run.weights.items():
        assert weights == pytest.approx(found[0].run.weights[step], rel=1e-3)
    assert report.error == pytest.approx(found[0].error, rel=1e-3)


def test_a_search_tries_steps_near_evenly_spaced_ones() -> None:
    assert list(positions(0, 1, 5, 20)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(positions(11, 3, 5, 20)) == [12, 13, 14, 15, 16]
    assert list(positions(16, 4, 5, 20)) == [17, 18, 19]
    assert list(positions(0, 1, 8, 10)) == [1, 2, 3]  # six more follow
    assert list(positions(17, 5, 5, 20)) == [20]


def test_another_number_of_steps_uses_them(place: Any) -> None:
    pipe = place(FLUX, fitted(FLUX, every=4).run)
    found, other = (
        latents(
            pipe,
            **call(FLUX, 1, num_inference_steps=13),
            quality=replace(quality(kind), every=4),
        )
        for kind in ("fitted", "output")
    )
    assert not torch.equal(found, other)


@pytest.mark.parametrize("there", [False, True])
def test_what_was_not_fitted_is_extrapolated_and_noted(there: bool, place: Any) -> None:
    pipe = place(FLUX, fitted(FLUX).run) if there else anew(FLUX, quality=quality())
    given = {"strength": 0.5}
    found = latents(pipe, **call(FLUX, 1, **given))
    assert unfitted(pipe)
    wanted = latents(pipe, **call(FLUX, 1, **given), quality=quality("output"))
    assert torch.equal(found, wanted)


def test_auto_uses_them_and_says_nothing_where_there_are_none(place: Any, tmp_path: Path) -> None:
    pipe = place(FLUX, fitted(FLUX).run)
    made = {kind: latents(pipe, **call(FLUX, 2), quality=quality(kind)) for kind in KINDS}
    assert torch.equal(made["auto"], made["fitted"])
    assert not torch.equal(made["auto"], made["output"])
    for kind in ("output", "auto"):
        given = call(FLUX, 2, strength=0.5)
        made[kind] = latents(pipe, **given, quality=quality(kind))
    assert torch.equal(made["auto"], made["output"])
    assert not unfitted(pipe)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(InputError, match="can't be read"):
        latents(pipe, **call(FLUX, 2))
    found = latents(pipe, **call(FLUX, 2), quality=quality("auto"))
    assert torch.equal(found, latents(pipe, **call(FLUX, 2), quality=quality("output")))
    assert any("can't be read" in note for note in pipeline_state_of(pipe).notes)


@pytest.mark.parametrize("name", [FLUX, pytest.param(SD, marks=pytest.mark.slow)])
def test_edits_have_weights_of_their_own(name: str, place: Any) -> None:
    """Those of whole pictures aren't used for them, nor the other way round."""
    run = fitted(name, masked=True).run
    assert run.masked
    assert run.weights != fitted(name).run.weights
    pipe = place(name, run)
    errors = dict.fromkeys(KINDS, 0.0)
    for seed in (4, 5, 6):
        wanted, *made = (
            latents(pipe, **call(name, seed, mask_image=square()), quality=one)
            for one in ("all-steps", *(quality(kind, unmasked=False) for kind in KINDS))
        )
        for kind, found in zip(KINDS, made, strict=True):
            errors[kind] += apart(found, wanted)
    assert errors["fitted"] < 0.95 * errors["output"], errors
    assert errors["auto"] == errors["fitted"]
    assert not unfitted(pipe)
    latents(pipe, **call(name, 4))
    assert unfitted(pipe)
    pipe = place(name, fitted(name).run)
    latents(pipe, **call(name, 4, mask_image=square()), quality=quality(unmasked=False))
    assert unfitted(pipe)


def test_an_edit_of_all_without_a_template_is_made_as_a_whole_picture(place: Any) -> None:
    own = {"mask_image": white(), "quality": quality()}
    for masked in (False, True):
        pipe = place(FLUX, fitted(FLUX, masked).run)
        latents(pipe, **call(FLUX, 4, **own))
        assert bool(unfitted(pipe)) == masked


def test_auto_extrapolates_an_edit_of_a_part_without_a_template(place: Any) -> None:
    """Weights of whole pictures are for those: here they are worse than extrapolation."""
    pipe, made = place(FLUX, replace(fitted(FLUX, masked=True).run, masked=False)), {}
    for kind in KINDS:
        own = replace(quality(kind), every=4)
        made[kind] = latents(pipe, **call(FLUX, 4, mask_image=square(), quality=own))
    assert torch.equal(made["auto"], made["output"])
    assert not torch.equal(made["auto"], made["fitted"])
    own = replace(quality("auto"), every=4)
    given = {"mask_image": white(), "quality": own}
    whole = latents(pipe, **call(FLUX, 4, **given))
    given["quality"] = replace(own, forecast="fitted")
    assert torch.equal(whole, latents(pipe, **call(FLUX, 4, **given)))


def unfitted(pipe: Any) -> list[str]:
    return [note for note in pipeline_state_of(pipe).notes if UNFITTED in note]


def test_runs_that_cant_be_fitted_say_why() -> None:
    pipe = compiled(FLUX)
    before = vars(pipe.scheduler).get("step")
    with pytest.raises(InputError, match="every step is computed"):
        fit_forecasts(pipe, calls(FLUX), maskfx.Quality(unmasked=True))
    mixed = [partial(call, FLUX, 0), partial(call, FLUX, 0, num_inference_steps=STEPS + 1)]
    with torch.no_grad(), pytest.raises(InputError, match="several schedules"):
        fit_forecasts(pipe, mixed, quality())
    assert vars(pipe.scheduler).get("step") is before
