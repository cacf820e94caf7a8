"""narrow_resampling: finer rows repeat the coarser row they lie in."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.ir.programs.sources import Parents, Weights
from maskfx.passes.narrow.resampling import narrow_resampling
from tests.passes.tools import check_values, picture, run_pass, shared


class Up(nn.Module):
    """Down by a convolution, up by repetition."""

    def __init__(self, mode: str = "nearest", factor: float = 2.0) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.mode, self.factor = mode, factor

    def forward(self, sample: Tensor) -> Tensor:
        up = F.interpolate(torch.tanh(self.down(sample)), scale_factor=self.factor, mode=self.mode)
        return torch.tanh(up)


def odd(seed: int = 0, wide: bool = False) -> dict[str, Tensor]:
    value = picture(seed, wide)["sample"]
    return {"sample": value[:, :, :7, : 13 if wide else 9].contiguous()}


class ToSize(Up):
    """Up to the size that there was, which no factor gives."""

    def forward(self, sample: Tensor) -> Tensor:
        low = torch.tanh(self.down(sample))
        return sample + F.interpolate(low, size=sample.shape[2:], mode=self.mode)


def test_repeats_rows() -> None:
    run = run_pass(narrow_resampling, Up("nearest"), picture)
    assert run.rewrites == run.before["upsample_nearest2d"] == run.gained("index_select") == 1
    assert run.after["upsample_nearest2d"] == 0
    assert sum(isinstance(s, Parents) for s in run.ctx.interface.inputs.values()) == 1
    check_values(shared(Up), picture)


def test_reads_parents_that_may_be_inactive() -> None:
    run = run_pass(narrow_resampling, Up("nearest-exact"), picture)
    assert run.rewrites == run.before["_upsample_nearest_exact2d"] == run.gained("gather") == 1
    assert run.after["_upsample_nearest_exact2d"] == 0
    assert not any(isinstance(s, Parents) for s in run.ctx.interface.inputs.values())
    check_values(Up("nearest-exact"), picture)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_repeats_rows_to_an_odd_size(mode: str) -> None:
    module = ToSize(mode)
    assert run_pass(narrow_resampling, module, odd).rewrites == 1
    check_values(module, odd)


class FromPool(nn.Module):
    """The last of an odd number of sites has no coarser one of its own."""

    def forward(self, sample: Tensor) -> Tensor:
        low = torch.tanh(F.avg_pool2d(sample, 2))
        return sample + F.interpolate(low, size=sample.shape[2:])


def test_repeats_rows_of_pools_that_drop_the_last() -> None:
    module = FromPool()
    assert run_pass(narrow_resampling, module, odd).rewrites == 1
    check_values(module, odd, oracle=False)  # the twin rounds sizes up


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "area"])
def test_mixes_rows_by_weights(mode: str) -> None:
    module = ToSize(mode)
    run = run_pass(narrow_resampling, module, odd)
    assert run.rewrites == run.gained("gather") == 1
    assert sum(isinstance(s, Weights) for s in run.ctx.interface.inputs.values()) == 1
    check_values(module, odd, oracle=False)  # the twin repeats sites only


class OfSamples(nn.Module):
    def forward(self, sample: Tensor) -> Tensor:
        mean = sample.tanh().mean((2, 3), keepdim=True)
        return sample * F.interpolate(mean, scale_factor=2.0).mean((2, 3), keepdim=True)


def test_keeps_resampling_without_sites() -> None:
    assert run_pass(narrow_resampling, OfSamples(), picture).unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(narrow_resampling, shared(Up), picture).second_run_is_idle()
