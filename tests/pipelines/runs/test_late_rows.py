"""Runs whose ranks read rows of the step before: which steps do, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import maskfx
import tests.factories.more_pipelines  # noqa: F401 - adds pipelines
from maskfx.distributed.division.partition import Partition
from maskfx.pipelines.compile import KEPT, pipeline_state_of
from maskfx.pipelines.runs.execute import execute
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.steps import AnyStep, RecordStep
from tests.factories.pipelines import PIPES, anew, call_of, distance, latents, square, white
from tests.factories.thread_ranks import ThreadRanks

SYNC = maskfx.Quality.of("all-steps")
LATE = replace(SYNC, parallel="late")
DIT = "FluxInpaintPipeline"
FAMILIES = [DIT, pytest.param("StableDiffusionInpaintPipeline", marks=pytest.mark.slow)]


class OnThreads:
    """Computes the steps of a denoiser on two ranks; `reads` has by step whether rows were late."""

    joint = False

    def __init__(self, denoiser: CompiledDenoiser) -> None:
        even = Partition(((1.0, 1.0),))
        self.ranks = ThreadRanks(denoiser.settings, even, seconds=600)
        self.reads: list[bool] = []

    def run(
        self, denoiser: CompiledDenoiser, steps: Sequence[AnyStep], shared: Any = None
    ) -> list[Any]:
        (step,) = steps
        late = None if isinstance(step, RecordStep) else step.late
        before = 0 if late is None else late.run.reads
        found = denoiser.step(steps, self.ranks)
        self.reads.append(late is not None and late.run.reads > before)
        return found

    @property
    def held(self) -> int:
        """The bytes of rows of the requests that haven't ended."""
        runs = self.ranks.late.alive
        for held in self.ranks.held.values():
            held.drop(held.runs - runs)
        return sum(held.nbytes for held in self.ranks.held.values())


def on_threads(name: str) -> tuple[Any, OnThreads]:
    """A pipeline whose denoiser's steps are divided."""
    pipe = anew(name)
    state = pipeline_state_of(pipe)
    executors = {id(one): OnThreads(one) for one in state.denoisers.values()}

    def divided(calls: Any) -> None:
        execute(calls, executors=lambda denoiser: executors[id(denoiser)])

    pipe.__dict__[KEPT] = replace(state, execute=divided)
    return pipe, next(iter(executors.values()))


def edit(name: str, mask: Any = None, steps: int = 4) -> dict[str, Any]:
    return call_of(PIPES[name], 1, mask or square(), num_inference_steps=steps, strength=1.0)


def made(pipe: Any, name: str, quality: maskfx.Quality, **more: Any) -> Tensor:
    return latents(pipe, **edit(name, **more), quality=quality)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_steps_but_the_first_read_and_nothing_stays(name: str) -> None:
    """Of an edit, and of one of all sites."""
    pipe, ranks = on_threads(name)
    for mask in (square(), white()):
        exact = made(pipe, name, SYNC, mask=mask)  # the first one records the template
        assert not any(ranks.reads)
        ranks.reads.clear()
        late = made(pipe, name, LATE, mask=mask)
        assert ranks.reads == [False, True, True, True]
        assert ranks.held == 0
        assert 1e-5 < distance(late, exact) < 0.5
        ranks.reads.clear()
        assert distance(made(pipe, name, LATE, mask=mask), late) < 1e-5  # the same again
        ranks.reads.clear()
    two = replace(LATE, first=2)  # of an edit, in full: then it is divided in another way
    made(pipe, name, two, mask=white())
    assert ranks.reads == [False, False, True, True]


def test_a_step_after_extrapolated_ones_waits() -> None:
    pipe, ranks = on_threads(DIT)
    quality = replace(LATE, every=4)
    exact = made(pipe, DIT, replace(quality, parallel="sync"), steps=12)
    ranks.reads.clear()
    assert distance(made(pipe, DIT, quality, steps=12), exact) < 1e-5
    assert ranks.reads == [False] * 6
    notes = "\n".join(pipeline_state_of(pipe).notes)
    assert 'parallel="late": no step reads rows of the step before' in notes


@pytest.mark.slow
def test_a_step_at_which_the_function_changes_waits() -> None:
    name = "FluxControlNetInpaintPipeline"
    pipe, ranks = on_threads(name)
    given = {**edit(name, steps=5), "control_guidance_end": 0.5}
    latents(pipe, **given, quality=SYNC)
    ranks.reads.clear()
    latents(pipe, **given, quality=LATE)
    assert ranks.reads == [False, True, False, True, True]


@pytest.mark.slow
def test_a_recorded_picture_is_made_by_ranks_that_wait() -> None:
    name = "FluxPipeline"

    def given() -> dict[str, Any]:
        return call_of(PIPES[name], 1, num_inference_steps=4)

    wanted = latents(anew(name), **given(), record=True, quality=SYNC)
    pipe, ranks = on_threads(name)
    assert distance(latents(pipe, **given(), record=True, quality=LATE), wanted) < 1e-5
    assert ranks.reads == [False] * 4
    assert 'parallel="late" with record=True' in "\n".join(pipeline_state_of(pipe).notes)
    pipe, ranks = on_threads(name)
    assert distance(latents(pipe, **given(), quality=LATE), wanted) > 1e-5
    assert ranks.reads == [False, True, True, True]
