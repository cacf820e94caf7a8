"""canonicalize_sizes: sizes that a value is computed with are values of each request."""

import torch
from torch import Tensor, nn

from maskfx.passes.canonicalize.sizes import canonicalize_sizes
from tests.passes.tools import check_values, picture, run_pass, shared


class Summed(nn.Module):
    """A mean by a sum and a division, and a factor from a side of the picture."""

    def forward(self, sample: Tensor) -> Tensor:
        h, w = sample.shape[-2:]
        x = sample.tanh()
        return (x - x.sum((2, 3), keepdim=True) / (h * w)) * h**0.5 + w


class Fixed(nn.Module):
    """Numbers that aren't sizes of the picture, and whole numbers made of sizes."""

    def forward(self, sample: Tensor) -> Tensor:
        place = torch.arange(sample.shape[-1]) + sample.shape[-1]
        return sample / sample.shape[1] ** 0.5 + place.float().sin()


def test_rewrites_arithmetic_with_sizes() -> None:
    run = run_pass(canonicalize_sizes, shared(Summed), picture)
    assert run.rewrites == run.gained("full") == 3
    check_values(shared(Summed), picture, oracle=False)  # the twin has no sums over sites


def test_keeps_other_numbers() -> None:
    assert run_pass(canonicalize_sizes, Fixed(), picture).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_sizes, shared(Summed), picture).second_run_is_idle()
