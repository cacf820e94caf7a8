"""mode="patch_batch": dense requests of several sizes share steps the way that measures faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import maskfx
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.dense_ways import DenseWay, DenseWays
from tests.factories.served import build

NAME = "StableDiffusionPipeline"
SIZES = ((32, 32), (32, 48), (32, 32))
STEPS = 6


def call(number: int) -> dict[str, Any]:
    height, width = SIZES[number]
    return {
        "prompt": "a cat",
        "height": height,
        "width": width,
        "num_inference_steps": STEPS,
        "generator": torch.Generator().manual_seed(number),
        "output_type": "pt",
    }


def made(mode: str, seconds: dict[DenseWay, float], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pictures of requests that share steps, and the pipeline; `seconds` replaces measurements."""
    add = DenseWays.add

    def faked(own: DenseWays, members: int, sizes: int, way: DenseWay, took: float, n: int) -> None:
        add(own, members, sizes, way, seconds[way], n)

    monkeypatch.setattr(DenseWays, "add", faked)
    pipe = build(NAME)
    pipe.set_progress_bar_config(disable=True)
    maskfx.compile(pipe, mode=mode)
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0)) as engine:
        tickets = [engine.submit(pipe, **call(number)) for number in range(len(SIZES))]
        pictures = [ticket.result(120).images for ticket in tickets]
        assert max(step.requests for step in engine.steps) == len(SIZES)
    return pictures, pipe


@pytest.mark.parametrize("faster", list(DenseWay))
def test_either_way_gives_the_pictures_of_single_runs(
    faster: DenseWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    step = maskfx.CompiledDenoiser.step

    def counted(own: maskfx.CompiledDenoiser, steps: Any, *rest: Any) -> Any:
        ran.append(len(steps))
        return step(own, steps, *rest)

    monkeypatch.setattr(maskfx.CompiledDenoiser, "step", counted)
    seconds = {way: 1.0 if way is faster else 2.0 for way in DenseWay}
    pictures, pipe = made("patch_batch", seconds, monkeypatch)
    plain = build(NAME)
    plain.set_progress_bar_config(disable=True)
    for number, picture in enumerate(pictures):
        assert (picture - plain(**call(number)).images).abs().max() < 1e-4
    assert ran.count(len(SIZES)) >= (3 if faster is DenseWay.ROWS else 2)
    assert "3 dense requests of 2 sizes" in maskfx.explain(pipe)
    assert f"runs as {faster}" in maskfx.explain(pipe)


def test_mode_dense_runs_the_module_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, pipe = made("dense", dict.fromkeys(DenseWay, 1.0), monkeypatch)
    [denoiser] = pipeline_state_of(pipe).denoisers.values()
    assert not denoiser.programs
    assert not list(denoiser.dense_ways.lines())
    assert len(pictures) == len(SIZES)
