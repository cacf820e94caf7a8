"""Recurrent layers over many sites are refused before Python goes through them one by one."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.tracing.recurrent_layers import MOST


class InTurn(nn.Module):
    """A recurrent layer over all sites, or over the text."""

    def __init__(self, kind: str, text: bool = False) -> None:
        super().__init__()
        self.text = text
        self.turn = getattr(nn, kind)(4, 4, batch_first=True)

    def forward(self, sample: Tensor, context: Tensor) -> Tensor:
        if self.text:
            return sample.tanh() + self.turn(context)[0][:, -1, :, None, None]
        sites, _ = self.turn(sample.flatten(2).transpose(1, 2))
        return sample + sites.transpose(1, 2).unflatten(2, sample.shape[2:])


def inputs(side: int = 16) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "sample": torch.randn(1, 4, side, side, generator=made),
        "context": torch.randn(1, 5, 4, generator=made),
    }


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_all_sites_in_turn_are_refused_at_once(kind: str) -> None:
    module = InTurn(kind).eval().requires_grad_(False)
    denoiser = maskfx.compile(module)
    start = time.process_time()
    output, kept = denoiser.record(**inputs())
    assert time.process_time() - start < 10
    assert torch.equal(output, module(**inputs()))
    mask = torch.arange(16 * 16).reshape(16, 16) % 7 == 0
    assert torch.equal(denoiser.edit([maskfx.EditStep(inputs(), mask, kept)])[0], output)
    reasons = "; ".join(denoiser.compilations[0].reasons.values())
    assert "tokens one after the other" in reasons


def test_a_short_text_is_computed_in_turn() -> None:
    module = InTurn("GRU", text=True).eval().requires_grad_(False)
    assert inputs()["context"].shape[1] <= MOST
    denoiser = maskfx.compile(module)
    output, _ = denoiser.record(**inputs())
    assert torch.allclose(output, module(**inputs()), atol=1e-5)
    assert denoiser.compilations[0].program is not None
