"""Gathers of two sources and scatters of rows against their plain operators, bit for bit."""

from __future__ import annotations

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
