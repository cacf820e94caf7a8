"""Schedulers: some repeat timesteps, call twice a step or add noise; edits follow all of them."""

from typing import Any

import diffusers
import numpy as np
import pytest

from maskfx.pipelines.quality import Quality
from tests.factories.pipelines import (
    PIPES,
    Steps,
    anew,
    call_of,
    distance,
    flow,
    latents,
    picture,
    plain,
    square,
    white,
)

pytestmark = pytest.mark.slow

UNET, FLUX = "StableDiffusionInpaintPipeline", "FluxInpaintPipeline"
SD3 = "StableDiffusion3InpaintPipeline"
NAMES = ["DDIM", "EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "PNDM"]
NAMES += ["DPMSolverMultistep"]


def scheduler(name: str) -> Any:
    more = {"skip_prk_steps": True} if name == "PNDM" else {}
    if name == "DDIM":
        more = {"clip_sample": False}
    return getattr(diffusers, f"{name}Scheduler")(
        prediction_type="v_prediction", beta_schedule="scaled_linear", **more
    )


def check(name: str, made: Any, monkeypatch: Any, **more: Any) -> None:
    kind, pipe, original = PIPES[name], anew(name), plain(name)
    pipe.scheduler, before = made, original.scheduler
    original.scheduler = type(made).from_config(made.config)
    try:
        wanted = latents(original, **call_of(kind, 0, white(), **more))
    finally:
        original.scheduler = before
    assert distance(latents(pipe, **call_of(kind, 0, white(), **more)), wanted) < 1e-4
    steps = Steps(monkeypatch)
    done = np.asarray(pipe(**call_of(kind, 1, square(), **more)).images[0])
    assert steps.kinds() == {"EditStep"}
    outside = np.asarray(square()) <= 127
    assert np.array_equal(done[outside], np.asarray(picture())[outside])
    last = Quality(last=1)
    latents(pipe, **call_of(kind, 1, square(), **more), quality=last)
    kinds = [one for [one] in steps.taken()]
    assert kinds == ["EditStep"] * (len(kinds) - 1) + ["itself"]


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("scheduling", NAMES)
def test_unets(scheduling: str, strength: float, monkeypatch: pytest.MonkeyPatch):
    more = {"num_inference_steps": 5, "strength": strength}
    check(UNET, scheduler(scheduling), monkeypatch, **more)


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("name", [FLUX, SD3])
def test_flow_matching(name: str, strength: float, monkeypatch: pytest.MonkeyPatch):
    made = flow() if name == FLUX else diffusers.FlowMatchHeunDiscreteScheduler()
    check(name, made, monkeypatch, num_inference_steps=5, strength=strength)
