"""Networks that are scaled by 0: they aren't computed once that is known to give zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.pipelines.runs import execute
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.pipelines.runs.silent_calls import is_always_zero, is_zero, silent_key, zeros_of
from maskfx.pipelines.runs.step_members import CallMember, choose_steps
from tests.factories.pipelines import PIPES, call_of, distance, latents, pipe_of, square, white
from tests.factories.small_unets import least_control

CONTROL = "StableDiffusionControlNetInpaintPipeline"
SCALE = "controlnet_conditioning_scale"


@pytest.mark.parametrize("mask", [pytest.param(square, marks=pytest.mark.slow), white])
def test_a_net_that_is_scaled_by_0_is_computed_once(
    mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = maskfx.compile(pipe_of(CONTROL, least_control), quality="all-steps")
    names = list[str]()

    def choose(call: DenoiserCall) -> list[CallMember]:
        names.append(call.name)
        return choose_steps(call)

    monkeypatch.setattr(execute, "choose_steps", choose)
    given = {SCALE: 0.0}
    first = latents(pipe, **call_of(PIPES[CONTROL], 1, mask()), **given)
    count = names.count("controlnet")
    assert 0 < count <= 2
    second = latents(pipe, **call_of(PIPES[CONTROL], 1, mask()), **given)
    assert names.count("controlnet") == count, "its zeros are known"
    assert distance(first, second) < 1e-5
    if mask is white:
        own = pipe_of(CONTROL, least_control)
        wanted = latents(own, **call_of(PIPES[CONTROL], 1, mask()), **given)
        assert distance(second, wanted) < 1e-4
    other = latents(pipe, **call_of(PIPES[CONTROL], 1, mask()), **{SCALE: 1.0})
    assert names.count("controlnet") > count
    assert distance(second, other) > 1e-3


def test_what_is_a_silent_call() -> None:
    key = ("net", ("", ()))
    assert silent_key(key, {"conditioning_scale": 0.0}) == silent_key(
        key, {"conditioning_scale": 0}
    )
    others: list[dict[str, object]] = [{}, {"conditioning_scale": 0.1}]
    others += [{"conditioning_scale": False}, {"conditioning_scale": torch.zeros(1)}]
    assert all(silent_key(key, one) is None for one in others)
    assert silent_key(key, {"strength_of_the_hint": [1.0, 0]}) is not None
    assert is_zero(([torch.zeros(2)], torch.zeros(1)))
    assert not is_zero([torch.zeros(2), torch.ones(1)])
    assert not is_zero(None)
    shapes = ([torch.zeros(2, 3, device="meta")], None)
    made: Any = zeros_of(shapes, torch.device("cpu"))
    [found], none = made
    assert torch.equal(found, torch.zeros(2, 3))
    assert none is None


class Net(nn.Module):
    """A network whose result has a scale, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Conv2d(2, 3, 1), how

    def forward(self, sample: Tensor, timestep: Tensor, gain: Any) -> Any:
        rows = self.inner(sample) * timestep.view(-1, 1, 1, 1)
        if self.how == "product":
            return [rows * gain, (gain * rows).mean(dim=(2, 3), keepdim=True).to(torch.float64)]
        if self.how == "ramp":
            scales = torch.logspace(-1, 0, 2) * gain
            return {"all": [part * scale for part, scale in zip([rows, rows], scales, strict=True)]}
        if self.how == "in place":
            return rows.mul_(gain)
        if self.how == "of the input":
            return rows * sample[:, :1]
        if self.how == "added":
            return rows * gain + timestep.view(-1, 1, 1, 1)
        if self.how == "read":
            return rows * gain if rows.sum() > 0 else rows
        return (rows * gain).add_(rows)


@pytest.mark.parametrize("how", ["product", "ramp", "in place"])
def test_a_result_that_is_multiplied_by_0_is_always_zero(how: str) -> None:
    net, inputs = Net(how), {"sample": torch.randn(1, 2, 4, 4), "timestep": torch.ones(1)}
    assert is_always_zero(net, {**inputs, "gain": 0.0})
    assert is_zero(net(**inputs, gain=0))
    assert not is_always_zero(net, {**inputs, "gain": 0.5})


@pytest.mark.parametrize("how", ["of the input", "added", "read", "in the end"])
def test_a_result_that_is_zero_by_chance_is_not(how: str) -> None:
    inputs = {"sample": torch.zeros(1, 2, 4, 4), "timestep": torch.zeros(1), "gain": 0.0}
    assert not is_always_zero(Net(how), inputs)
