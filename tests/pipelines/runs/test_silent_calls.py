"""Networks that are scaled by 0: they aren't computed once that is known to give zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from maskfx.pipelines.runs import execute
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.pipelines.runs.silent_calls import is_zero, silent_key, zeros_of
from maskfx.pipelines.runs.step_members import CallMember, choose_steps
from tests.factories.pipelines import PIPES, anew, call_of, distance, latents, plain, square, white

CONTROL = "StableDiffusionControlNetInpaintPipeline"
SCALE = "controlnet_conditioning_scale"


@pytest.mark.parametrize("mask", [pytest.param(square, marks=pytest.mark.slow), white])
def test_a_net_that_is_scaled_by_0_is_computed_once(
    mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, names = anew(CONTROL), list[str]()

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
        wanted = latents(plain(CONTROL), **call_of(PIPES[CONTROL], 1, mask()), **given)
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
    assert is_zero(([torch.zeros(2)], torch.zeros(1)))
    assert not is_zero([torch.zeros(2), torch.ones(1)])
    assert not is_zero(None)
    shapes = ([torch.zeros(2, 3, device="meta")], None)
    made: Any = zeros_of(shapes, torch.device("cpu"))
    [found], none = made
    assert torch.equal(found, torch.zeros(2, 3))
    assert none is None
