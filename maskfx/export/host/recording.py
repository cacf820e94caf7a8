"""A recorded step: the rows, statistics and results that a recording keeps of one call.

Rows are held as they were stored: in full, packed to fewer bits, or of some sites only. The rows of
any kept site can be read in the type in which they were computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from maskfx.errors import CacheError
from maskfx.export.host.arrays import Array, Bools, DType, Index, converted, is_float, wide
from maskfx.ir.json_values import Document

StatsKey = tuple[tuple[str, ...], int]  # segments, groups


@dataclass(frozen=True)
class HostPacked:
    """Rows in fewer bits: (batch, sites, features), or half the features if two share a byte."""

    stored: Array
    scale: Array | None  # (batch, sites, parts of a row), in formats with scales
    shape: tuple[int, ...]  # of one site's features
    dtype: DType  # in full
    halves: bool = False  # two 4-bit values in a byte

    def at(self, index: Index) -> Array:
        """Return the rows of these sites in full, (batch, picked, ...)."""
        stored = self.stored[:, index]
        if self.halves:
            both = np.stack([stored & 15, stored >> 4], -1)
            stored = both.reshape(*stored.shape[:2], -1).astype(np.int8) - 8
        if self.scale is None:
            rows = converted(stored, self.dtype)
        else:
            exact = np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
            scale: Array = self.scale[:, index].astype(exact)
            steps: Array = stored.reshape(*scale.shape, -1).astype(exact)
            rows = converted(steps * scale[..., None], self.dtype)
        return rows.reshape(*stored.shape[:2], *self.shape)

    @property
    def sites(self) -> int:
        return int(self.stored.shape[1])


@dataclass(frozen=True)
class Subset:
    """Rows of some sites."""

    rows: Array | HostPacked
    kept: Index  # sorted sites


@dataclass(frozen=True)
class Interpolated:
    """Rows between those of two steps; `weight` is the second's."""

    first: Rows
    second: Rows
    weight: float

    def mixed(self, first: Array, second: Array) -> Array:
        """Interpolate between values of the two steps; integers are the first step's."""
        if not is_float(first):
            return first
        between = wide(first) * (1 - self.weight) + wide(second) * self.weight
        return converted(between, first.dtype)


Rows = Array | HostPacked | Subset | Interpolated


def rows_at(rows: Rows, index: Index, some: bool = False) -> Array:
    """Return the rows of these sites in full, (batch, picked, ...).

    Args:
        rows: the rows, in any form.
        index: the sites.
        some: leave out sites that weren't kept, instead of raising CacheError.
    """
    if isinstance(rows, Interpolated):
        return rows.mixed(*(rows_at(part, index, some) for part in (rows.first, rows.second)))
    if isinstance(rows, Subset):
        places = np.searchsorted(rows.kept, index).clip(max=max(len(rows.kept) - 1, 0))
        here = rows.kept[places] == index if len(rows.kept) else np.zeros(len(index), dtype=bool)
        if not some and not here.all():
            raise CacheError(
                f"an edit reads {int((~here).sum())} sites whose rows weren't kept; record the "
                "step again, with Masks that allow this mask"
            )
        return rows_at(rows.rows, places[here])
    return rows.at(index) if isinstance(rows, HostPacked) else rows[:, index]


def all_rows(rows: Rows) -> Array:
    """Return the rows of all sites in full."""
    if isinstance(rows, Interpolated):
        return rows.mixed(all_rows(rows.first), all_rows(rows.second))
    if isinstance(rows, Subset):
        raise CacheError(
            f"an edit reads the rows of all sites, but only those of {len(rows.kept)} were kept; "
            "record the step again"
        )
    return rows.at(np.arange(rows.sites)) if isinstance(rows, HostPacked) else rows


@dataclass(frozen=True)
class HostSiteStats:
    """Statistics per site and group of all norms over one row set.

    A site's mean is kept as its offset from the group's mean over all sites, `centre`, so that the
    rest's sums are differences of small numbers.
    """

    values: Rows  # (batch, sites, 2 * norms * groups): offsets | summed squared deviations
    total: Array  # (batch, 2 * norms * groups): their sums over all sites, float64
    centre: Array  # (batch, norms, groups)
    size: Array  # (norms, 1): channels of a group

    def towards(self, other: HostSiteStats, weight: float) -> HostSiteStats:
        """Interpolate linearly between these statistics and another step's."""
        values = Interpolated(self.values, other.values, weight)
        total, centre = (
            a * (1 - weight) + b * weight
            for a, b in ((self.total, other.total), (self.centre, other.centre))
        )
        return HostSiteStats(values, total, centre.astype(self.centre.dtype), self.size)


@dataclass
class Recording:
    """One recorded step of one call.

    Args:
        code: the digest of the program that recorded it.
        sizes: the sizes of the call by role.
        output: the denoiser's results.
        step: the arguments that identify the step (timestep, sigma).
        weights: the fingerprint of the weights.
        rows: by tap, the rows of image sites, (batch, sites, ...).
        stats: by segments and groups, the statistics of the norms over them.
        constants: the arguments that aren't tensors.
        masks: if only what edits with some masks read was kept: each such mask lies within the
            first and covers the second.
    """

    code: str
    sizes: dict[str, int]
    output: list[Any]
    step: dict[str, Array]
    weights: str = ""
    rows: dict[str, Rows] = field(default_factory=dict)
    stats: dict[StatsKey, HostSiteStats] = field(default_factory=dict)
    constants: list[object] = field(default_factory=list)
    masks: tuple[Bools, Bools] | None = None

    def served_by(self, first: Recording, second: Recording, weight: float) -> Recording:
        """Return this step's results with rows interpolated linearly between two other steps.

        A template that keeps rows of some steps alone is read so: `self` has the results of the
        step, `first` and `second` are the kept steps around it, and `weight` is the second's.
        """
        rows: dict[str, Rows] = {
            tap: Interpolated(own, second.rows[tap], weight) for tap, own in first.rows.items()
        }
        stats = {key: own.towards(second.stats[key], weight) for key, own in first.stats.items()}
        return replace(self, rows=rows, stats=stats, masks=first.masks)

    def rows_of(self, tap: str) -> Rows:
        if tap not in self.rows:
            raise CacheError(
                f"the recording holds no rows of {tap}, which this edit reads; record the step "
                "again and keep them"
            )
        return self.rows[tap]


def site_stats(norms: Sequence[Array], groups: int) -> HostSiteStats:
    """Return the statistics of the (batch, sites, channels) rows of each norm."""
    offsets, spreads, centres, sizes = [], [], [], []
    for rows in norms:
        batch, sites, channels = rows.shape
        grouped = wide(rows).reshape(batch, sites, groups, channels // groups)
        centre = grouped.mean((1, 3), dtype=np.float64).astype(grouped.dtype)
        centred = grouped - centre[:, None, :, None]
        offsets.append(centred.mean(3))
        spreads.append(np.square(centred).sum(3))
        centres.append(centre)
        sizes.append([channels // groups])
    values = np.concatenate([*offsets, *spreads], 2)
    total = values.sum(1, dtype=np.float64)
    return HostSiteStats(values, total, np.stack(centres, 1), np.array(sizes))


def keep(recording: Recording, taps: Mapping[str, Document], emitted: Mapping[str, Array]) -> None:
    """Fill a recording with the image rows (batch, sites, ...) that a graph emitted, by tap.

    Args:
        recording: the recording.
        taps: those of the manifest; the norms of one row set and group count are kept together.
        emitted: the rows of each tap.
    """
    norms: dict[StatsKey, list[Array]] = {}
    for name, rows in emitted.items():
        tap = taps[name]
        if tap["groups"]:
            norms.setdefault((tuple(tap["segments"]), tap["groups"]), []).append(rows)
        else:
            recording.rows[name] = rows
    for key, found in norms.items():
        recording.stats[key] = site_stats(found, key[1])


# What an edit reads of the rest, the inactive sites.


def rest_stats(stats: HostSiteStats, active: Index, rest: int) -> Array:
    """Return (batch, norms, groups, 3): count, mean and sum of squared deviations of the rest.

    Args:
        stats: those of all sites.
        active: the active sites.
        rest: the number of inactive sites.
    """
    batch, norms, groups = stats.centre.shape
    values = rows_at(stats.values, active, some=True)
    left = stats.total - values.sum(1, dtype=np.float64)
    offset, spread = left.reshape(batch, 2, norms, groups).transpose(1, 0, 2, 3)
    size = stats.size.astype(np.float64)
    mean = offset / max(rest, 1)
    spread = np.maximum(spread - size * rest * np.square(mean), 0)
    count = np.broadcast_to(size * rest, mean.shape)
    found = np.stack([count, stats.centre + mean, spread], 3)
    return found.astype(wide(values[:, :0]).dtype)


def rest_sum(rows: Rows, active: Index, rest: int) -> Array:
    """Return (batch, features + 1): the sum of the rest's rows, and their number."""
    every, own = all_rows(rows), rows_at(rows, active)
    batch = every.shape[0]
    total, inside = (
        wide(part).reshape(batch, part.shape[1], prod(part.shape[2:])).sum(1, dtype=np.float64)
        for part in (every, own)
    )
    count = np.full((batch, 1), float(rest))
    return np.concatenate([total - inside, count], 1).astype(wide(every[:, :0]).dtype)
