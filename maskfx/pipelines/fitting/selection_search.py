"""Searches for the steps of whole pictures to compute: those whose forecasts come closest.

A selection is found step by step. Behind a computed step the latents of every later step follow
from weights that are fitted at once, so one run of a beginning gives how far off the latents would
be wherever the next step is computed. Of the beginnings of as many computed steps that end at the
same step, those with the closest latents there are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from maskfx.pipelines.fitting.logged_runs import LoggedRun, logged
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.quality import Quality
from maskfx.runtime.reuse.fitted_forecast import FittedRun, ForecastTable
from maskfx.runtime.reuse.forecast_fitting import RunLog, fit_gap, flat, relative

RUNS = 6  # that the search makes of each beginning, at most
KEPT = 2  # beginnings that end at the same step; selections that are returned
LONG = 3  # steps for one that is computed: with fewer, selections hardly differ


@dataclass(frozen=True)
class Beginning:
    """The first computed steps of a run, with the weights between them.

    Args:
        run: The steps and the weights.
        error: The relative difference of the latents before its last step, or of finished ones.
    """

    run: FittedRun
    error: float

    @property
    def last(self) -> int:
        return self.run.computed[-1]


def found_selections(
    pipe: Pipeline,
    calls: Sequence[Callable[[], Mapping[str, object]]],
    quality: Quality,
    runs: Sequence[LoggedRun],
    denoiser: str,
    report: Callable[[str], None] = lambda _: None,
) -> list[Beginning]:
    """Return the best selections of as many steps as a quality computes, the best one first.

    Their errors are those of the finished latents.

    Args:
        pipe: A compiled pipeline.
        calls: The arguments of each call.
        quality: That of whole pictures.
        runs: The calls with all steps.
        denoiser: Its name.
        report: Receives lines on what has been done.
    """
    calls, runs = calls[:RUNS], runs[:RUNS]
    steps = len(runs[0].steps.times)
    count = len(quality.whole_selection.selected(steps))
    if count * LONG > steps:
        return []
    carried = [run.carried() for run in runs]
    full = [run.at(elements) for run, elements in zip(runs, carried, strict=True)]
    table = ForecastTable(denoiser)
    found = [Beginning(FittedRun(tuple(full[0].times), (0,), {}), 0.0)]
    for number in range(1, count + 1):
        following: dict[int, list[Beginning]] = {}
        for one in found:
            own = full
            if number > 1:
                only = replace(quality, every=steps, least=number)
                logs = [logged(pipe, call(), only, table.with_run(one.run)) for call in calls]
                own = [log.at(elements) for log, elements in zip(logs, carried, strict=True)]
            weights, errors = fits_behind(full, own, one.run.computed)
            for step in positions(one.last, number, count, steps):
                between = {n: w for n, w in weights.items() if n < step}
                computed = (*one.run.computed, *((step,) if step < steps else ()))
                run = FittedRun(one.run.times, computed, {**one.run.weights, **between})
                following.setdefault(step, []).append(Beginning(run, errors[step - 1]))
        found = [
            one
            for beginnings in following.values()
            for one in sorted(beginnings, key=lambda beginning: beginning.error)[:KEPT]
        ]
        report(f"search: {len(found)} beginnings of {min(number + 1, count)} computed steps")
    return found


def fits_behind(
    full: Sequence[RunLog], own: Sequence[RunLog], computed: Sequence[int]
) -> tuple[dict[int, tuple[float, ...]], dict[int, float]]:
    """Return the weights of all steps behind the last computed one, and the errors from it on."""
    last, steps = computed[-1], len(full[0].times)
    made, wanted = (flat([log.after[last] for log in logs]) for logs in (own, full))
    if last == steps - 1:
        return {}, {last: relative(made, wanted)}
    weights, errors = fit_gap(full, own, computed, range(last + 1, steps))
    return weights, {last: relative(made, wanted), **errors}


def positions(last: int, number: int, count: int, steps: int) -> Sequence[int]:
    """Return where the step may be that is computed as the one of this number, from 0.

    They are near that of evenly spaced steps, and enough steps are left for the others. Behind the
    last one there is the end of the run only.
    """
    if number == count:
        return [steps]
    even, reach = round(number * steps / count), ceil(steps / count)
    stop = min(even + reach, steps - count + number)
    return range(max(last + 1, even - reach), stop + 1)
