"""Operators that write rows to buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from maskfx.ops.base import define, wide


def _put_rows(target: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write rows to these places of `target`, in its dtype; the places are distinct."""
    target.index_copy_(0, index, rows.to(target.dtype))


put_rows = define(
    "put_rows(Tensor(a!) target, Tensor index, Tensor rows) -> ()",
    _put_rows,
    lambda target, index, rows: None,
)


def _replace_rows(
    target: Tensor,
    index: Tensor,
    rows: Tensor,
    table: Tensor,
    sizes: Tensor,
    firsts: Tensor,
    sums: Tensor,
) -> None:
    """Write rows as `put_rows` does, and add how far they differ from those before.

    Args:
        target: The buffer.
        index: The places of the rows.
        rows: The new rows, of one request after another.
        table: The patch of each place, counted within its request.
        sizes: The number of rows of each request.
        firsts: The first patch of each request in `sums`; -1 for one whose changes don't matter.
        sums: Two numbers of each patch, (patches, 2): each row adds the mean absolute difference
            and the mean absolute value before.
    """
    add_changes(target.index_select(0, index), rows, index, table, sizes, firsts, sums)
    _put_rows(target, index, rows)


replace_rows = define(
    "replace_rows(Tensor(a!) target, Tensor index, Tensor rows, Tensor table, Tensor sizes,"
    " Tensor firsts, Tensor(b!) sums) -> ()",
    _replace_rows,
    lambda target, index, rows, table, sizes, firsts, sums: None,
)


def add_changes(
    before: Tensor,
    rows: Tensor,
    index: Tensor,
    table: Tensor,
    sizes: Tensor,
    firsts: Tensor,
    sums: Tensor,
) -> None:
    """Add how far rows differ from those before, as `replace_rows` does."""
    old, new = (v.reshape(len(v), -1).to(wide(v.dtype)) for v in (before, rows))
    both = torch.stack([(new - old).abs_().mean(1), old.abs().mean(1)], 1).to(sums.dtype)
    first = torch.repeat_interleave(firsts, sizes, output_size=len(index)).to(sums.device)
    patches = table.index_select(0, index).add_(first)
    unread = first < 0
    sums.index_add_(0, patches.masked_fill_(unread, 0), both.masked_fill_(unread[:, None], 0))
