"""narrow_samples: values of a request that have no sites forget the captured batch."""

import torch
from torch import Tensor, nn

from maskfx.passes.narrow.samples import narrow_samples
from tests.passes.tools import Inputs, check_values, numbers, run_pass, shared, timed, tokens


class Views(nn.Module):
    """A time embedding, with the batch written out in its views."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(6, 8)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        batch = sample.shape[0]
        wide = timestep.reshape(batch, 1).expand(batch, 6)
        scale, shift = self.time(torch.sin(wide)).view(batch, 2, 4).unbind(1)
        return sample * scale.view(batch, 4, 1, 1) + shift[:, :, None, None]


class Expands(nn.Module):
    """A parameter repeated for every request."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(1, 4))

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        start = self.start.expand(sample.shape[0], 4) * timestep[:, None]
        return sample + start[:, :, None, None]


def noisy(seed: int = 0, wide: bool = False) -> Inputs:
    return {**tokens(seed, wide), "noise_level": numbers(2, 1, 8, seed=seed + 9)}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, noise_level: Tensor) -> Tensor:
        return hidden_states + torch.tanh(self.level(noise_level))


def test_frees_views_from_the_batch() -> None:
    module = shared(Views)
    run = run_pass(narrow_samples, module, timed)
    assert run.rewrites >= 5
    assert run.after["view"] == run.after["unsqueeze"] == 0
    assert "sym_size" not in run.after
    check_values(module, timed)


def test_frees_an_expansion() -> None:
    module = shared(Expands)
    run = run_pass(narrow_samples, module, timed)
    assert run.rewrites >= 1
    check_values(module, timed)


def test_keeps_operators_without_sizes() -> None:
    module = shared(Plain)
    run = run_pass(narrow_samples, module, noisy)
    assert run.before["linear"] == run.before["tanh"] == 1
    assert run.unchanged
    check_values(module, noisy)


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_samples, shared(Views), timed).second_run_is_idle()
