"""An engine whose denoiser's steps are split over processes gives the same pictures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.distributed.rank_group import RankGroup
from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.quality import Quality
from maskfx.scheduling.rounds.elastic import ElasticRounds
from tests.distributed import tiny
from tests.distributed.test_rank_group import held
from tests.factories.pipelines import PIPES, anew, call_of, distance, latents, square
from tests.pipelines.test_patches import Turns, pipe_of, reuse, share
from tests.pipelines.test_patches import call as patch_call

NAME = "FluxInpaintPipeline"


def arguments(seed: int) -> dict[str, Any]:
    return {**call_of(PIPES[NAME], seed, square()), "output_type": "latent", "return_dict": False}


@pytest.mark.slow
def test_the_steps_of_two_requests_over_two_ranks() -> None:
    pipe = anew(NAME, compiled_pipe=maskfx.compile(PIPES[NAME].build(), quality="all-steps"))
    pipe(**arguments(0))  # records the template
    alone: list[Tensor] = [pipe(**arguments(seed))[0] for seed in (1, 2)]
    with maskfx.Engine(ranks=2) as engine:
        tickets = [engine.submit(pipe, **arguments(seed)) for seed in (1, 2)]
        found = [ticket.result()[0] for ticket in tickets]
        (group,) = engine.runner.rank_groups()
        assert isinstance(group, RankGroup)
        assert group.computed_here == group.failures == 0
        assert group.last
    for ours, theirs in zip(found, alone, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


def test_the_timeout_of_ranks() -> None:
    with pytest.raises(InputError, match="rank_timeout=0"):
        maskfx.Engine(ranks=2, rank_timeout=0)
    with maskfx.Engine(ranks=2, rank_timeout=7.0) as engine:
        engine.runner.adopt(object(), {"unet": tiny.compiled()})
        (group,) = engine.runner.rank_groups()
        waits = group.pool.waits
        assert (waits.silence, waits.stall) == (7.0, 7.0)


@pytest.mark.parametrize("ranks", [0, 1.5, "two"])
def test_an_engine_refuses_other_numbers_of_ranks(ranks: Any) -> None:
    with pytest.raises(InputError, match="ranks"):
        maskfx.Engine(ranks=ranks)


def test_ranks_of_a_denoiser_that_inductor_compiles() -> None:
    """The picture is that of plain operators, which run while another process compiles."""
    pipes = [maskfx.compile(PIPES[NAME].build(), inductor=each) for each in (False, True)]
    found = []
    for pipe in pipes:
        with maskfx.Engine(ranks=2) as engine:
            found.append(engine.submit(pipe, **arguments(1)).result()[0])
            (group,) = engine.runner.rank_groups()
            assert group.computed_here == group.failures == 0
            explained = maskfx.explain(pipe)
    assert "Ranks run whole members operator by operator" in explained
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-4


def late_arguments(name: str, seed: int, steps: int = 4) -> dict[str, Any]:
    given = call_of(PIPES[name], seed, square())
    quality = replace(maskfx.Quality.of("all-steps"), parallel="late")
    more = {"output_type": "latent", "return_dict": False, "num_inference_steps": steps}
    return {**given, **more, "quality": quality}


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "StableDiffusionInpaintPipeline"])
def test_late_rows_of_an_edit_and_what_ranks_hold_afterwards(name: str) -> None:
    """A request alone, and the same one beside another that waits: the same picture."""
    pipe = anew(name, compiled_pipe=maskfx.compile(PIPES[name].build(), quality="all-steps"))
    given, timely = (late_arguments(name, 1), {**late_arguments(name, 1), "quality": "all-steps"})
    pipe(**timely)  # records the template
    exact = pipe(**{**timely, "generator": torch.Generator().manual_seed(7)})[0]
    mate = pipe(**{**timely, "generator": torch.Generator().manual_seed(8)})[0]

    def ticket(engine: maskfx.Engine, own: dict[str, Any], seed: int) -> Any:
        return engine.submit(pipe, **{**own, "generator": torch.Generator().manual_seed(seed)})

    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0), ranks=2) as engine:
        alone = ticket(engine, given, 7).result()[0]
        (group,) = engine.runner.rank_groups()
        assert held(group) == [0, 0]
        assert "parallel" not in "\n".join(pipeline_state_of(pipe).notes)
        tickets = [ticket(engine, given, 7), ticket(engine, timely, 8)]
        found, other = (one.result()[0] for one in tickets)
        assert max(step.requests for step in engine.steps) == 2
        assert held(group) == [0, 0]
        assert group.computed_here == group.failures == 0
    assert distance(found, alone) < 1e-4
    assert distance(other, mate) < 1e-4
    assert 1e-4 < distance(alone, exact) < 0.5


def test_late_rows_without_ranks_are_noted() -> None:
    """The picture is that of a run that waits, and explain() has the reason."""
    pipe = anew(NAME, compiled_pipe=maskfx.compile(PIPES[NAME].build(), quality="all-steps"))
    timely = pipe(**{**late_arguments(NAME, 1), "quality": "all-steps"})[0]
    assert torch.equal(pipe(**late_arguments(NAME, 1))[0], timely)
    assert 'parallel="late": no step reads rows of the step before' in maskfx.explain(pipe)
    with pytest.raises(InputError, match="parallel='later'"):
        maskfx.Quality(parallel="later")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("name", ["FluxPipeline", "StableDiffusionPipeline"])
def test_patches_over_ranks(name: str, rounds: bool) -> None:
    """Equal decisions about patches, equal pictures; one request chooses them while steps run."""
    pipe, turns = pipe_of(name), reuse(judge=Turns())
    own = [(1, turns), (2, turns), (3, reuse(judge=Turns(), order="stretch"))]
    alone = [latents(pipe, **patch_call(name, seed), quality=quality) for seed, quality in own]
    computed = share(pipe)
    more: dict[str, Any] = {"output_type": "latent", "return_dict": False}
    policy = maskfx.BatchPolicy(patience=1.0)
    with maskfx.Engine(policy, ranks=2, rounds=ElasticRounds() if rounds else None) as engine:
        tickets = [
            engine.submit(pipe, **patch_call(name, seed), **more, quality=quality)
            for seed, quality in own
        ]
        found = [ticket.result()[0] for ticket in tickets]
        (group,) = engine.runner.rank_groups()
        assert group.computed_here == group.failures == 0
    for ours, theirs in zip(found, alone, strict=True):
        assert distance(ours, theirs) < 1e-4
    assert abs(share(pipe) - computed) < 1e-6


@pytest.mark.slow
def test_a_batch_of_patches_over_ranks() -> None:
    name = "FluxPipeline"
    pipe = maskfx.compile(
        PIPES[name].build(),
        mode="patch_batch",
        quality=Quality(patches=reuse(judge=Turns()).patches),
    )
    alone = [latents(pipe, **patch_call(name, seed)) for seed in (1, 2)]
    more: dict[str, Any] = {"output_type": "latent", "return_dict": False}
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0), ranks=2) as engine:
        tickets = [engine.submit(pipe, **patch_call(name, seed), **more) for seed in (1, 2)]
        found = [ticket.result()[0] for ticket in tickets]
        (group,) = engine.runner.rank_groups()
        assert group.computed_here == group.failures == 0
        assert max(step.requests for step in engine.steps) == 2
    for ours, theirs in zip(found, alone, strict=True):
        assert distance(ours, theirs) < 1e-4
