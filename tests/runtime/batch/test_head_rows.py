"""Some heads of recorded keys: the same numbers as of all heads, from each form of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maskfx.runtime.batch.head_rows import head_bytes, pick_heads
from maskfx.runtime.cache.quantize import Format, Packed, pack
from maskfx.runtime.cache.rows import InterpolatedRows, Rows, RowSubset, RowTables, pick, row_bytes

INDEX = torch.tensor([1, 4, 5, 9])


def check(rows: Rows, heads: int, own: range) -> None:
    """Compare with picking the rows and then the heads."""
    every = pick(rows, INDEX)[:, :, own.start : own.stop]
    got = pick_heads(rows, INDEX, heads, own, RowTables())
    assert torch.equal(got, every.transpose(1, 2).flatten(1, 2).unsqueeze(2))


def keys(heads: int, depth: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 12, heads, depth, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("own", [range(2), range(1, 4), range(3, 3)])
@pytest.mark.parametrize("depth", [8, 32, 64, 256])
@pytest.mark.parametrize("form", Format)
def test_heads_of_rows_in_each_format(form: Format, depth: int, own: range) -> None:
    """One scale for several heads, one for each, and several for each."""
    rows = pack(keys(4, depth), form)
    check(rows, 4, own)
    assert head_bytes(rows, len(INDEX), 4, len(own)) == row_bytes(rows) * 4 * len(own) // 4


def test_heads_whose_values_share_scales_unevenly_are_read_with_the_others() -> None:
    rows = pack(keys(3, 64), Format.INT8)
    assert isinstance(rows, Packed)
    assert rows.scale is not None
    assert rows.scale.shape[2] == 2  # for three heads
    check(rows, 3, range(1, 3))
    assert head_bytes(rows, 4, 3, 2) == row_bytes(rows) * 4


def test_heads_of_some_sites_and_between_two_steps() -> None:
    sites = torch.tensor([1, 2, 4, 5, 9], dtype=torch.int32)
    some = RowSubset(keys(4, 8)[:, : len(sites)], sites)
    both = InterpolatedRows(some, keys(4, 8, 1), 0.25)
    for rows in (some, both):
        check(rows, 4, range(1, 3))
    assert head_bytes(both, 4, 4, 2) == row_bytes(both) * 2
