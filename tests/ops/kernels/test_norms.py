"""Group norm from moments of blocks, and its application with an activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from maskfx.ops.base import plain_of
from tests.ops.kernels.tools import (
    BOUNDS,
    DEVICE,
    Draw,
    by_segment,
    check,
    dtypes,
    error,
    needs_kernels,
    owners,
    total,
    widened,
)

pytestmark = needs_kernels


def statistics(draw: Draw, requests: int, groups: int) -> Tensor:
    """Count, mean and squared deviations of the rest; the last request has none."""
    found = draw.values(requests, groups, 3)
    found[..., 0], found[..., 2] = 30, 40
    found[-1] = 0
    return found


@dtypes
@pytest.mark.parametrize(("channels", "groups", "most"), [(12, 3, 20), (40, 1, 9), (6, 2, 150)])
def test_scale_and_shift(dtype: torch.dtype, channels: int, groups: int, most: int) -> None:
    from maskfx.ops.kernels.norms import group_scale

    draw = Draw(channels)
    batch = [[0, 0], [1, most], *draw.batch(1, 2, 9), [2, 3]]
    rows = draw.values(total(batch), channels, dtype=dtype) * 2 + 5
    rest = statistics(draw, len(batch), groups)
    weight, bias = draw.values(channels, dtype=dtype), draw.values(channels, dtype=dtype)
    for affine in ((weight, bias), (weight, None), (None, None))[: 1 if most > 20 else 3]:
        arguments: list[Any] = [rows, rest, by_segment(batch), groups, *affine, 1e-5]
        found = group_scale(*arguments)
        wanted = plain_of("group_scale")(*widened(arguments))
        assert found.dtype == torch.float32
        assert error(found, wanted) < 1e-5


@dtypes
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_application(dtype: torch.dtype, activation: str) -> None:
    from maskfx.ops.kernels.norms import norm_activation

    draw = Draw(3)
    batch = [[7], [0], [1], [30]]
    rows, scales = draw.values(total(batch), 37, dtype=dtype), draw.values(4, 2, 37)
    owner, plain = owners(by_segment(batch), len(rows)), plain_of("norm_activation")
    check(norm_activation, plain, rows, scales, owner, activation)
    check(norm_activation, plain, rows, scales[:1], owner * 0, activation)
    assert norm_activation(rows[:0], scales, owner[:0], activation).shape == (0, 37)


def test_a_large_mean_costs_no_digits() -> None:
    from maskfx.ops.kernels.norms import group_scale

    rows = Draw(4).values(500, 4) + 1000
    spans, rest = torch.tensor([[0, 500]]), torch.zeros(1, 2, 3, device=DEVICE)
    found = group_scale(rows, rest, spans, 2, None, None, 1e-5)
    wanted = plain_of("group_scale")(rows.double(), rest.double(), spans, 2, None, None, 1e-5)
    assert error(found, wanted) < 100 * BOUNDS[torch.float32]
