"""Low-rank terms by groups of rows against the plain operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maskfx.ops.base import plain_of
from tests.ops.kernels.tools import Draw, check, dtypes, needs_kernels

pytestmark = needs_kernels
PLAIN = plain_of("add_low_rank")


def kernel(base: Tensor, rows: Tensor, down: Tensor, up: Tensor, groups: Tensor) -> Tensor:
    from maskfx.ops.kernels.low_rank import add_low_rank

    return add_low_rank(base, rows, down, up, groups.tolist())


@dtypes
@pytest.mark.parametrize("seed", range(3))
def test_random_groups(dtype: torch.dtype, seed: int) -> None:
    draw = Draw(seed)
    groups, at, rank = [], draw.size(0, 3), 0
    for _ in range(draw.size(1, 4)):
        count, ranks = draw.size(0, 80), draw.size(1, 20)
        groups.append([at, at + count, rank, rank + ranks])
        at, rank = at + count + draw.random.choice((0, 5)), rank + ranks
    count, inputs, outputs = at + draw.size(0, 4), draw.size(1, 70), draw.size(1, 90)
    base, rows = draw.values(count, outputs, dtype=dtype), draw.values(count, inputs, dtype=dtype)
    down = draw.values(rank, inputs, dtype=dtype) / inputs**0.5
    up = draw.values(rank, outputs, dtype=dtype) / 4
    check(kernel, PLAIN, base, rows, down, up, torch.tensor(groups))


def test_rows_without_ranks_stay_bit_for_bit() -> None:
    draw = Draw(5)
    base, rows = draw.values(9, 6), draw.values(9, 8)
    down, up = draw.values(4, 8), draw.values(4, 6)
    found = check(kernel, PLAIN, base, rows, down, up, torch.tensor([[3, 5, 0, 4], [7, 7, 0, 4]]))
    assert torch.equal(found[:3], base[:3])
    assert torch.equal(found[5:], base[5:])
    none = torch.empty(0, 4, dtype=torch.long)
    assert torch.equal(kernel(base, rows, down[:0], up[:0], none), base)
    assert kernel(base[:0], rows[:0], down, up, none).shape == (0, 6)
