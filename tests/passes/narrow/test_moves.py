"""narrow_moves: pads, slices, rolls and writes of sites read each site from where it was."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.passes.narrow.moves import narrow_moves
from tests.passes.tools import (
    TOLERANCE,
    Make,
    check_values,
    denoiser_of,
    error,
    picture,
    run_pass,
    shared,
    tokens,
)


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


class Padded(nn.Module):
    """Sites move down by eight, and back."""

    def forward(self, sample: Tensor) -> Tensor:
        return F.pad(sample.tanh(), (0, 0, 8, 0)).sin()[:, :, 8:]


class Halved(nn.Module):
    """The lower half is computed apart, and put back in its place."""

    def forward(self, sample: Tensor) -> Tensor:
        return sample + F.pad(sample[:, :, 8:].tanh(), (0, 0, 8, 0))


class Shrunk(nn.Module):
    """Convolutions without padding, after one padding for all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(4)))

    def forward(self, sample: Tensor) -> Tensor:
        return self.convs(F.pad(sample, (4, 4, 4, 4), mode="reflect"))


class RolledJoined(nn.Module):
    """Sites move down by eight, meet those that stayed, and move back in two steps."""

    def forward(self, sample: Tensor) -> Tensor:
        moved = torch.roll(sample, 8, 2).tanh() + sample
        return torch.roll(torch.roll(moved, -5, 2), -3, 2)


class Filled(nn.Module):
    """The picture is padded to a multiple of nine, and moves by three there."""

    def forward(self, sample: Tensor) -> Tensor:
        h, w = sample.shape[2:]
        wide = F.pad(sample, (0, -w % 9, 0, -h % 9), value=0.5)
        return (wide.roll((6, 3), (2, 3)).tanh() * 2).roll((-6, -3), (2, 3))[:, :, :h, :w]


class Same(nn.Module):
    """What `Shrunk` computes, with a padding for each convolution."""

    def __init__(self) -> None:
        super().__init__()
        shrunk = Shrunk()
        self.convs = nn.Sequential(
            *(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect") for _ in range(4))
        )
        self.convs.load_state_dict(shrunk.convs.state_dict())

    def forward(self, sample: Tensor) -> Tensor:
        return self.convs(sample)


def change_of(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Edit with other inputs in a small mask; return the result there, and the module's own."""
    torch.manual_seed(1)
    first = torch.randn(1, 4, 24, 24)
    mask = torch.zeros(24, 24, dtype=torch.bool)
    mask[13:22, 4:13] = True
    then = torch.where(mask, first + 1, first)
    denoiser = denoiser_of(module, lambda *_: {"sample": first})
    kept = denoiser.record(sample=first)[1]
    step = maskfx.EditStep({"sample": then}, mask, kept, any_step=True)
    inside = (..., slice(17, 18), slice(8, 9))
    return denoiser.edit([step])[0][inside], module(then)[inside].detach()


@pytest.mark.parametrize("make", [Padded, Halved, Sliced, RolledJoined, Filled])
def test_masks_move_with_sites(make: Callable[[], nn.Module]) -> None:
    assert error(*change_of(shared(make))) < TOLERANCE
    assert denoiser_of(shared(make), picture).compilations[0].reasons == {}


def test_results_that_lie_elsewhere_run_dense() -> None:
    class Away(nn.Module):
        def forward(self, sample: Tensor) -> Tensor:
            return torch.roll(sample.tanh(), 5, 2)

    denoiser = denoiser_of(Away(), picture)
    assert denoiser.compilations[0].program is None
    assert "elsewhere" in denoiser.explain()


def test_masks_follow_windows_that_are_off_centre() -> None:
    (found, wanted), (usual, _) = change_of(Shrunk()), change_of(Same())
    assert (found - wanted).abs().max() <= (usual - wanted).abs().max() + TOLERANCE


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


class Flips(nn.Module):
    """Features in the opposite order, and an axis of size one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        apart = hidden_states.unflatten(-1, (2, -1)).flip((2, -1))
        return apart.flatten(2) + hidden_states.tanh()[..., :1].flip(-1)


def test_flips_features_of_each_row() -> None:
    run = run_pass(narrow_moves, Flips(), tokens)
    assert run.rewrites == run.before["flip"] == 2
    assert run.after["flip"] == 1
    check_values(Flips(), tokens)


def test_rolls_features_of_each_row() -> None:
    run = run_pass(narrow_moves, RolledFeatures(), tokens)
    assert run.rewrites == run.after["roll"] == 1
    assert run.gained("gather") == 0
    check_values(RolledFeatures(), tokens, oracle=False)


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_moves, shared(Sliced), picture).second_run_is_idle()
