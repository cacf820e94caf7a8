"""Denoisers within `torch.autocast`, and those that compute in 16 bits and return 32."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.export.exporter import export
from tests.export.tiny import arguments, tiny
from tests.passes.tools import error


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Within(nn.Module):
    """Turns on autocast by itself, and returns float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        with bfloat16():
            out: Tensor = self.inner(sample, timestep, encoder_hidden_states)
        return out.float()


class Halved(Within):
    """Has weights of 16 bits, and arguments and results of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny(torch.bfloat16)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        text = encoder_hidden_states.bfloat16()
        out: Tensor = self.inner(sample.bfloat16(), timestep, text)
        return out.float()


@torch.no_grad()
def check(module: nn.Module, denoiser: maskfx.CompiledDenoiser, batch: int = 1) -> maskfx.StepCache:
    """An edit is as near to the exact result as the module's own is."""
    given = arguments(batch, 6, 10)
    wanted = module(**given)
    output, cache = denoiser.record(**given)
    mask = torch.arange(60).view(6, 10) % 7 == 0
    [edited] = denoiser.edit([maskfx.EditStep(given, mask, cache)])
    assert output.dtype == edited.dtype == wanted.dtype
    with torch.autocast("cpu", enabled=False):
        exact = tiny()(**given)
    apart = error(wanted.float(), exact)
    for found in (output, edited):
        assert error(found.float(), exact) < max(2 * apart, 1e-4)
    assert all(one.program for one in denoiser.compilations)
    return cache


@pytest.mark.parametrize("kind", [Within, Halved])
def test_what_computes_in_16_bits_and_returns_32_is_narrowed(kind: type[Within]) -> None:
    module = kind()
    denoiser = maskfx.compile(module)
    for batch in (1, 2):
        check(module, denoiser, batch)


def test_calls_within_autocast_have_a_capture_of_their_own() -> None:
    module = tiny()
    denoiser, contexts = maskfx.compile(module), (bfloat16, nullcontext, bfloat16)
    caches = []
    for context in contexts:
        with context():
            caches.append(check(module, denoiser))
            assert "FLOP" in denoiser.explain()
    assert len(denoiser.compilations) == 2
    assert caches[0].program == caches[2].program != caches[1].program
    assert "FLOP" in denoiser.explain()
    mask = torch.ones(6, 10, dtype=torch.bool)
    with pytest.raises(maskfx.CacheError):
        denoiser.edit([maskfx.EditStep(arguments(1, 6, 10), mask, caches[0])])


def test_saved_captures_serve_calls_of_their_autocast_alone(tmp_path: Path) -> None:
    for _ in range(2):  # the second reads what the first wrote
        module = tiny()
        denoiser = maskfx.compile(module, programs=tmp_path)
        for context in (bfloat16, nullcontext):
            with context():
                check(module, denoiser)
        assert sorted(map(len, (one.capture.autocast for one in denoiser.compilations))) == [0, 1]


def test_graphs_of_16_bits_with_results_of_32_are_exported(tmp_path: Path) -> None:
    for kind in (Within, Halved):
        path = tmp_path / kind.__name__
        found = export(kind(), path, format="pt2", example_inputs=arguments())
        assert 1e-4 < max(v.error for v in found.verdicts["denoiser"]) < 2e-2
