"""canonicalize_permutes: moved and swapped axes are permutes."""

import torch
from torch import Tensor, nn

from maskfx.passes.canonicalize.permutes import canonicalize_permutes
from tests.passes.tools import check_values, picture, run_pass, shared


class Moved(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        x = torch.movedim(sample.tanh(), (1, 2), (-1, 1)).softmax(-1)
        y = x.swapdims(1, 2).mT.mT.swapdims(1, 2)
        return y.moveaxis(-1, 1) + sample


class Permuted(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        return sample.permute(0, 2, 3, 1).softmax(-1).transpose(1, 3).transpose(2, 3)


def test_rewrites_moves_and_swaps() -> None:
    run = run_pass(canonicalize_permutes, shared(Moved), picture)
    assert run.rewrites == run.gained("permute") == 6
    check_values(shared(Moved), picture)


def test_keeps_permutes() -> None:
    assert run_pass(canonicalize_permutes, Permuted(), picture).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_permutes, shared(Moved), picture).second_run_is_idle()
