"""Fits the weights of forecasts on runs of a compiled pipeline, of whole pictures or of edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from maskfx.errors import InputError
from maskfx.pipelines.fitting.logged_runs import LoggedRun, logged
from maskfx.pipelines.fitting.selection_search import found_selections
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.quality import Quality
from maskfx.runtime.reuse.fitted_forecast import FittedRun, ForecastTable
from maskfx.runtime.reuse.forecast_fitting import RunLog, fit_gap, flat, relative


@dataclass
class FitReport:
    """What was fitted, and how close its runs come.

    Args:
        denoiser: Its name.
        run: The weights.
        errors: The relative difference of the latents from those of the full runs, by the first
            step that is computed after a gap, and behind the last step; inside the masks of edits.
    """

    denoiser: str
    run: FittedRun
    errors: dict[int, float]

    @property
    def error(self) -> float:
        """That of the finished latents."""
        return self.errors[len(self.run.times)]


def fit_forecasts(
    pipe: Pipeline,
    calls: Sequence[Callable[[], Mapping[str, object]]],
    quality: Quality,
    report: Callable[[str], None] = lambda _: None,
) -> FitReport:
    """Fit the forecasts of the steps that a quality doesn't compute.

    Of whole pictures several selections of as many steps are fitted: evenly spaced ones, those that
    an edit computes and the best ones of a search. The best of all is returned. Every call runs
    once with all steps, and for each selection once for each gap between computed steps and once
    more; some run often for the search.

    Args:
        pipe: A compiled pipeline.
        calls: Each returns the arguments of one call, with a generator in the same state each time.
            All have one schedule. They make whole pictures if the quality is `unmasked`, and edit a
            part of a picture otherwise.
        quality: That of the calls.
        report: Receives lines on what has been done.

    Raises:
        InputError: The forecasts of this pipeline can't be fitted.
    """
    if not quality.selection.skips:
        raise InputError("fit-forecast: every step is computed: give --every 2 or more")
    runs = []
    for number, call in enumerate(calls):
        runs.append(logged(pipe, call(), replace(quality, every=1)))
        report(f"run {number + 1} of {len(calls)}")
    name, steps = check_runs(type(pipe).__name__, runs), len(runs[0].steps.times)
    usual = quality.whole_selection if quality.unmasked else quality.selection
    selections = [usual.selected(steps)]
    if quality.unmasked and quality.first == quality.last == 0:
        # steps at the ends that are computed in full are no part of a selection
        searched = found_selections(pipe, calls, quality, runs, name, report)
        selections.append(quality.selection.selected(steps))
        selections += [one.run.computed for one in searched]
    fits = []
    for computed in dict.fromkeys(selections):
        run = FittedRun(tuple(runs[0].steps.times), computed, {}, not quality.unmasked)
        fits.append(fit_selection(pipe, calls, quality, runs, FitReport(name, run, {}), report))
    return min(fits, key=lambda fit: fit.error)


def fit_selection(
    pipe: Pipeline,
    calls: Sequence[Callable[[], Mapping[str, object]]],
    quality: Quality,
    runs: Sequence[LoggedRun],
    found: FitReport,
    report: Callable[[str], None],
) -> FitReport:
    """Return the weights of one selection of steps: `found` has the steps, and no weights."""
    carried = [run.carried() for run in runs]
    full = [run.at(elements) for run, elements in zip(runs, carried, strict=True)]
    table, computed, steps = ForecastTable(found.denoiser), found.run.computed, len(found.run.times)

    def own() -> list[RunLog]:
        fitted = table.with_run(found.run)
        logs = [logged(pipe, call(), quality, fitted) for call in calls]
        return [log.at(elements) for log, elements in zip(logs, carried, strict=True)]

    for gap in gaps(computed, steps):
        before = [step for step in computed if step < gap.start]
        weights, behind = fit_gap(full, own(), before, gap)
        error = behind[gap.stop - 1]
        errors = {**found.errors, gap.stop: error}
        found = replace(
            found,
            run=replace(found.run, weights={**found.run.weights, **weights}),
            errors=errors,
        )
        report(f"steps {gap.start} to {gap.stop - 1}: latents differ by {error:.1%}")
    made, wanted = (flat([log.after[-1] for log in logs]) for logs in (own(), full))
    error = relative(made, wanted)
    report(f"computed {', '.join(map(str, computed))}: finished latents differ by {error:.1%}")
    return replace(found, errors={**found.errors, steps: error})


def gaps(computed: Sequence[int], steps: int) -> list[range]:
    """Return the ranges of steps between those that are computed, and behind the last."""
    ends = zip(computed, [*computed[1:], steps], strict=True)
    return [range(a + 1, b) for a, b in ends if b > a + 1]


def check_runs(pipe: str, runs: Sequence[LoggedRun]) -> str:
    """Return the denoiser's name; raise InputError where its forecasts can't be fitted."""
    names = {name for run in runs for name in run.calls.names}
    if len(names) != 1:
        raise InputError(
            f"fit-forecast: {pipe} has {len(names)} denoisers whose output is of their latents' "
            f"form ({', '.join(sorted(names)) or 'none'}); forecasts are fitted for one"
        )
    for run in runs:
        log = run.steps
        if len(log.before) != len(log.times) or len(set(log.times)) != len(log.times):
            raise InputError(
                f"fit-forecast: {pipe}'s scheduler takes {len(log.before)} steps at "
                f"{len(set(log.times))} times: forecasts are fitted where each step has its own"
            )
        first = runs[0].steps
        if log.times != first.times or log.before[0].shape != first.before[0].shape:
            raise InputError(
                "fit-forecast: the calls have several schedules or sizes; give alike ones"
            )
    return names.pop()
