"""canonicalize_shuffles: pixel_shuffle and pixel_unshuffle are views and a permute."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.shuffles import canonicalize_shuffles
from tests.passes.tools import check_values, picture, run_pass, shared


class Shuffles(nn.Module):
    """Down and up again, something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(16, 16, 1)

    def forward(self, sample: Tensor) -> Tensor:
        down = self.mix(F.pixel_unshuffle(sample, 2))
        return torch.tanh(F.pixel_shuffle(down, 2))


class Frames(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        return sample + F.pixel_unshuffle(sample.unsqueeze(1), 2).mean()


def test_spells_shuffles() -> None:
    module = shared(Shuffles)
    run = run_pass(canonicalize_shuffles, module, picture)
    assert run.rewrites == 2
    assert run.before["pixel_shuffle"] == run.before["pixel_unshuffle"] == 1
    assert run.after["pixel_shuffle"] == run.after["pixel_unshuffle"] == 0
    assert run.gained("permute") == 2
    assert run.gained("reshape") == 4
    check_values(module, picture)


def test_keeps_a_shuffle_of_frames() -> None:
    run = run_pass(canonicalize_shuffles, shared(Frames), picture)
    assert run.before["pixel_unshuffle"] == 1
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_shuffles, shared(Shuffles), picture).second_run_is_idle()
