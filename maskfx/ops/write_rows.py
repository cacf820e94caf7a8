"""Operators that write rows to buffers."""

from __future__ import annotations

from collections.abc import Sequence

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


def _put_all(targets: Sequence[Tensor], indices: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Write rows to several buffers, as `put_rows` does to each."""
    for target, index, own in zip(targets, indices, rows, strict=True):
        put_rows(target, index, own)


put_all = define(
    "put_all(Tensor(a!)[] targets, Tensor[] indices, Tensor[] rows) -> ()",
    _put_all,
    lambda targets, indices, rows: None,
)


def _replace_all(
    targets: Sequence[Tensor],
    indices: Sequence[Tensor],
    rows: Sequence[Tensor],
    tables: Sequence[Tensor],
    sizes: Sequence[Tensor],
    firsts: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> None:
    """Write rows to several buffers, and add how far they differ from those before.

    Args:
        targets: The buffers.
        indices: The places of the rows in each.
        rows: The new rows of each, of one request after another.
        tables: The patch of each place, counted within its request.
        sizes: The number of rows of each request.
        firsts: The first patch of each request in its sums; -1 for one whose changes don't matter.
        sums: Two numbers of each patch, (patches, 2): each row adds the mean absolute difference
            and the mean absolute value before.
    """
    each = zip(targets, indices, rows, tables, sizes, firsts, sums, strict=True)
    for target, index, new, *about in each:
        add_changes(target.index_select(0, index), new, index, *about)
        put_rows(target, index, new)


replace_all = define(
    "replace_all(Tensor(a!)[] targets, Tensor[] indices, Tensor[] rows, Tensor[] tables,"
    " Tensor[] sizes, Tensor[] firsts, Tensor(b!)[] sums) -> ()",
    _replace_all,
    lambda targets, indices, rows, tables, sizes, firsts, sums: None,
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
    """Add how far rows differ from those before, as `replace_all` does for each buffer."""
    old, new = (v.reshape(len(v), -1).to(wide(v.dtype)) for v in (before, rows))
    both = torch.stack([(new - old).abs_().mean(1), old.abs().mean(1)], 1).to(sums.dtype)
    first = torch.repeat_interleave(firsts, sizes, output_size=len(index)).to(sums.device)
    patches = table.index_select(0, index).add_(first)
    unread = first < 0
    sums.index_add_(0, patches.masked_fill_(unread, 0), both.masked_fill_(unread[:, None], 0))
