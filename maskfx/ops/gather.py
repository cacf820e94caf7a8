"""Gathers rows: for a window's single matrix product, and at the cuts between row sets."""

from __future__ import annotations

import torch
from torch import Tensor

from maskfx.ops.base import define


def _gather(rows: Tensor, halo: Tensor, table: Tensor) -> Tensor:
    """Concatenate the rows that each window reads, for one matrix product."""
    source = torch.cat([rows, halo, rows.new_zeros(1, rows.shape[1])])
    picked = source.index_select(0, table.reshape(-1))
    return picked.view(table.shape[0], table.shape[1] * rows.shape[1])


def _gather_fake(rows: Tensor, halo: Tensor, table: Tensor) -> Tensor:
    return rows.new_empty(table.shape[0], table.shape[1] * rows.shape[1])


gather = define("gather(Tensor rows, Tensor halo, Tensor table) -> Tensor", _gather, _gather_fake)


def _enter(rows: Tensor, loaded: Tensor, table: Tensor) -> Tensor:
    """Select the rows of a row set, at a cut, from the previous row set's and loaded rows."""
    source = torch.cat([rows, loaded]) if loaded.shape[0] else rows
    return source.index_select(0, table)


enter = define(
    "enter(Tensor rows, Tensor loaded, Tensor table) -> Tensor",
    _enter,
    lambda rows, loaded, table: rows.new_empty(table.shape[0], *rows.shape[1:]),
)
