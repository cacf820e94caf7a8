"""An engine whose denoiser's steps are split over processes gives the same pictures."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import maskfx
from maskfx.distributed.rank_group import RankGroup
from maskfx.errors import InputError
from tests.factories.pipelines import PIPES, anew, call_of, square

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


@pytest.mark.parametrize("ranks", [0, 1.5, "two"])
def test_an_engine_refuses_other_numbers_of_ranks(ranks: Any) -> None:
    with pytest.raises(InputError, match="ranks"):
        maskfx.Engine(ranks=ranks)
