"""Picks some heads of recorded keys or values; no other columns are read.

A *unit* is a row's part of one head. Knows nothing of ranks, which divide the heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from maskfx.runtime.cache.quantize import Packed, select
from maskfx.runtime.cache.rows import (
    InterpolatedRows,
    Rows,
    RowSubset,
    RowTables,
    StoredRows,
    in_memory,
    row_bytes,
    tensors_of,
)
from maskfx.runtime.hardware.devices import moved, read_here


def pick_heads(rows: Rows, index: Tensor, heads: int, own: range, tables: RowTables) -> Tensor:
    """Return (batch, units, 1, depth): the rows of these sites, head by head, in full precision.

    Args:
        rows: (batch, sites, heads, depth), in any form.
        index: The sites.
        heads: The number of heads.
        own: The heads that are picked.
        tables: Caches index tables on devices.
    """
    rows = in_memory(rows, index)
    if isinstance(rows, InterpolatedRows):
        first, second = (
            pick_heads(one, index, heads, own, tables) for one in (rows.first, rows.second)
        )
        return rows.mixed(first, moved(second, first.device))
    if isinstance(rows, RowSubset):
        return pick_heads(rows.rows, tables.places(rows, index), heads, own, tables)
    index = tables.on(index, tensors_of(rows)[0].device)
    if isinstance(rows, Tensor):
        return each_batch(rows, index, heads, own)
    scale = rows.scale
    if not has_heads(rows, heads):
        chosen = rows.mapped(lambda held: select(read_here(held), index)).whole()
        return each_batch(chosen, torch.arange(len(index), device=index.device), heads, own)
    if scale is not None and scale.shape[2] < heads:  # several heads have a scale in common
        scale = scale_of_heads(scale, index, heads, own)
    elif scale is not None:
        scale = each_batch(scale.unflatten(2, (heads, -1)), index, heads, own).flatten(2)
    stored = each_batch(rows.stored.unflatten(2, (heads, -1)), index, heads, own).flatten(2)
    shape = (rows.shape[0] // heads, *rows.shape[1:])
    return replace(rows, stored=stored, scale=scale, shape=shape).whole()


def each_batch(rows: Tensor, index: Tensor, heads: int, own: range) -> Tensor:
    """Return (batch, units, ...) of (batch, sites, heads, ...)."""
    units = units_at(index, heads, own)
    found = [units_of(part, units, heads) for part in read_here(rows)]
    return torch.stack(found) if len(found) > 1 else found[0].unsqueeze(0)


def units_of(rows: Tensor, units: Tensor, heads: int) -> Tensor:
    """Return the units of rows, (sites, heads, ...), at these places."""
    flat = rows.reshape(len(rows) * heads, rows.shape[1] // heads, *rows.shape[2:])
    return flat.index_select(0, units)


def units_at(index: Tensor, heads: int, own: range) -> Tensor:
    """Return the places of the units of these rows among all, head by head."""
    numbers = torch.arange(own.start, own.stop, device=index.device)
    return (index.long() * heads + numbers[:, None]).flatten()


def scale_of_heads(scale: Tensor, index: Tensor, heads: int, own: range) -> Tensor:
    """Return (batch, units, 1): the scale of each unit, if heads share scales."""
    parts = scale.shape[2]
    numbers = torch.arange(own.start, own.stop, device=index.device) * parts // heads
    places = (index.long() * parts + numbers[:, None]).flatten()
    return read_here(scale).flatten(1).index_select(1, places).unsqueeze(2)


def head_bytes(rows: Rows, sites: int, heads: int, own: int) -> int:
    """Return the bytes that `pick_heads` reads of `own` heads of some sites."""
    if isinstance(rows, InterpolatedRows):
        parts = (head_bytes(one, sites, heads, own) for one in (rows.first, rows.second))
        return sum(parts)
    shown = rows.shown if isinstance(rows, StoredRows) else rows
    inner = shown.rows if isinstance(shown, RowSubset) else shown
    every = row_bytes(rows) * sites
    return (
        every if isinstance(inner, Packed) and not has_heads(inner, heads) else every * own // heads
    )


def has_heads(rows: Packed, heads: int) -> bool:
    """Return True if each head's values, and their scales, can be read alone."""
    parts = heads if rows.scale is None else rows.scale.shape[2]
    return not rows.stored.shape[2] % heads and not (parts % heads and heads % parts)
