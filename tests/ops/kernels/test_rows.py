"""Gathers of two sources and scatters of rows against their plain operators, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maskfx.ops.base import plain_of
from tests.ops.kernels.tools import Draw, dtypes, needs_kernels

pytestmark = needs_kernels


@dtypes
def test_rows_of_two_sources(dtype: torch.dtype) -> None:
    from maskfx.ops.kernels.rows import pick_rows

    draw = Draw(1)
    rows, halo = draw.values(13, 21, dtype=dtype), draw.values(6, 21, dtype=dtype)
    table = draw.index(9 * 8, 20).view(8, 9)
    found = pick_rows(rows, halo, table).view(8, -1)
    assert torch.equal(found, plain_of("gather")(rows, halo, table))
    for first, second in ((rows, halo), (rows, halo[:0]), (rows[:0], halo)):
        own = draw.index(30, len(first) + len(second))
        found = pick_rows(first, second, own)
        assert torch.equal(found, plain_of("enter")(first, second, own))
    heads = rows.view(13, 3, 7)
    assert torch.equal(pick_rows(heads, heads[:0], table[0] % 13), heads[table[0] % 13])
    assert pick_rows(rows, halo, table[:0]).shape == (0, 21)


@dtypes
def test_rows_are_written_where_they_belong(dtype: torch.dtype) -> None:
    from maskfx.ops.kernels.rows import put_rows

    draw = Draw(2)
    # the interpreter rounds to bfloat16 towards zero, so that rows are ones that it can hold
    rows, index = draw.values(11, 3, 9, dtype=dtype).float(), draw.distinct(11, 40)
    target = draw.values(40, 3, 9, dtype=dtype)
    wanted = target.clone()
    plain_of("put_rows")(wanted, index, rows)
    put_rows(target, index, rows)
    assert torch.equal(target, wanted)
    put_rows(target, index[:0], rows[:0])
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_many_tensors_are_copied_in_one_launch(seed: int) -> None:
    from maskfx.ops.kernels.rows import RowCopies, can_copy

    draw = Draw(seed)
    sources, indices, targets = [], [], []
    for _ in range(draw.size(2, 5)):
        rows, width = draw.size(3, 40), 8 * draw.size(1, 90)
        sources.append(draw.values(rows, width, dtype=torch.float16))
        indices.append(draw.index(draw.size(1, 30), rows))
        targets.append(draw.values(len(indices[-1]), width, dtype=torch.float16))
    assert all(can_copy(s[None], t) for s, t in zip(sources, targets, strict=True))
    copies = RowCopies(targets, indices)
    for _ in range(2):
        for target in targets:
            target.fill_(float("nan"))
        copies.run(np.array([source.data_ptr() for source in sources]))
        for source, index, target in zip(sources, indices, targets, strict=True):
            assert torch.equal(target, source[index])
        sources = [source.flip(0) for source in sources]


def test_rows_that_are_not_copied_by_address() -> None:
    from maskfx.ops.kernels.rows import can_copy

    draw = Draw(0)
    wide = draw.values(1, 6, 16)
    assert not can_copy(wide, draw.values(2, 3))
    assert not can_copy(wide[..., :3], draw.values(2, 3))
    assert not can_copy(wide.half(), draw.values(2, 16))
