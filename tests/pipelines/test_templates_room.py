"""The memory that a pipeline's templates may take, unless its tiers are given."""

from __future__ import annotations

import pytest

import maskfx
from maskfx.pipelines import compile as compiling
from maskfx.pipelines.compile import HOST_BYTES, pipeline_state_of
from tests.factories.pipelines import PIPES


@pytest.mark.parametrize(("free", "room"), [(1000.0, 500), (float("inf"), HOST_BYTES)])
def test_templates_leave_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: float, room: int
) -> None:
    monkeypatch.setattr(compiling, "free_memory", lambda device: free)
    pipe = maskfx.compile(PIPES["StableDiffusionInpaintPipeline"].build())
    assert pipeline_state_of(pipe).library.tiers.room == room
