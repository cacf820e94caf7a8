"""StepCache: the values that one recorded step keeps of one call.

Per batch element and image site: rows that a window or an attention will read, in full precision
or packed, statistics per group where only sums are needed, and the output. With `Masks`, only what
edits with those masks can read. Rows may lie in a store until they are first used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.ir.programs.program import Tap
from maskfx.ops import wide
from maskfx.runtime.cache.quantize import Encoding, Format, Packed, pack, select
from maskfx.runtime.cache.rows import (
    Elements,
    InterpolatedRows,
    Rows,
    RowSubset,
    StoredRows,
    by_element,
    in_memory,
    mapped,
    memory_of,
    packed,
    stored_parts,
    whole,
)
from maskfx.runtime.hardware.devices import moved
from maskfx.runtime.sites.masks import Masks, Reach


@dataclass(frozen=True)
class SiteStats:
    """Group statistics per site of all norms over one row set, concatenated.

    Each site's mean is kept as its offset from the group's mean over all sites (`centre`), so that
    sums over any set of sites are exact to rounding: no large squares are ever subtracted.
    """

    values: Rows  # (batch, sites, 2 * norms * groups): offsets | summed squared deviations
    total: Tensor  # (batch, 2 * norms * groups): their sums over all sites, float64
    centre: Tensor  # (batch, norms, groups)
    size: Tensor  # (norms, 1): channels of a group

    def nbytes(self) -> int:
        return self.values.nbytes + self.centre.nbytes + self.total.nbytes

    def packed(self, wanted: Format) -> SiteStats:
        """Return the statistics with those of each site in this format, unless packed already."""
        values = packed(self.values, wanted)
        return self if values is self.values else replace(self, values=values)

    def towards(self, other: SiteStats, weight: float) -> SiteStats:
        """Interpolate linearly between these statistics and another step's."""
        there = self.total.device  # the other step may lie in another tier
        return SiteStats(
            InterpolatedRows(self.values, other.values, weight),
            torch.lerp(self.total, moved(other.total, there), weight),
            torch.lerp(self.centre, moved(other.centre, there), weight),
            self.size,
        )

    def on(self, device: torch.device) -> SiteStats:
        """Return the statistics with their sums on a device; those of each site stay."""
        if self.total.device == device:
            return self
        sums = (moved(value, device) for value in (self.total, self.centre, self.size))
        return SiteStats(self.values, *sums)

    def within(self, sites: Tensor, always: Tensor) -> SiteStats:
        """Return the statistics of some sites.

        Sites in `always`, which every edit leaves out of the sum, are subtracted here, once.
        """
        rows = whole(self.values)
        left = select(rows, moved(always, rows.device)).sum(1, dtype=torch.float64)
        return replace(
            self,
            values=RowSubset(select(rows, moved(sites, rows.device)), sites),
            total=self.total - left,
        )


@dataclass
class StepCache:
    """One recorded step of one call; opaque to users except for `nbytes`.

    That of a call whose samples have programs or picture sizes of their own is one of each sample.
    """

    program: str
    sizes: dict[str, int]
    dtype: torch.dtype
    output: list[Any]
    step: dict[str, Tensor]
    weights: str = ""
    constants: list[Any] = field(default_factory=list)
    rows: dict[str, Rows] = field(default_factory=dict)
    stats: dict[tuple[tuple[str, ...], int], SiteStats] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    masks: Masks | None = None  # only what edits with these can read is kept
    given: list[object] = field(default_factory=list)  # the inputs, if edits may compute from them
    adapters: tuple[tuple[str, float], ...] = ()  # digest and weight of each it was recorded with
    samples: list[StepCache] = field(default_factory=list)  # in place of all rows and outputs

    def nbytes(self) -> int:
        """Return the bytes that this cache holds."""
        held = {place: n for rows in self.rows.values() for place, n in places_of(rows)}
        rest = sum(s.nbytes() for s in self.stats.values()) + sum(
            t.nbytes for t in self.sums.values()
        )
        rest += self.masks.nbytes if self.masks is not None else 0
        rest += sum(one.nbytes() for one in self.samples)
        return (
            sum(held.values())
            + rest
            + sum(t.nbytes for t in (*self.output, *self.given) if isinstance(t, Tensor))
        )

    def total_of(self, tap: str) -> Tensor:
        """Return the (batch, features) float64 sum of a tap's rows, computed at its first use."""
        if tap not in self.sums:
            self.sums[tap] = whole(self.rows[tap]).flatten(2).sum(1, dtype=torch.float64)
        return self.sums[tap]

    def of_elements(self, elements: Sequence[int]) -> StepCache:
        """Return this step for some elements of its batch, in this order; elements may repeat.

        Adjacent elements in order share the memory of this step.
        """
        chosen = Elements(tuple(elements), self.sizes.get("batch"))
        return changed(
            self,
            sizes={**self.sizes, "batch": len(elements)},
            output=[chosen(value) for value in self.output],
            given=[chosen(value) for value in self.given],
            step={name: chosen(value) for name, value in self.step.items()},
            rows={tap: by_element(value, chosen) for tap, value in self.rows.items()},
            stats={
                key: replace(
                    kept,
                    values=by_element(kept.values, chosen),
                    total=chosen(kept.total),
                    centre=chosen(kept.centre),
                )
                for key, kept in self.stats.items()
            },
            sums={},
            samples=[self.samples[number] for number in elements] if self.samples else [],
        )

    def packed(self, encoding: Encoding, keep: Collection[str] | None = None) -> StepCache:
        """Return this step rounded to an encoding; with `keep`, only with the rows of these taps.

        Statistics are always kept. Rows that are packed already stay unchanged, so that they are
        rounded once.
        """
        if encoding.lossless and keep is None:
            return self
        if any(isinstance(rows, InterpolatedRows) for rows in self.rows.values()):
            raise CacheError("rows between two steps are in no step's format; pack the two steps")
        rows = {tap: r for tap, r in self.rows.items() if keep is None or tap in keep}
        rounded = _once(lambda t: whole(pack(t, encoding.output)))
        return changed(
            self,
            output=rounded(self.output),
            rows=_pack_all(rows, encoding.of),
            stats={key: kept.packed(encoding.stats) for key, kept in self.stats.items()},
            sums={},
            samples=[one.packed(encoding, keep) for one in self.samples],
        )

    def within(self, masks: Masks, reach: Reach) -> StepCache:
        """Return the part of this step that edits with these masks can read; pack it afterwards."""
        if self.masks is not None:
            return self
        done: dict[tuple[object, ...], Tensor] = {}

        def part(value: Rows, sites: Tensor) -> Rows:
            rows = whole(value)
            place = (*_place(rows.flatten(2)), sites.data_ptr(), len(sites))
            if place not in done or not rows.is_contiguous():
                done[place] = select(rows, moved(sites, rows.device))
            return RowSubset(done[place].view(len(rows), len(sites), *rows.shape[2:]), sites)

        rows = {
            tap: part(value, reach.rows[tap]) if tap in reach.rows else value
            for tap, value in self.rows.items()
        }
        stats = {
            key: kept.within(reach.active[key], reach.always[key]) if key in reach.active else kept
            for key, kept in self.stats.items()
        }
        return changed(self, rows=rows, stats=stats, sums={}, masks=masks)

    def served_by(self, first: StepCache, second: StepCache, weight: float) -> StepCache:
        """Return this step's outputs with rows interpolated linearly between two other steps."""
        if weight == 0:
            rows, stats = first.rows, first.stats
        else:
            rows = {t: InterpolatedRows(r, second.rows[t], weight) for t, r in first.rows.items()}
            stats = {k: s.towards(second.stats[k], weight) for k, s in first.stats.items()}
        # rows computed from this step's inputs would be others than those in between
        given = [] if rows else self.given
        three = zip(self.samples, first.samples, second.samples, strict=True)
        samples = [own.served_by(one, other, weight) for own, one, other in three]
        found = changed(self, rows=dict(rows), stats=stats, sums={}, masks=first.masks)
        return replace(found, given=given, samples=samples)


def changed(cache: StepCache, **changes: object) -> StepCache:
    """Return a cache with these fields changed; of a cache that is written, one that isn't."""
    return StepCache(**{**{f.name: getattr(cache, f.name) for f in fields(StepCache)}, **changes})


def has_unread(cache: StepCache) -> bool:
    """Return True if rows of the step are still to be read from a store."""
    return any(map(stored_parts, cache.rows.values())) or any(map(has_unread, cache.samples))


Then = Callable[[StepCache | None], bool]  # what is done with a step that was read


def is_found(cache: StepCache | None) -> bool:
    return cache is not None


def read_rows(cache: StepCache, taps: Sequence[str], goes_on: Callable[[], bool]) -> None:
    """Read the rows of these taps from their store, until `goes_on` returns False."""
    for tap in taps:
        for one in (cache, *cache.samples):
            for part in stored_parts(one.rows[tap]) if tap in one.rows else ():
                if not goes_on():
                    return
                part.read()


def places_of(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield keys of the memory that rows occupy, or will when they are read, and its bytes."""
    for value in stored_parts(rows):
        yield id(value), value.nbytes
    for tensor in memory_of(rows):
        if not tensor.is_meta:
            yield tensor.data_ptr(), tensor.nbytes


def _pack_all(rows: Mapping[str, Rows], wanted: Callable[[str], Format]) -> dict[str, Rows]:
    """Return each tap's rows in its format; rows that share memory still share it."""
    done: dict[tuple[object, ...], Packed] = {}

    def packed_one(tap: str, value: Rows) -> Rows:
        value = in_memory(value)
        if isinstance(value, Tensor):
            return _pack_once(value, wanted(tap), done)
        if isinstance(value, RowSubset) and isinstance(value.rows, Tensor):
            return replace(value, rows=_pack_once(value.rows, wanted(tap), done))
        return value

    return {tap: packed_one(tap, value) for tap, value in rows.items()}


def _pack_once(
    value: Tensor, wanted: Format, done: dict[tuple[object, ...], Packed]
) -> Tensor | Packed:
    if value.dim() < 3 or not value.is_contiguous():
        return pack(value, wanted)
    place = (*_place(value.flatten(2)), wanted)
    if place in done:  # the features of a site may have another shape
        return replace(done[place], shape=tuple(value.shape[2:]))
    found = pack(value, wanted)
    if isinstance(found, Packed):
        done[place] = found
    return found


def _place(value: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same memory and layout."""
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride()


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[object], Any]:
    """Return a function that changes each tensor of a value; shared memory is changed once."""
    done: dict[tuple[object, ...], Tensor] = {}

    def once(value: Any) -> Any:
        if isinstance(value, Tensor):
            place = _place(value)
            if place not in done or not value.numel():
                done[place] = change(value)
            return done[place]
        if isinstance(value, Packed | RowSubset | InterpolatedRows | StoredRows):
            return mapped(value, once)
        if type(value) in (list, tuple):
            return type(value)(map(once, value))
        return {k: once(v) for k, v in value.items()} if type(value) is dict else value

    return once


def with_tensors(cache: StepCache, change: Callable[[Tensor], Tensor]) -> StepCache:
    """Return a cache with every tensor changed, e.g. moved; shared memory stays shared.

    The sites of rows and masks, which Python reads, stay in host memory.
    """
    once = _once(change)

    def stats(kept: SiteStats) -> SiteStats:
        return SiteStats(*map(once, (kept.values, kept.total, kept.centre, kept.size)))

    return changed(
        cache,
        output=once(cache.output),
        given=once(cache.given),
        step=once(cache.step),
        rows=once(cache.rows),
        stats={key: stats(kept) for key, kept in cache.stats.items()},
        sums=once(cache.sums),
        samples=[with_tensors(one, change) for one in cache.samples],
    )


def site_stats(norms: Sequence[Tensor], groups: int) -> SiteStats:
    """Return the statistics of the (batch, sites, channels) rows of each norm."""
    offsets, spreads, centres, sizes = [], [], [], []
    for rows in norms:
        batch, sites, channels = rows.shape
        grouped = rows.to(wide(rows.dtype)).reshape(batch, sites, groups, channels // groups)
        centre = grouped.mean((1, 3))
        centred = grouped - centre.view(batch, 1, groups, 1)
        offsets.append(centred.mean(3))
        spreads.append(centred.square_().sum(3))
        centres.append(centre)
        sizes.append(channels // groups)
    values = torch.cat([*offsets, *spreads], 2)
    total = values.sum(1, dtype=torch.float64)
    size = torch.tensor(sizes, device=total.device).view(-1, 1)
    return SiteStats(values, total, torch.stack(centres, 1), size)


def keep_rows(cache: StepCache, taps: Sequence[Tap], parts: Sequence[list[Tensor]]) -> None:
    """Fill a cache with rows; `parts` are each tap's (batch, sites, ...) image rows by segment."""
    norms: dict[tuple[tuple[str, ...], int], list[Tensor]] = {}
    for tap, pieces in zip(taps, parts, strict=True):
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        if tap.stats:
            norms.setdefault((tap.segments, tap.stats), []).append(rows)
        else:
            cache.rows[tap.name] = rows
    for key, found in norms.items():
        cache.stats[key] = site_stats(found, key[1])
