"""canonicalize_rolls: joins of a picture's own parts in a circle are rolls."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.rolls import canonicalize_rolls
from tests.passes.tools import check_values, nodes_of, picture, run_pass, shared


class Halves(nn.Module):
    """Both halves of the height exchanged, as slices, and back; of the width, as chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        half = sample.shape[2] // 2
        y = self.conv(torch.cat([sample[:, :, half:], sample[:, :, :half]], 2))
        y = torch.cat([y[:, :, -half:], y[:, :, :-half]], 2) + sample
        left, right = y.chunk(2, 3)
        left, right = self.conv(torch.cat([right, left], 3)).chunk(2, 3)
        return torch.cat([right, left], 3) + sample


class Steps(nn.Module):
    """A fixed number of rows and columns, the rest in two parts."""

    def forward(self, sample: Tensor) -> Tensor:
        y = torch.cat([sample[:, :, 2:-1], sample[:, :, -1:], sample[:, :, :2]], 2)
        y = F.silu(torch.cat([y[..., -3:], y[..., :-3]], 3))
        y = torch.cat([y[..., 3:], y[..., :3]], 3)
        return sample + torch.cat([y[:, :, -2:], y[:, :, :-2]], 2)


class Others(nn.Module):
    """Parts in place, a part twice, a part left out, parts of two values, features."""

    def forward(self, sample: Tensor) -> Tensor:
        half, other = sample.shape[2] // 2, torch.sin(sample)
        a = torch.cat([sample[:, :, :half], sample[:, :, half:]], 2)
        b = torch.cat([sample[:, :, half:], sample[:, :, :-half]], 2)
        c = torch.cat([sample[:, :, half + 1 :], sample[:, :, :half], sample[:, :, :1]], 2)
        d = torch.cat([sample[:, :, half:], other[:, :, :half]], 2)
        e = torch.cat([sample[:, :, half:], sample[:, :, :half], sample[:, :, half:]], 2)
        return a + b + c + d + e[:, :, : sample.shape[2]]


@pytest.mark.parametrize("make", [Halves, Steps])
def test_rewrites_joins_in_a_circle(make: Callable[[], nn.Module]) -> None:
    run = run_pass(canonicalize_rolls, shared(make), picture)
    assert run.rewrites == run.gained("roll") == -run.gained("cat") == 4
    assert run.after["cat"] == run.after["slice"] == run.after["chunk"] == 0
    check_values(shared(make), picture, oracle=False)  # the twin knows no rolls


def test_moves_by_what_follows_the_end() -> None:
    run = run_pass(canonicalize_rolls, shared(Steps), picture)
    assert [node.args[1] for node in nodes_of(run.graph, "roll")] == [[-2], [3], [-3], [2]]


def test_keeps_other_joins() -> None:
    assert run_pass(canonicalize_rolls, shared(Others), picture).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_rolls, shared(Halves), picture).second_run_is_idle()
