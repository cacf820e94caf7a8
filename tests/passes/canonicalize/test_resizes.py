"""canonicalize_resizes: a fixed grid, resized to the picture, is a product with weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.passes.canonicalize.resizes import canonicalize_resizes
from tests.passes.tools import check_values, picture, run_pass, shared


class Pyramid(nn.Module):
    """Means of the whole picture and of its parts, as large as the picture again."""

    def forward(self, sample: Tensor) -> Tensor:
        x, size = sample.tanh(), sample.shape[2:]
        for many, mode in ((1, "bilinear"), (2, "bilinear"), ((1, 3), "nearest"), (2, "bicubic")):
            parts = F.adaptive_avg_pool2d(sample.sigmoid(), many)
            x = x * (1 + F.interpolate(parts, size, mode=mode))
        return x


class Pictures(nn.Module):
    """A picture half as large, and a grid of more values than are worth a product."""

    def forward(self, sample: Tensor) -> Tensor:
        half = F.interpolate(F.avg_pool2d(sample, 2), sample.shape[2:], mode="bilinear")
        many = sample.mean((2, 3), keepdim=True) * torch.arange(100.0).view(1, 1, 10, 10)
        return half.tanh() + F.interpolate(many, sample.shape[2:], mode="bilinear")


def test_rewrites_fixed_grids_to_products() -> None:
    run = run_pass(canonicalize_resizes, shared(Pyramid), picture)
    assert run.rewrites == 4
    assert (run.gained("expand"), run.gained("matmul")) == (1, 3)
    check_values(shared(Pyramid), picture, oracle=False)  # the twin takes grids for pictures


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_resizes, shared(Pyramid), picture).second_run_is_idle()


def test_keeps_pictures_and_large_grids() -> None:
    run = run_pass(canonicalize_resizes, shared(Pictures), picture)
    assert run.unchanged
    check_values(shared(Pictures), picture, dense=1, oracle=False)
