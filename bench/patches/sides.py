"""The sides of the comparison: how each makes a whole picture."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import maskfx
from bench.quality.bed import WARM_UP, Bed, Case, Pixels
from bench.quality.caches import CACHES
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.fitting.observed_runs import observed_run
from maskfx.pipelines.model_folders import model_folders
from maskfx.runtime.reuse.fitted_forecast import table_in
from maskfx.runtime.reuse.judge_training import ObservedRun, forecast_error
from maskfx.runtime.reuse.judges import FILE as JUDGE
from maskfx.runtime.reuse.judges import Bools, PatchFeatures
from training.scenes import SIDE as SCENE

SIDE = 8  # sites along a patch's side; packed tokens have half as many
DENSE = "dense"
# `every` and `least` of the sides that extrapolate whole steps, in the order of their speed.
WHOLE = ((2, 6), (3, 6), (4, 6), (3, 2), (4, 2), (5, 2), (7, 2), (10, 2), (11, 2))


@dataclass(frozen=True)
class Made:
    """A picture, the seconds of CPU time that the call took, and the share of patches computed."""

    pixels: Pixels
    seconds: float
    share: float = 1.0


class Bench:
    """One pipeline as diffusers runs it and compiled, and the arguments of its calls.

    Args:
        bed: The pipeline.
        strength: 1 makes pictures from noise alone.
        sizes: Pixels along a picture's sides; the pictures have them in turn.
    """

    def __init__(self, bed: Bed, strength: float, sizes: Sequence[int] = (SCENE,)) -> None:
        self.bed, self.strength, self.sizes = bed, strength, tuple(sizes)

    @cached_property
    def pipe(self) -> Any:
        quality = maskfx.Quality(patches=0.1, reuse="steps", refresh=1)
        return maskfx.compile(copy.deepcopy(self.bed.origin), quality=quality)

    @property
    def side(self) -> int:
        return SIDE if self.bed.name == "unet" else SIDE // 2

    def arguments(self, case: Case, **changed: Any) -> dict[str, Any]:
        """All of the picture is masked: it is made from noise, or from the picture and noise."""
        size = self.sizes[case.index % len(self.sizes)]
        given = self.bed.arguments(case) | {
            "image": case.image.resize((size, size)),
            "mask_image": Image.new("L", (size, size), 255),
            "strength": self.strength,
            "height": size,
            "width": size,
        }
        if self.strength == 1:
            given["latents"] = self.bed.given(self.bed.noise_of(case.index, size))
        else:
            del given["latents"]  # the pipeline adds noise to the picture
        return given | changed

    def warm_ups(self) -> list[Case]:
        """Pictures of each size that are never judged."""
        return [self.bed.case(WARM_UP + number) for number in range(len(self.sizes))]

    def run(self, pipe: Any, case: Case, **changed: Any) -> Made:
        return timed(pipe, self.arguments(case, **changed))

    @cached_property
    def calls(self) -> int:
        """How often a run calls the denoiser: less than all steps from a picture."""
        self.bed.clock.reset()
        self.calibrate()
        return self.bed.clock.calls

    def calibrate(self) -> Made:
        return self.run(self.bed.pipe, self.bed.case(WARM_UP))

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Caches that ask the bed are informed of this task's calls."""
        bed, calls = self.bed, self.calls
        steps, calibrate = bed.steps, bed.calibrate
        given = [self.arguments(bed.case(WARM_UP))]
        bed.steps, bed.calibrate = calls, lambda: bed.pipe(**given[0])
        try:
            yield
        finally:
            bed.steps, bed.calibrate = steps, calibrate

    def compiled(self, case: Case, quality: maskfx.Quality) -> Made:
        state = pipeline_state_of(self.pipe)
        state.patches.clear()
        state.notes.clear()
        made = self.run(self.pipe, case, quality=quality)
        if state.notes:
            raise RuntimeError(f"edit {case.index}, {quality}: {dict(state.notes)}")
        return Made(made.pixels, made.seconds, state.patches.share)

    def observed(self, case: Case) -> ObservedRun:
        """The case's calls, all computed, as the oracle sees them."""
        [[run, *_]] = observed_run(self.pipe, self.arguments(case), self.side).values()
        return run


def timed(pipe: Any, given: Mapping[str, Any]) -> Made:
    began = time.process_time()
    image = pipe(**given).images[0]
    return Made(np.asarray(image), time.process_time() - began)


@dataclass(frozen=True)
class Oracle:
    """Computes a patch if continuing its output would be wrong by more than a tolerance."""

    run: ObservedRun
    tolerance: float
    keeps_nothing: bool = False

    def refusal(self, stretches: int) -> str:
        return ""

    def computes(self, features: PatchFeatures) -> Bools:
        now = min(features.step, len(self.run.calls) - 1)
        out = np.ones(features.change.shape, bool)
        for age in np.unique(features.age):
            last = now - int(age)
            if last >= 0:
                wrong = forecast_error(self.run, now, last) > self.tolerance
                out = np.where(features.age == age, wrong, out)
        return out


Run = Callable[[Bench, Case], Made]


@dataclass(frozen=True)
class Side:
    name: str
    family: str
    run: Run


def sides_of(bench: Bench, plan: Mapping[str, Any], judge: Path | None) -> list[Side]:
    """Return all sides, dense first."""
    steps = bench.bed.steps
    found = [Side(DENSE, DENSE, lambda bench, case: bench.run(bench.bed.pipe, case))]
    found += [Side(f"{n} steps", "fewer steps", fewer(n)) for n in plan["steps"] if n < steps]
    found += [
        Side(name_of(quality), "whole steps", whole(quality))
        for forecast in plan["forecasts"]
        for quality in qualities(bench.calls, forecast)
        if forecast != "fitted" or is_fitted(bench, quality)
    ]
    found += [Side(name, cache.family, cached(name)) for name, cache in CACHES.items()]
    found += [
        Side(
            f"{order}, {sets}, age={age}, threshold={value}",
            f"patches, threshold, {order}",
            patches(threshold=value, age=age, sets=sets, order=order),
        )
        for order, sets, age, value in plan["settings"]
    ]
    found += variants(bench, **plan["variant"])
    if judge is not None:
        age = plan["age"]
        found += [
            Side(
                f"{order}, {sets}, judge",
                f"patches, judge, {order}",
                patches(judge=judge, age=age, order=order, sets=sets),
            )
            for order, sets in (("step", "alike"), ("stretch", "alike"), ("stretch", "each"))
        ]
    found += [
        Side(f"oracle, tolerance={value}", "patches, oracle", oracle(value, plan["age"]))
        for value in plan["tolerances"]
    ]
    return found


def variants(bench: Bench, threshold: float, age: int) -> list[Side]:
    """Return sides that differ in one setting each from one of those before, and shipped judges."""
    usual: dict[str, Any] = {"threshold": threshold, "age": age}
    named: dict[str, Run] = {
        "held outputs": patches(outputs="hold", **usual),
        "half the side": patches(side=bench.side // 2, **usual),
        "every=2": patches(every=2, **usual),
    }
    found = [
        Side(
            f"step, alike, age={age}, threshold={threshold}, {name}",
            "patches, threshold, step",
            run,
        )
        for name, run in named.items()
    ]
    if any((folder / JUDGE).exists() for folder in model_folders(bench.bed.denoiser)):
        found.append(Side("shipped judge", "patches, judge, step", patches(judge="auto")))
    return found


def fewer(steps: int) -> Run:
    return lambda bench, case: bench.run(bench.bed.pipe, case, num_inference_steps=steps)


def qualities(calls: int, forecast: str) -> list[maskfx.Quality]:
    """The settings of `WHOLE` that compute different calls of a run, and not all."""
    found: dict[tuple[int, ...], maskfx.Quality] = {}
    for count, least in WHOLE:
        quality = maskfx.Quality(
            reuse="steps", refresh=1, every=count, least=least, forecast=forecast
        )
        chosen = quality.whole_selection.selected(calls)
        if len(chosen) < calls:
            found.setdefault(chosen, quality)
    return list(found.values())


def is_fitted(bench: Bench, quality: maskfx.Quality) -> bool:
    """Return True if weights were fitted for as many of the task's calls."""
    table, calls = table_in(model_folders(bench.bed.denoiser)), bench.calls
    known = [] if table is None else table.selections()
    count = quality.whole_selection.left(0, calls)
    return any(len(computed) == count and steps == calls for steps, computed in known)


def name_of(quality: maskfx.Quality) -> str:
    usual = maskfx.Quality()
    least = "" if quality.least == usual.least else f", least={quality.least}"
    forecast = "" if quality.forecast == usual.forecast else f", {quality.forecast}"
    return f"every={quality.every}{least}{forecast}"


def whole(quality: maskfx.Quality) -> Run:
    return lambda bench, case: bench.compiled(case, quality)


def cached(name: str) -> Run:
    def run(bench: Bench, case: Case) -> Made:
        given = bench.arguments(case)
        with bench.as_called(), CACHES[name].put_on(bench.bed):
            return timed(bench.bed.pipe, given)

    return run


def patches(every: int = 1, **settings: Any) -> Run:
    def run(bench: Bench, case: Case) -> Made:
        own = maskfx.PatchReuse(**{"side": bench.side} | settings)
        quality = maskfx.Quality(reuse="steps", refresh=1, every=every, patches=own)
        return bench.compiled(case, quality)

    return run


def oracle(tolerance: float, age: int) -> Run:
    def run(bench: Bench, case: Case) -> Made:
        return patches(judge=Oracle(bench.observed(case), tolerance), age=age)(bench, case)

    return run
