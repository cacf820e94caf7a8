"""Steps cut into samples give the results of the whole steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx import CompiledDenoiser, DenseStep, EditStep, RecordStep
from maskfx.distributed.samples import StepSamples, join_samples
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.steps import LateExchange, SplitRun
from tests.distributed import tiny
from tests.distributed.test_ranks import BOUND, error
from tests.factories.lora import update_of
from tests.factories.masks import MASKS


class Mean(nn.Module):
    """Its samples depend on each other."""

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        return sample - sample.mean(0, keepdim=True) + timestep.view(-1, 1, 1, 1)


@pytest.fixture(scope="module")
def denoiser() -> CompiledDenoiser:
    return tiny.compiled()


def an_edit(denoiser: CompiledDenoiser, seed: int, batch: int) -> EditStep:
    cache = denoiser.record(**tiny.inputs(seed, batch=batch))[1]
    return EditStep(tiny.inputs(seed + 1, batch=batch), MASKS["random"]((8, 8), seed), cache)


def _rows(step: Any) -> int:
    return len(step.inputs["sample"])


def test_samples_of_dense_steps_and_edits(denoiser: CompiledDenoiser) -> None:
    own = (update_of(denoiser.module, 4, 1),)
    dense = [DenseStep(tiny.inputs(1, batch=2)), DenseStep(tiny.inputs(2, batch=3), own)]
    steps: list[Any] = [
        *dense,
        an_edit(denoiser, 5, 2),
        replace(an_edit(denoiser, 7, 3), adapters=own),
    ]
    samples = [StepSamples(denoiser).of(step) for step in steps]
    counts = list(map(len, samples))
    assert counts == [2, 3, 2, 3]
    every = [one for found in samples for one in found]
    assert {_rows(step) for step in every} == {1}
    got = join_samples(steps, counts, denoiser.step(every), denoiser.module)
    for ours, wanted in zip(got, denoiser.step(steps), strict=True):
        assert error(ours, wanted) < BOUND


def test_what_stays_the_same_from_step_to_step_gives_the_same_objects(
    denoiser: CompiledDenoiser,
) -> None:
    """So ranks know recordings by number, and results computed once per request stay valid."""
    edit, samples = an_edit(denoiser, 1, 2), StepSamples(denoiser)
    later = replace(edit, inputs={**edit.inputs, "sample": torch.randn(2, 4, 8, 8)})
    for one, other in zip(samples.of(edit), samples.of(later), strict=True):
        assert isinstance(one, EditStep)
        assert isinstance(other, EditStep)
        assert one.cache is other.cache
        assert one.inputs["encoder_hidden_states"] is other.inputs["encoder_hidden_states"]
        assert one.inputs["sample"] is not other.inputs["sample"]


def test_samples_of_recordings(denoiser: CompiledDenoiser) -> None:
    """The joined recording serves edits of the whole call, as the whole one does."""
    own = (update_of(denoiser.module, 4, 1),)
    given = tiny.inputs(3, batch=2)
    for step in (RecordStep(given), RecordStep(given, own)):
        samples = StepSamples(denoiser).of(step)
        assert len(samples) == 2
        found: Any = next(join_samples([step], [2], denoiser.step(samples), denoiser.module))
        output, cache = found
        wanted, whole = denoiser.step([step])[0]
        assert error([output], [wanted]) < BOUND
        assert (cache.sizes, cache.adapters) == (whole.sizes, whole.adapters)
        assert cache.constants == whole.constants
        assert all(torch.equal(value, whole.step[name]) for name, value in cache.step.items())
        mask, later = MASKS["random"]((8, 8), 1), {**given, "sample": torch.randn(2, 4, 8, 8)}
        edits = [EditStep(later, mask, one, adapters=step.adapters) for one in (cache, whole)]
        first, second = denoiser.step(edits)
        assert error([first], [second]) < BOUND


def test_steps_that_stay_whole(denoiser: CompiledDenoiser) -> None:
    edit, late = an_edit(denoiser, 1, 2), LateExchange(SplitRun(), 0)
    rolling = RollingPool(1 << 24).start(denoiser.programs[edit.cache.program], edit.cache)
    steps: list[Any] = [
        DenseStep(tiny.inputs(1)),
        DenseStep(tiny.inputs(1, batch=2), late=late),
        RecordStep(tiny.inputs(1)),
        replace(edit, mask=torch.zeros(8, 8, dtype=torch.bool)),
        replace(edit, late=late),
        EditStep(edit.inputs, edit.mask, rolling, record=True),
        DenseStep({"sample": "none"}),
    ]
    samples = StepSamples(denoiser)
    for step in steps:
        assert samples.of(step) == [step]
    assert len(samples.of(edit)) == 2


def test_samples_that_depend_on_each_other_stay_together() -> None:
    denoiser = maskfx.compile(Mean())
    given = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3.0, 3.0])}
    step = DenseStep(given)
    assert StepSamples(denoiser).of(step) == [step]
