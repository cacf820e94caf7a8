"""canonicalize_convolutions: a convolution of one window is a linear layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.convolutions import canonicalize_convolutions
from tests.passes.tools import (
    Inputs,
    check_values,
    numbers,
    picture,
    run_pass,
    shared,
    timed,
    tokens,
)


def patches(seed: int = 0, wide: bool = False) -> Inputs:
    """Packed tokens, each of which is a patch of two by two sites with four channels."""
    return {"hidden_states": numbers(2, 26 if wide else 20, 4, 1, 2, 2, seed=seed)}


class Patched(nn.Module):
    """A convolution of each patch, and one without a bias of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(4, 8, (1, 2, 2), stride=(1, 2, 2))
        self.second = nn.Conv1d(4, 16, 2, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = self.first(hidden_states.flatten(0, 1)).view(-1, 4, 2).tanh()
        out: Tensor = self.second(rows).unflatten(0, hidden_states.shape[:2]).flatten(2)
        return out


class Other(nn.Module):
    """Windows of one place, with padding, smaller than the input, and in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.padded = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 3, padding=1)
        self.smaller, self.grouped = nn.Conv1d(4, 8, 2), nn.Conv1d(4, 8, 2, groups=2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, 1)
        out = self.place(rows[..., None]) + self.smaller(rows[:, :6].view(-1, 2, 3).repeat(1, 2, 1))
        out = out.mean(2, True) + self.grouped(rows.view(-1, 4, 2))
        out = self.padded(out.expand(-1, -1, 3)).sum(2) + hidden_states.flatten(0, 1)
        return out.unflatten(0, hidden_states.shape[:2])


class Causal(nn.Module):
    """Causal convolutions of the sites in a row: padded at both ends, cut at the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(4, 4, 4, padding=3, groups=4)
        self.apart = nn.Conv1d(4, 4, 3, padding=4, dilation=2)
        self.kept = nn.Conv1d(4, 4, 3, padding=2)

    def forward(self, sample: Tensor) -> Tensor:
        rows = sample.flatten(2)
        rows = self.wide(rows)[..., : rows.shape[-1]].tanh() + rows
        return (self.apart(rows)[..., :-4] + rows).view_as(sample)


class Uncut(Causal):
    """Places at the beginning, or fewer than too many, are cut off."""

    def forward(self, sample: Tensor) -> Tensor:
        rows = sample.flatten(2)
        return (self.kept(rows)[..., 2:] + self.kept(rows)[..., 1:-1] + rows).view_as(sample)


class OneFrame(nn.Module):
    """A picture as a video of one frame, in windows of several frames."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Conv3d(4, 8, 3, padding=1)
        self.frames = nn.Conv3d(8, 8, (3, 1, 1), padding=(2, 0, 0), dilation=(2, 1, 1))
        self.last = nn.Conv3d(8, 4, 3, padding=1, groups=2)
        self.late = nn.Conv3d(8, 8, (2, 1, 1), padding=(2, 0, 0), stride=(9, 1, 1))

    def forward(self, sample: Tensor) -> Tensor:
        x = self.frames(self.all(sample[:, :, None]).tanh())
        return sample + self.last(x)[:, :, 0]


class MoreFrames(OneFrame):
    """Windows that read several frames, and one of padding alone."""

    def forward(self, sample: Tensor) -> Tensor:
        x = self.all(sample[:, :, None].expand(-1, -1, 3, -1, -1))
        return sample + self.last(x + self.late(x[:, :, :1]))[:, :, 0]


class Styled(nn.Module):
    """The samples are groups of one input, with weights that the timestep scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(6, 4, 3, 3, seed=3))
        self.down = nn.Parameter(numbers(4, 3, 2, 2, seed=4))

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        b, c, h, w = sample.shape
        weight = self.weight * timestep.view(-1, 1, 1, 1, 1).sin()
        weight = weight * weight.square().sum((2, 3, 4), keepdim=True).add(1).rsqrt()
        x = F.conv2d(sample.tanh().view(1, -1, h, w), weight.flatten(0, 1), padding=1, groups=b)
        bias = timestep.cos()[:, None].expand(b, 4).flatten()
        down = self.down * timestep.view(-1, 1, 1, 1, 1).cos()
        x = F.conv2d(x, down.flatten(0, 1), bias, stride=2, groups=2 * b).view(b, c, h // 2, -1)
        return sample * F.interpolate(x, (h, w))


def test_spells_groups_of_samples_as_products() -> None:
    run = run_pass(canonicalize_convolutions, shared(Styled), timed)
    assert (run.rewrites, run.gained("matmul"), run.after["conv2d"]) == (2, 2, 0)
    assert run.second_run_is_idle()
    check_values(shared(Styled), timed, oracle=False)


def test_spells_windows_as_large_as_the_input_as_linear_layers() -> None:
    run = run_pass(canonicalize_convolutions, shared(Patched), patches)
    assert run.rewrites == 2
    assert run.gained("linear") == 2
    assert not run.after["conv3d"] + run.after["conv1d"]
    check_values(shared(Patched), patches, oracle=False)  # the twin has no such convolution


def test_causal_windows_read_nothing_behind_a_site() -> None:
    run = run_pass(canonicalize_convolutions, shared(Causal), picture)
    assert run.rewrites == run.gained("pad") == 2
    assert run.second_run_is_idle()
    check_values(shared(Causal), picture, oracle=False)
    assert run_pass(canonicalize_convolutions, shared(Uncut), picture).unchanged


def test_windows_of_several_frames_read_the_only_one() -> None:
    run = run_pass(canonicalize_convolutions, shared(OneFrame), picture)
    assert run.rewrites == 3
    assert run.second_run_is_idle()
    check_values(shared(OneFrame), picture)
    assert run_pass(canonicalize_convolutions, shared(MoreFrames), picture).unchanged


def test_keeps_other_windows() -> None:
    assert run_pass(canonicalize_convolutions, shared(Other), tokens).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_convolutions, shared(Patched), patches).second_run_is_idle()
