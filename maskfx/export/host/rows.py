"""Converts full values of a call to rows of active sites, and rows back to full values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from maskfx.errors import InputError
from maskfx.export.host.arrays import Array, converted
from maskfx.export.host.layout import SITE_AXES, Axis, HostLane
from maskfx.export.host.sites import Sites
from maskfx.export.host.tables import BatchTables


def axis_size(axis: Axis, sites: Sites, batch: int = 1) -> int:
    """Return the size of an axis in the full values of a call."""
    match axis.kind:
        case "batch":
            return batch
        case "features" | "frames":
            return axis.size
        case "y":
            return sites.grid(axis.level)[0]
        case "x":
            return sites.grid(axis.level)[1]
    return sum(map(sites.count, axis.segments))


def full_shape(lane: HostLane, sites: Sites, batch: int) -> tuple[int, ...]:
    """Return the shape of a full value of a call."""
    return tuple(prod(axis_size(axis, sites, batch) for axis in dim) for dim in lane.dims)


# Full values to rows.


def by_site(value: Array, lane: HostLane, sites: Sites) -> Array:
    """Return a full value as (batch, sites, features...)."""
    value = value.reshape([1] * (len(lane.dims) - value.ndim) + list(value.shape))
    known = [prod(size_given(a, sites) for a in dim if a.kind != "batch") for dim in lane.dims]
    has_batch = any(axis.kind == "batch" for axis in lane.axes)
    batch = value.shape[lane.batch_dim] // known[lane.batch_dim] if has_batch else 1
    given = [batch if a.kind == "batch" else size_given(a, sites) for a in lane.axes]
    sizes = [axis_size(axis, sites, batch) for axis in lane.axes]
    wide = np.broadcast_to(value.reshape(given), sizes).transpose(order_of(lane))
    count = prod(axis_size(axis, sites) for axis in lane.axes if axis.has_sites)
    return wide.reshape(batch, count, *lane.row_shape)


def size_given(axis: Axis, sites: Sites) -> int:
    """Return the size of an axis as it is given: one value may stand for all positions."""
    return 1 if axis.spread else axis_size(axis, sites)


def order_of(lane: HostLane) -> list[int]:
    """Return the axes of a lane with the batch first, then the sites, then the features."""
    numbers = range(len(lane.axes))
    batch = [i for i in numbers if lane.axes[i].kind == "batch"]
    places = sorted((i for i in numbers if lane.axes[i].has_sites), key=lambda i: rank(lane, i))
    features = [i for i in numbers if lane.axes[i].kind == "features"]
    return [*batch, *places, *features]


def rank(lane: HostLane, axis: int) -> int:
    """Return the place of an axis of sites in the order in which sites count."""
    return SITE_AXES.index(lane.axes[axis].kind)


def active_parts(value: Array, lane: HostLane, sites: Sites) -> list[Array]:
    """Return, for each segment, the (batch, active, features...) rows of a full value."""
    rows, out, base = by_site(value, lane, sites), [], 0
    for name in lane.segments:
        count = sites.count(name)
        out.append(rows[:, base : base + count][:, sites.active(name)])
        base += count
    return out


def gathered(values: Sequence[Array], lane: HostLane, tables: BatchTables, name: str) -> Array:
    """Return the calls' full values as rows, as one entry for each request, or as one for all.

    Args:
        values: the value of each call.
        lane: its axes.
        tables: the batch.
        name: the name of the input in messages.
    """
    if lane.kind == "const":
        if any(not np.array_equal(value, values[0]) for value in values[1:]):
            raise InputError(
                f"{name}: the calls differ in a value of shape {values[0].shape} that the model "
                "uses for the whole batch; run them in separate steps"
            )
        return values[0]
    if lane.kind == "sample":
        return np.concatenate(
            [one_each(v, lane, b) for v, b in zip(values, tables.batches, strict=True)],
            lane.batch_dim,
        )
    pieces: list[list[Array]] = [[] for _ in lane.segments]
    for value, sites, batch in zip(values, tables.sites, tables.batches, strict=True):
        for i, part in enumerate(active_parts(value, lane, sites)):
            own = np.broadcast_to(part, (batch, *part.shape[1:]))
            pieces[i].append(own.reshape(-1, *part.shape[2:]))
    return np.concatenate([part for own in pieces for part in own])


def one_each(value: Array, lane: HostLane, batch: int) -> Array:
    """Return a value without sites with an entry for each of a call's requests."""
    value = value.reshape([1] * (len(lane.dims) - value.ndim) + list(value.shape))
    if value.shape[lane.batch_dim] % batch == 0:
        return value
    shape = list(value.shape)
    shape[lane.batch_dim] = batch
    return np.broadcast_to(value, shape)


# Rows to full values.


def placed(rows: Array, lane: HostLane, sites: Sites, recorded: Array | None) -> Array:
    """Return the recorded full value with (batch, active, features...) rows at the active sites."""
    batch = rows.shape[0]
    sizes = [axis_size(axis, sites, batch) for axis in lane.axes]
    order = order_of(lane)
    if recorded is None:
        full = np.empty(sizes, dtype=rows.dtype)
    else:
        full = converted(recorded, rows.dtype).reshape(sizes).copy()
    front = full.transpose(order)
    if not any(axis.kind == "batch" for axis in lane.axes):
        front = front[None]
    places = [axis_size(lane.axes[i], sites) for i in order if lane.axes[i].has_sites]
    index = sites.laid_out(lane.segments, sites.active)
    where: tuple[Any, ...] = (slice(None), *np.unravel_index(index, places))
    front[where] = rows.reshape(batch, len(index), *front.shape[1 + len(places) :])
    return full.reshape(full_shape(lane, sites, batch))


def own_rows(rows: Array, lane: HostLane, tables: BatchTables, call: int) -> Array:
    """Return a call's part of a graph's result: (batch, active, ...) rows, or an entry for each."""
    first = sum(tables.batches[:call])
    batch = tables.batches[call]
    if lane.kind != "rows":
        return rows[first : first + batch]
    parts = own_parts(rows, lane.segments, tables, call)
    return np.concatenate(parts, 1)


def own_parts(rows: Array, segments: Sequence[str], tables: BatchTables, call: int) -> list[Array]:
    """Return a call's rows of each segment, (batch, active, ...)."""
    first = sum(tables.batches[:call])
    batch = tables.batches[call]
    parts, base = [], 0
    for name in segments:
        counts = tables.counts(name)
        start = base + sum(counts[:first])
        own = rows[start : start + sum(counts[first : first + batch])]
        parts.append(own.reshape(batch, counts[first], *own.shape[1:]))
        base += sum(counts)
    return parts
