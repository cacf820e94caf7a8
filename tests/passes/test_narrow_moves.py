"""narrow_moves: pads, slices, rolls and writes of sites read each site from where it was."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.narrow_moves import narrow_moves
from tests.passes.tools import Make, check_values, picture, run_pass, shared, tokens


class Sliced(nn.Module):
    """Every other site, and a padded copy of these."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, sample: Tensor) -> Tensor:
        some = sample[:, :, 1::2, ::2].tanh()
        wide = F.pad(some, (1, 1, 1, 1), mode="reflect")
        return sample + F.interpolate(self.conv(wide) + wide[:, :, 1:-1, 1:-1], scale_factor=2)


class Rolled(nn.Module):
    """Neighbours above and to the left, by two rolls that undo each other around a function."""

    def forward(self, sample: Tensor) -> Tensor:
        moved = torch.roll(sample, (1, 2), (2, 3))
        back = torch.roll(moved.tanh() * moved, (-1, -2), (2, 3))
        return sample + back + torch.roll(sample, 1, 3)


class Written(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        out = sample.tanh()
        out[:, :, 1::2] = sample[:, :, ::2].sin()
        return out


class Features(nn.Module):
    """Nothing here moves a site."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.pad(hidden_states[..., 2:], (1, 1)) * hidden_states


class RolledFeatures(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.roll(hidden_states, (2, 1), (-1, 2)).tanh()


@pytest.mark.parametrize("make", [Sliced, Rolled, Written])
def test_reads_sites_from_where_they_were(make: Callable[[], nn.Module]) -> None:
    module = shared(make)
    run = run_pass(narrow_moves, module, picture)
    assert run.rewrites >= 2
    assert run.gained("gather") == run.rewrites
    check_values(module, picture, oracle=False)  # the twin moves no sites


@pytest.mark.parametrize(("module", "make"), [(Features(), tokens)])
def test_keeps_what_moves_features(module: nn.Module, make: Make) -> None:
    assert run_pass(narrow_moves, module, make).unchanged


def test_rolls_features_of_each_row() -> None:
    run = run_pass(narrow_moves, RolledFeatures(), tokens)
    assert run.rewrites == run.after["roll"] == 1
    assert run.gained("gather") == 0
    check_values(RolledFeatures(), tokens, oracle=False)


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_moves, shared(Sliced), picture).second_run_is_idle()
