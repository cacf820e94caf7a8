"""canonicalize_parts: frames that are computed alike with other numbers are computed at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.passes.canonicalize.parts import canonicalize_parts
from tests.passes.tools import Inputs, denoiser_of, error, numbers, run_pass, shared

WIDTH = 8


def film(seed: int = 0, wide: bool = False) -> Inputs:
    """A video of three frames of four channels, its timesteps and a text."""
    return {
        "sample": numbers(2, 4, 3, 6, 10 if wide else 8, seed=seed),
        "timestep": torch.tensor([3.0, 7.0]) + seed,
        "encoder_hidden_states": numbers(2, 5, WIDTH, seed=50),
    }


class Film(nn.Module):
    """Tokens of all frames, each with a scale and a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.scale, self.other = nn.Linear(1, WIDTH), nn.Linear(1, WIDTH)

    def changed(self, x: Tensor, text: Tensor, size: int, a: Tensor, b: Tensor) -> Tensor:
        """Return tokens of which those of the first frame are changed by another scale."""
        y = F.silu(x)
        one = x[:, :size] + y[:, :size] * (1 + a[:, None]) + a.unsqueeze(1)
        return torch.cat([one, x[:, size:] + y[:, size:] * (1 + b[:, None]) + b.unsqueeze(1)], 1)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = self.first(sample.flatten(2).transpose(1, 2))
        a, b = self.scale(timestep[:, None]), self.other(timestep[:, None])
        size = sample.shape[3] * sample.shape[4]
        x = self.changed(x, encoder_hidden_states, size, a, b)
        attended = F.scaled_dot_product_attention(x, x, x)
        return self.last(x + attended).transpose(1, 2).unflatten(2, sample.shape[2:])


class Three(Film):
    """Each frame has its own scale; that of the last one is the same for all samples."""

    def changed(self, x: Tensor, text: Tensor, size: int, a: Tensor, b: Tensor) -> Tensor:
        first, second, third = x.split(size, 1)
        return torch.cat(
            [first * a[:, None], second * b[:, None], third * self.last.bias.repeat(2)], 1
        )


class Behind(Film):
    """A text stands behind the frames."""

    def changed(self, x: Tensor, text: Tensor, size: int, a: Tensor, b: Tensor) -> Tensor:
        y = torch.cat([x, text], 1)
        y = torch.cat([y[:, :size] * a[:, None], y[:, size:] * b[:, None]], 1)
        return y[:, : x.shape[1]]


class Before(Film):
    """A text stands before the frames."""

    def changed(self, x: Tensor, text: Tensor, size: int, a: Tensor, b: Tensor) -> Tensor:
        y, cut = torch.cat([text, x], 1), text.shape[1] + 2 * size
        y = torch.cat([y[:, :cut] - a[:, None], y[:, cut:] - b[:, None]], 1)
        return y[:, text.shape[1] :]


class Others(Film):
    """Other operators, a part left out, parts turned, half of a frame, text beside frames."""

    def changed(self, x: Tensor, text: Tensor, size: int, a: Tensor, b: Tensor) -> Tensor:
        one, two, half = x[:, :size], x[:, size:], size // 2
        other = torch.cat([F.relu(one), F.silu(two)], 1)
        left = torch.cat([one * a[:, None], x[:, 2 * size :] * b[:, None]], 1)
        turned = torch.cat([two * a[:, None], one * b[:, None]], 1)
        cut = torch.cat([x[:, :half] * a[:, None], x[:, half:] * b[:, None]], 1)
        both = torch.cat([x, text], 1)
        end = x.shape[1]
        beside = torch.cat([both[:, :end] * a[:, None], both[:, end:] * b[:, None]], 1)
        return other + turned + cut + beside[:, :end] + left.sum(1, keepdim=True)


@pytest.mark.parametrize(("kind", "chosen"), [(Film, 2), (Three, 2), (Behind, 1), (Before, 1)])
def test_computes_frames_at_once(kind: Callable[[], Film], chosen: int) -> None:
    module = shared(kind)
    run = run_pass(canonicalize_parts, module, film)
    assert run.rewrites == -run.gained("cat") == 1
    assert run.gained("where") == chosen
    mask = torch.zeros(3, 6, 8, dtype=torch.bool)
    mask[0, 2, 3], mask[1, :, 4], mask[2, -1] = True, True, True
    denoiser, inputs = denoiser_of(module, film), film(3)
    output, kept = denoiser.record(**inputs)
    [edited] = denoiser.edit([maskfx.EditStep(inputs, mask, kept)])
    assert error(output, module(**inputs)) < 1e-4
    assert error(edited, module(**inputs)) < 1e-4
    other = film(4, wide=True)
    assert error(denoiser.batch([other])[0], module(**other)) < 1e-4
    assert all(one.program is not None and not one.reasons for one in denoiser.compilations)


def test_keeps_other_joins() -> None:
    assert run_pass(canonicalize_parts, shared(Others), film).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_parts, shared(Film), film).second_run_is_idle()
