"""Converts full values to rows, and rows back to full values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from maskfx.ir.geometry.lanes import (
    PICTURE,
    SITES,
    Batch,
    Feature,
    Frames,
    Lane,
    Part,
    Tokens,
    X,
    Y,
    is_image,
    site_order,
)
from maskfx.ir.programs.program import Tap
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.cache.rows import Rows, row_bytes
from maskfx.runtime.sites.active import ActiveSites


class Sized(Protocol):
    """The number of batch elements and the sites of a member of a batch."""

    @property
    def batch(self) -> int: ...

    @property
    def sites(self) -> ActiveSites: ...


def canonical(value: Tensor, lane: Lane, sites: ActiveSites) -> Tensor:
    """Return a full value as (batch, sites, features...)."""
    atoms = lane.atoms()
    sizes, order_b, order_s = [], [], []
    value = (
        value
        if value.dim() == len(lane.dims)
        else value.reshape([1] * (len(lane.dims) - value.dim()) + list(value.shape))
    )
    batch = 1
    for dim, size in zip(lane.dims, value.shape, strict=True):
        known = 1
        for atom in dim:
            known *= 1 if isinstance(atom, Batch) or is_spread(atom) else atom_size(atom, sites)
        if any(isinstance(a, Batch) for a in dim):
            batch = size // known
    for i, atom in enumerate(atoms):
        if isinstance(atom, Batch):
            sizes.append(batch)
            order_b.append(i)
        else:
            sizes.append(atom_size(atom, sites))
            if isinstance(atom, SITES):
                order_s.append(i)
    order_s.sort(key=lambda i: site_order(atoms[i]))  # sites count row by row
    features = [i for i, a in enumerate(atoms) if isinstance(a, Feature)]
    given = [1 if is_spread(a) else n for a, n in zip(atoms, sizes, strict=True)]
    wide = value.reshape(given).expand(sizes).permute([*order_b, *order_s, *features])
    count = 1
    for i in order_s:
        count *= sizes[i]
    return wide.reshape(batch, count, *lane.row_shape())


def is_spread(atom: object) -> bool:
    return isinstance(atom, PICTURE) and atom.spread


def atom_size(atom: object, sites: ActiveSites) -> int:
    match atom:
        case Feature(size) | Frames(size):
            return size
        case Y(level):
            return sites.grid(level)[0]
        case X(level):
            return sites.grid(level)[1]
        case Part(axis, parts, inner):
            return atom_size(axis, sites) // parts if inner else parts
        case Tokens(segments):
            return sum(sites.count(s) for s in segments)
    raise AssertionError(atom)


def pick_rows(
    value: Tensor, lane: Lane, sites: ActiveSites, indices: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return, per segment, the (batch, rows, features...) rows of a full value.

    Args:
        value: The full value.
        lane: Its layout.
        sites: The active sites of the member.
        indices: The indices of the rows in each segment, on the value's device; None for all rows.
    """
    rows = canonical(value, lane, sites)
    out, base = [], 0
    for segment, index in zip(lane.segments, indices, strict=True):
        n = sites.count(segment)
        part = rows if len(lane.segments) == 1 else rows.narrow(1, base, n)
        out.append(part if index is None else at_sites(part, index))
        base += n
    return out


def at_sites(rows: Tensor, index: Tensor) -> Tensor:
    """Pick the sites of (batch, sites, features...) rows.

    On a CPU, `index_select` copies row by row; where the features of a row lie apart, as those of
    a picture with its channels first, that takes several times as long as an index.
    """
    return rows.index_select(1, index) if rows.is_contiguous() else rows[:, index]


# Rows of a recording, (sites, ...) of one batch element.


def index_rows(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index)


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Pick rows as `index_rows` on one thread, which leaves PyTorch's threads to compute."""
    out = rows.new_empty(len(index), *rows.shape[1:])
    if rows.device.type != "cpu" or not rows.is_contiguous() or not out.numel():
        return rows.index_select(0, index)
    source, target = (t.view(t.shape[0], -1).view(torch.uint8).numpy() for t in (rows, out))
    np.take(source, index.numpy(), axis=0, out=target, mode="clip")  # "raise" copies twice
    return out


def picked_bytes(kept: Rows, index: Tensor) -> int:
    """Return the bytes of these sites of every batch element, as they are stored."""
    return row_bytes(kept) * len(index)


# Full values.


def place_rows(full: Tensor, rows: Tensor, lane: Lane, sites: ActiveSites, index: Tensor) -> None:
    """Write (batch, active, features...) rows into the active sites of a full value, in place.

    Args:
        full: The value to write into.
        rows: The rows of the active sites.
        lane: The layout of the value.
        sites: The active sites.
        index: The indices of the active sites, on the value's device.
    """
    view = writable(full, lane, sites)
    if sites.full:
        view.copy_(rows.view(view.shape))
        return
    own = sum(isinstance(a, SITES) for a in lane.atoms())  # axes of sites, behind the batch
    sizes, steps = view.shape[1 : 1 + own], view.stride()
    places: list[Any] = [index]
    if all(steps[i] == steps[i + 1] * view.shape[i + 1] for i in range(1, own)):
        view = view.flatten(1, own)  # a view: rows of sites follow each other
    elif own > 1:
        places = list(torch.unravel_index(index, sizes))
    view[slice(None), *places] = rows.view(
        rows.shape[0], len(index), *view.shape[1 + len(places) :]
    )


def writable(full: Tensor, lane: Lane, sites: ActiveSites) -> Tensor:
    """View a contiguous value with its batch and site axes in front, an axis for each of them."""
    axes = split_axes(full, lane, sites)
    wide = full.view(axes.sizes).permute(axes.order)
    return wide if axes.batch else wide.unsqueeze(0)


class SplitAxes(NamedTuple):
    """The axes of a full value after each is split into batch, sites and features.

    Args:
        sizes: Their sizes.
        batch, sites, features: Their numbers.
    """

    sizes: tuple[int, ...]
    batch: tuple[int, ...]
    sites: tuple[int, ...]
    features: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Return the axes of the batch, then those of sites, then features."""
        return (*self.batch, *self.sites, *self.features)


def split_axes(full: Tensor, lane: Lane, sites: ActiveSites) -> SplitAxes:
    """Return the axes into which a full value can be viewed."""
    atoms = lane.atoms()
    known = prod(atom_size(atom, sites) for atom in atoms if not isinstance(atom, Batch))

    def axes(*kinds: type) -> tuple[int, ...]:
        return tuple(i for i, atom in enumerate(atoms) if isinstance(atom, kinds))

    sizes = (
        full.numel() // known if isinstance(atom, Batch) else atom_size(atom, sites)
        for atom in atoms
    )
    own = sorted(axes(*SITES), key=lambda i: site_order(atoms[i]))
    return SplitAxes(tuple(sizes), axes(Batch), tuple(own), axes(Feature))


def tap_parts(tap: Tap, rows: Tensor, layout: Layout, member: int) -> list[Tensor]:
    """Return a recording member's image rows of an emitted tap, (batch, sites, ...) per segment."""
    out, base = [], 0
    for segment in tap.segments:
        counts = layout.counts(segment)
        first = sum(layout.batches[:member])
        start = base + sum(counts[:first])
        batch = layout.batches[member]
        n = sum(counts[first : first + batch])
        if is_image(segment):
            out.append(rows[start : start + n].unflatten(0, (batch, -1)))
        base += sum(counts)
    return out


def own_rows(rows: Tensor, lane: Lane, layout: Layout, index: int) -> Tensor:
    """Return a member's part of an output: (batch, active, ...) rows, or a value per element."""
    first = sum(layout.batches[:index])
    batch = layout.batches[index]
    if lane.kind != "rows":
        return rows[first : first + batch]
    parts, base = [], 0
    for segment in lane.segments:
        counts = layout.counts(segment)
        start = base + sum(counts[:first])
        parts.append(
            rows[start : start + sum(counts[first : first + batch])].unflatten(0, (batch, -1))
        )
        base += sum(counts)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def empty_output(rows: Tensor, lane: Lane, member: Sized) -> Tensor:
    shape = []
    for dim in lane.dims:
        size = 1
        for atom in dim:
            size *= member.batch if isinstance(atom, Batch) else atom_size(atom, member.sites)
        shape.append(size)
    return rows.new_empty(shape)
