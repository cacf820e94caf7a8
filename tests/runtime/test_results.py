"""Results beside the prediction, and pictures whose channels come last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from tests.passes.tools import TOLERANCE, error, numbers

MASK = torch.zeros(8, 6, dtype=torch.bool)
MASK[2:5, 1:4] = True


class Several(nn.Module):
    """Returns None, a number, an argument, and what follows from the text or the time alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.text = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(6, 4)

    def forward(self, sample: Tensor, timestep: Tensor, context: Tensor) -> dict[str, Any]:
        text, time = self.text(context), timestep[:, None] / 1000
        found = self.conv(sample) * time[..., None, None] + text.mean(1)[..., None, None]
        return {
            "loss": None,
            "sample": found,
            "scale": 2,
            "text": text,
            "given": sample,
            "variance": time.exp(),
        }


def several(batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    times = torch.arange(1.0, batch + 1) * 100
    sample, context = numbers(batch, 4, 8, 6, seed=seed), numbers(batch, 5, 6, seed=seed + 1)
    return {"sample": sample, "timestep": times, "context": context}


def test_results_that_no_step_computes_are_returned_too() -> None:
    module = Several().eval()
    compiled = maskfx.compile(module)
    steps, wanted = [], []
    for batch in (1, 2):
        inputs = several(batch, seed=batch)
        recorded, kept = compiled.record(**inputs)
        steps.append(maskfx.EditStep(inputs, MASK, kept))
        wanted.append(module(**inputs))
        assert recorded.keys() == wanted[-1].keys()
    found = compiled.edit(steps)
    assert compiled.compilations[-1].program is not None
    assert not compiled.compilations[-1].reasons
    for one, other in zip(found, wanted, strict=True):
        assert (one["loss"], one["scale"]) == (None, 2)
        for name in ("sample", "text", "given", "variance"):
            assert one[name].shape == other[name].shape
            assert error(one[name], other[name]) < TOLERANCE


def test_an_argument_that_is_returned_is_a_copy_with_the_edits_rows() -> None:
    compiled, inputs = maskfx.compile(Several().eval()), several()
    _, kept = compiled.record(**inputs)
    other = {**inputs, "sample": numbers(2, 4, 8, 6, seed=9)}
    [found] = compiled.edit([maskfx.EditStep(other, MASK, kept)])
    assert torch.equal(found["given"][..., MASK], other["sample"][..., MASK])
    assert torch.equal(found["given"][..., ~MASK], inputs["sample"][..., ~MASK])


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mix = nn.Linear(3, 4), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        x = self.first(sample) + timestep[:, None, None, None] / 1000
        return self.mix(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_channels_may_come_last(batch: int) -> None:
    module = ChannelsLast().eval()
    compiled = maskfx.compile(module)
    inputs = {"sample": numbers(batch, 8, 6, 3, seed=1), "timestep": torch.full((batch,), 30.0)}
    recorded, kept = compiled.record(**inputs)
    assert error(recorded, module(**inputs)) < TOLERANCE
    other = {**inputs, "sample": numbers(batch, 8, 6, 3, seed=2)}
    same, edited = compiled.edit([maskfx.EditStep(g, MASK, kept) for g in (inputs, other)])
    assert error(same, recorded) < TOLERANCE
    assert torch.equal(edited[:, ~MASK], recorded[:, ~MASK])
    assert error(edited[:, MASK], recorded[:, MASK]) > 0.01
    assert not compiled.compilations[-1].reasons
