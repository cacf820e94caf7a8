"""Attention masks of a ragged batch, from the members' masks over whole pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from maskfx.ir.geometry.lanes import is_image
from maskfx.ir.programs.sources import LinePairs, Owner, Pairs, PairTable, RestOwner
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.lines import places
from maskfx.runtime.batch.member import Member
from maskfx.runtime.hardware.devices import moved


def pair_masks(
    source: Pairs | PairTable,
    members: Sequence[Member],
    layout: Layout,
    place: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Return the (heads, queries, keys) mask of each owner.

    Args:
        source: The input of the graph.
        members: The members, which have the masks of whole pictures.
        layout: The rows of the batch.
        place: Gives a table on the batch's device.
    """
    value, out = source.value, []
    orders = layout.order(source.keys, True), layout.order(source.queries, False)
    for member, *order in zip(members, *orders, strict=True):
        full = member.given[value.origin][value.index]
        columns, rows = (place(table) for table in order)
        full = full.reshape(-1, source.heads, *torch.atleast_2d(full).shape[-2:])
        for b in range(member.batch):
            own = full[min(b, full.shape[0] - 1)]
            if source.queries:
                out.append(picked(own, rows, columns))
            else:
                out.append(picked(own, rows.new_zeros(own.shape[1]), columns))
    return out


def line_masks(
    source: LinePairs,
    members: Sequence[Member],
    layout: Layout,
    place: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the (heads, queries, keys) masks of all lines of each owner, one after another."""
    value, out = source.value, []
    for member, sites in zip(members, layout.sites, strict=True):
        full = member.given[value.origin][value.index]
        full = full.reshape(-1, source.heads, *full.shape[-2:])
        each = zip(
            *(places(s, sites) for s in (source.queries, source.keys, source.rest)), strict=True
        )
        tables = [
            (place(torch.from_numpy(rows)), place(torch.from_numpy(np.concatenate(keys))))
            for rows, *keys in each
        ]
        for b in range(member.batch):
            own = full[min(b, full.shape[0] - 1)]
            out += [picked(own, rows, keys).reshape(-1) for rows, keys in tables]
    return torch.cat(out)


def picked(mask: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return the entries of a (heads, queries, keys) mask for these places."""
    wide = mask.shape[1] > 1
    mask = mask.index_select(1, rows) if wide else mask.expand(-1, len(rows), -1)
    wide = mask.shape[2] > 1
    return mask.index_select(2, keys) if wide else mask.expand(-1, -1, len(keys))


def pair_table(
    source: PairTable,
    members: Sequence[Member],
    layout: Layout,
    place: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the masks of all owners in one table, as numbers, between zeros."""
    masks = [added(own, source.dtype) for own in pair_masks(source, members, layout, place)]
    images = tuple(filter(is_image, source.keys))
    keys = torch.cat([layout.table(Owner(source.keys)), layout.table(RestOwner(images))])
    queries = layout.table(Owner(source.queries)) if source.queries else None
    rows = 1 if queries is None else len(queries)
    out = masks[0].new_zeros(source.heads, rows, len(keys))
    for owner, own in enumerate(masks):
        columns = moved((keys == owner).nonzero()[:, 0], out.device)
        if queries is None:
            out[:, :, columns] = own
        else:
            at = moved((queries == owner).nonzero()[:, 0], out.device)
            out[:, at[:, None], columns] = own
    return out


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what an attention mask adds to products."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
