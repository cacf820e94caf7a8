"""canonicalize_batches: parts of the batch computed in several ways are choices of each sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.batches import canonicalize_batches
from tests.passes.tools import Inputs, check_values, numbers, picture, run_pass, shared, timed


def samples(seed: int = 0, wide: bool = False) -> Inputs:
    """Packed tokens of six samples."""
    return {"hidden_states": numbers(6, 26 if wide else 20, 8, seed=seed)}


class Perturbed(nn.Module):
    """The last samples don't attend, and the ones before do, as in perturbed-attention guidance."""

    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.parts, self.qkv, self.proj = parts, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        *first, last = hidden_states.tanh().chunk(self.parts)
        some = torch.cat(first) if len(first) > 1 else first[0]
        qkv = self.qkv(some).view(some.shape[0], -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).flatten(2)
        own = self.proj(self.qkv(last)[..., 16:])
        return hidden_states + torch.cat([self.proj(mixed), own])


class Parities(nn.Module):
    """Every other row and column as a sample of its own for a convolution, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        parts = [sample[..., y::2, x::2] for y in (0, 1) for x in (0, 1)]
        found = self.conv(torch.cat(parts).tanh()).chunk(4)
        out = torch.zeros_like(sample)
        for number, part in enumerate(found):
            out[..., number // 2 :: 2, number % 2 :: 2] = part
        return out + sample


class Mixed(nn.Module):
    """Parts that leave out samples, change their order, or read each other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, hidden_states: Tensor) -> Tensor:
        a, b = hidden_states.chunk(2)
        if self.kind == "order":
            return torch.cat([b.tanh(), a.sin()])
        if self.kind == "batches":  # a norm over all samples of a join
            joined = torch.cat([hidden_states, hidden_states.sin()]).softmax(0)
            return joined[: hidden_states.shape[0]] + joined[hidden_states.shape[0] :]
        if self.kind == "twice":
            return torch.cat([a.tanh(), a.sin()]) + hidden_states
        return torch.cat([a.tanh(), (a + b).sin()])


@pytest.mark.parametrize("parts", [2, 3])
def test_rewrites_parts_to_a_choice(parts: int) -> None:
    module = shared(Perturbed) if parts == 2 else Perturbed(parts)
    run = run_pass(canonicalize_batches, module, samples)
    assert (run.rewrites, run.gained("where"), run.after["chunk"]) == (1, 1, 0)
    assert run.after["scaled_dot_product_attention"] == 1
    assert run.second_run_is_idle()
    check_values(module, samples, oracle=False)  # the twin has one mask for all samples


def test_takes_joined_batches_apart() -> None:
    run = run_pass(canonicalize_batches, shared(Parities), picture)
    assert (run.rewrites, run.gained("conv2d"), run.after["cat"], run.after["chunk"]) == (
        1,
        3,
        0,
        0,
    )
    assert run.second_run_is_idle()
    check_values(shared(Parities), picture, oracle=False)  # the twin has one picture a sample


class OneForAll(nn.Module):
    """Each sample's time, and one for all samples behind them, through the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 4)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        both = torch.cat([timestep, timestep.new_zeros(1)])
        made = self.time(both[:, None]).tanh()
        return sample * made[:-1, :, None, None] + made[-1:, :, None, None]


def test_takes_one_for_all_samples_apart() -> None:
    run = run_pass(canonicalize_batches, shared(OneForAll), timed)
    assert (run.rewrites, run.after["cat"], run.after["linear"]) == (1, 0, 2)
    assert run.second_run_is_idle()
    check_values(shared(OneForAll), timed)


@pytest.mark.parametrize("kind", ["order", "twice", "both", "batches"])
def test_keeps_other_parts(kind: str) -> None:
    assert run_pass(canonicalize_batches, Mixed(kind), samples).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_batches, shared(Perturbed), samples).second_run_is_idle()
