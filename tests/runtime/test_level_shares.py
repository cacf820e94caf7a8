"""Shares of FLOPs by level: what a mask computes is the share of the FLOPs of its rows."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import maskfx
from maskfx.ir.geometry.level_shares import LevelShare, work_of
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.flops import capture_sizes, row_flops
from maskfx.runtime.level_shares import level_shares, own_levels
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from tests.factories.zoo import ZOO, Size

SIDE = 16


class TwoLevels(nn.Module):
    """A convolution, three at half the size, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Conv2d(4, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 32, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.end = nn.Conv2d(40, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        fine = self.begin(sample) * timestep.view(-1, 1, 1, 1)
        coarse = self.middle(functional.silu(self.down(fine)))
        found: Tensor = self.end(
            torch.cat([fine, functional.interpolate(coarse, scale_factor=2.0)], 1)
        )
        return found


@cache
def two_levels() -> Program:
    inputs = {"sample": torch.randn(1, 4, SIDE, SIDE), "timestep": torch.ones(1)}
    denoiser = maskfx.compile(TwoLevels().eval(), example_inputs=inputs)
    return next(iter(denoiser.programs.values()))


def program_of(name: str) -> Program:
    case = ZOO[name]
    denoiser = maskfx.compile(case.build(), example_inputs=case.inputs(Size(), 0))
    return next(iter(denoiser.programs.values()))


def scattered(count: int) -> torch.Tensor:
    mask = torch.zeros(SIDE * SIDE, dtype=torch.bool)
    mask[torch.randperm(SIDE * SIDE, generator=torch.Generator().manual_seed(count))[:count]] = True
    return mask.view(SIDE, SIDE)


def square(side: int) -> torch.Tensor:
    mask = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    mask[3 : 3 + side, 5 : 5 + side] = True
    return mask


def test_the_work_of_a_mask_is_its_share_of_the_flops() -> None:
    program = two_levels()
    shares = level_shares(program, SIDE, SIDE)
    sizes = {**capture_sizes(program.interface.pyramid), "y": SIDE, "x": SIDE}
    assert len(shares) > 1

    def flops(mask: torch.Tensor) -> float:
        """Of the picture's rows."""
        sites = ActiveSites(program.interface.pyramid, sizes, Mask(mask))
        counted = row_flops(program, sites, 1)
        return sum(n for rows, n in counted.items() if any(r.startswith("grid") for r in rows))

    every = work_of(shares, np.ones((SIDE, SIDE), np.bool_))
    assert every.sites == pytest.approx(SIDE**2)
    whole = flops(torch.ones(SIDE, SIDE, dtype=torch.bool))
    for mask in (square(4), scattered(16), scattered(40)):
        found = work_of(shares, mask.numpy())
        assert found.sites / every.sites == pytest.approx(flops(mask) / whole, rel=1e-6)
    assert (
        work_of(shares, scattered(16).numpy()).sites
        > 1.5 * work_of(shares, square(4).numpy()).sites
    ), "as many sites of the picture, and more of the coarser levels"


def test_levels_have_the_active_sites_of_the_runtime() -> None:
    program = two_levels()
    pyramid, (numbers, shares) = program.interface.pyramid, own_levels(program.interface.pyramid)
    sizes = {**capture_sizes(pyramid), "y": 11, "x": 13}
    mask = torch.zeros(11, 13, dtype=torch.bool)
    mask[10, 12] = mask[4, 3] = True
    sites = ActiveSites(pyramid, sizes, Mask(mask))
    for place, number in enumerate(numbers):
        only = [
            LevelShare(**{**vars(share), "per_site": float(n == place)})
            for n, share in enumerate(shares)
        ]
        assert work_of(only, mask.numpy()).sites == sites.active_count(f"grid{number}")


def test_tokens_without_rows_and_columns_have_one_level() -> None:
    assert level_shares(program_of("FluxTransformer2DModel"), SIDE, SIDE) == ()


def test_patches_of_a_picture_have_nearly_all_flops_at_the_level_of_tokens() -> None:
    shares = level_shares(program_of("SD3Transformer2DModel"), SIDE, SIDE)
    corner = np.zeros((SIDE, SIDE), np.bool_)
    corner[0, 0] = True  # its patch is computed
    assert work_of(shares, corner).sites == pytest.approx(4, rel=0.1)
    assert work_of(shares, np.ones((SIDE, SIDE), np.bool_)).pairs == pytest.approx(SIDE**4)
