"""A rank answers what it is asked: requests are made and answered in this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from maskfx import DenseStep, EditStep
from maskfx.distributed.batch import RankBatch
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.exchanges.process_group import unnoted
from maskfx.distributed.messages import PartRequest
from maskfx.distributed.rank_process import RankState
from maskfx.distributed.rank_step import RankPrograms, joined
from maskfx.runtime.steps import AnyStep
from tests.distributed import tiny
from tests.distributed.test_ranks import BOUND, error
from tests.factories.masks import MASKS
from tests.runtime.validation import test_sample_calls as ragged


def rank_of(denoiser: Any) -> RankState:
    """A rank without others, over a denoiser of this process."""
    rank = RankState(cast(Any, SimpleNamespace(waiting=unnoted)))
    rank.denoiser, rank.programs = denoiser, RankPrograms(denoiser.settings)
    rank.link = cast(Any, SimpleNamespace(finish=lambda: None))  # nothing is exchanged
    return rank


def asked(denoiser: Any, steps: list[AnyStep]) -> tuple[RankBatch, PartRequest]:
    """Return the batch of some steps, and what asks a rank for all of it."""
    found: list[Any] = []
    denoiser.step(steps, lambda *given: found.append(given))
    [given] = found
    batch = RankBatch.of(denoiser, *given)
    whole = Partition(((1.0,),) * len(batch.members))
    return batch, PartRequest(
        batch.steps,
        batch.program.code,
        batch.changed,
        batch.single,
        batch.recording,
        batch.emits,
        whole,
        (0,),
        0,
        "gathered",
        True,
    )


def test_samples_of_a_call_are_steps_of_their_own() -> None:
    """Each is sent with its own arguments, and the rank doesn't take it for a call to divide."""
    denoiser, call = ragged.denoiser(), ragged.make([7, 4], 9, 1)
    batch, request = asked(denoiser, [DenseStep(call)])
    assert request.single
    assert len(request.steps) == 2
    texts: list[Any] = [step.inputs["encoder_hidden_states"] for step in request.steps]
    assert [len(text) for text in texts] == [1, 1]
    captured = len(denoiser.compilations)
    found = rank_of(denoiser).compute(request)
    layout = RankPrograms(denoiser.settings).layout(batch.frame.layout, request.partition, 0)
    rows = joined(batch.program, False, [layout], [found.part])
    results = denoiser.step([DenseStep(call)], lambda *_: rows)
    assert error(results, [denoiser.module(**call)]) < BOUND
    assert len(denoiser.compilations) == captured


def test_calls_that_run_as_a_whole_are_sent_as_they_are() -> None:
    denoiser, inputs = tiny.compiled(), tiny.inputs(1, batch=2)
    cache = denoiser.record(**inputs)[1]
    steps: list[AnyStep] = [EditStep(inputs, MASKS["square"]((8, 8), 0), cache)]
    _, request = asked(denoiser, steps)
    assert not request.single
    assert request.steps == steps
