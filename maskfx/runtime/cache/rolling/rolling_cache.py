"""RollingCache: a recorded step whose rows are replaced where later steps compute them.

A request that reads its own last step has one of these per call of a step. Its rows are ranges of
buffers that the requests of a pool share, so that a batch replaces the rows of all its members with
one scatter per tap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.ir.geometry.lanes import is_image
from maskfx.ir.programs.program import Interface
from maskfx.ops import wide
from maskfx.runtime.cache.rolling.free_ranges import FreeRanges
from maskfx.runtime.cache.rolling.patch_changes import ChangeMeter, PatchChanges, patch_table
from maskfx.runtime.cache.rolling.placement import RowPlacement
from maskfx.runtime.cache.rolling.places import Batched, Group, Regions, RowPlaces
from maskfx.runtime.cache.rolling.row_writes import RowWrites
from maskfx.runtime.cache.rolling.set_rows import SetTaps, SetWrites
from maskfx.runtime.cache.rows import Rows, device_of
from maskfx.runtime.cache.step_cache import StepCache, with_tensors
from maskfx.runtime.hardware.devices import CPU, moved
from maskfx.runtime.sites.active import ActiveSites

NUMBERS = itertools.count()  # of blocks
StatsKey = tuple[tuple[str, ...], int]


class StretchInputs(Protocol):
    """The inputs of stretches as these last read them (`read_inputs.ReadInputs`)."""

    rows: dict[str, Tensor]

    def start(self, block: RowBlock, cache: RollingCache) -> None: ...

    def read(
        self, block: RowBlock, layout: Batched, caches: Mapping[int, RollingCache]
    ) -> None: ...


@dataclass(eq=False, kw_only=True)
class RollingCache(StepCache):
    """A recorded step whose rows, statistics and outputs are replaced where they are computed.

    Args:
        block: The buffers that hold the rows.
        starts: Where its rows start in the buffers, by row set.
        totals: The number of rows of a batch element, by row set.
        in_full: The first stretches, of which nothing is kept: they compute all sites.
        changes: How far the rows of each patch changed at the last step, if it is to be summed.
    """

    block: RowBlock
    starts: dict[Group, int]
    totals: dict[Group, int]
    in_full: range = range(0)
    changes: PatchChanges | None = None
    closed: bool = False
    _free: Callable[[], object] = field(default=lambda: None)

    def __post_init__(self) -> None:
        self.block.caches[self] = None

    @property
    def compares_inputs(self) -> bool:
        """Return True if stretches' inputs are compared with those that these last read."""
        return self.changes is not None and self.changes.since_read

    def find_rows(self) -> None:
        """Take rows and statistics from the buffers of the block, which have moved."""
        block, batch = self.block, self.sizes["batch"]

        def part(buffer: Tensor, segments: Sequence[str], like: Rows) -> Tensor:
            group = group_of(block.interface, segments)
            start = self.starts[group]
            own = buffer[start : start + batch * self.totals[group]]
            assert isinstance(like, Tensor), "a rolling cache holds plain rows"
            return own.view(like.shape)

        for tap, rows in self.rows.items():
            segments = block.interface.taps[tap].segments
            self.rows[tap] = part(block.rows[tap], segments, rows)
        for key, stats in self.stats.items():
            values = part(block.values[key], key[0], stats.values)
            self.stats[key] = replace(stats, values=values)

    def close(self) -> None:
        """Return the rows to the pool; the cache can't be used afterwards."""
        self.closed = True
        self.rows, self.stats, self.sums = {}, {}, {}
        self._free()

    def copy(self) -> StepCache:
        """Return a recording of the present values, which later steps don't change."""
        return with_tensors(self, torch.clone)

    def element(self, number: int) -> RollingCache:
        """Return the part of one batch element; what is written to it is written to this."""
        part = self.of_elements([number])
        named = {f.name: getattr(part, f.name) for f in fields(StepCache)}
        starts = {group: at + number * self.totals[group] for group, at in self.starts.items()}
        return RollingCache(
            **named,
            block=self.block,
            starts=starts,
            totals=self.totals,
            in_full=self.in_full,
            changes=self.changes,
            closed=self.closed,
        )

    def take_outputs(self, output: Sequence[object], step: Mapping[str, Tensor]) -> None:
        """Replace the outputs and the arguments that identify the step."""
        for kept, new in zip(self.output, output, strict=True):
            kept.copy_(new)
        self.step = dict(step)


class RowBlock:
    """Buffers of rows and statistics of one program, shared by several requests.

    Args:
        interface: The interface of the program.
        like: A recording that shows which rows are kept.
        counts: The number of rows of each row set.
        nbytes: The bytes of the buffers.
    """

    def __init__(
        self, interface: Interface, like: StepCache, counts: Mapping[Group, int], nbytes: int
    ) -> None:
        self.interface, self.nbytes = interface, nbytes
        self.number, self.regions = next(NUMBERS), Regions(interface)
        self.own = 0  # bytes of outputs and sums, which requests hold on their own
        self.written = 0  # bytes of rows replaced so far
        self.taps, self.keys = set(like.rows), set(like.stats)
        self.free = {group: FreeRanges([(0, count)]) for group, count in counts.items()}
        self.empty = {group: list(free.ranges) for group, free in self.free.items()}
        self.rows, self.values = {}, {}
        self.patch_of: dict[Group, Tensor] = {}  # the patch of each row, counted per request
        self.caches: MutableMapping[RollingCache, None] = WeakIdKeyDictionary()  # with rows here
        self.lock = Lock()  # held while rows are written beside steps, or moved
        self.inputs: StretchInputs | None = None  # of requests that compare them while a step runs
        for tap, kept in like.rows.items():
            kind = interface.taps[tap]
            count = counts[self.group_of(kind.segments)]
            self.rows[tap] = torch.empty(
                count, *kind.shape, dtype=kept.dtype, device=device_of(kept)
            )
        for key, stats in like.stats.items():
            count, width = counts[group_of(interface, key[0])], stats.total.shape[1]
            self.values[key] = torch.empty(
                count, width, dtype=stats.values.dtype, device=stats.total.device
            )

    @property
    def device(self) -> torch.device:
        buffers = itertools.chain(self.rows.values(), self.values.values())
        return next((buffer.device for buffer in buffers), CPU)

    @cached_property
    def by_sets(self) -> SetTaps:
        """Return which rows are read and replaced by sets."""
        return SetTaps(self.interface, self.regions, self.rows)

    @property
    def unused(self) -> bool:
        return all(free.ranges == self.empty[group] for group, free in self.free.items())

    def take(self, counts: Mapping[Group, int]) -> dict[Group, int] | None:
        """Return where ranges of these lengths start, or None if there is no room."""
        starts: dict[Group, int] = {}
        for group, count in counts.items():
            start = self.free[group].take(count)
            if start is None:
                self.give(starts, counts)
                return None
            starts[group] = start
        return starts

    def give(self, starts: Mapping[Group, int], counts: Mapping[Group, int]) -> None:
        """Take the ranges of a request back."""
        for group, start in starts.items():
            self.free[group].give(start, counts[group])

    def watch(self, cache: RollingCache, changes: PatchChanges) -> None:
        """Have the changes of a request's rows summed by patch at each step that replaces them."""
        sites = ActiveSites(self.interface.pyramid, cache.sizes, None)
        groups = set()
        for tap in changes.boundaries:
            segments = self.interface.taps[tap].segments
            groups.add(self.group_of(segments))
            changes.note_level(tap, segments, sites)
        for group in groups & cache.starts.keys():
            if group not in self.patch_of:
                count = sum(stop - start for start, stop in self.empty[group])
                device = next(iter(self.rows.values())).device
                self.patch_of[group] = torch.zeros(count, dtype=torch.long, device=device)
            table = patch_table(group, changes.patches, sites)
            if len(table) != cache.totals[group]:
                continue
            start, batch = cache.starts[group], cache.sizes["batch"]
            part = self.patch_of[group][start : start + batch * len(table)]
            part.view(batch, -1).copy_(table)
        cache.changes = changes

    def write(
        self, layout: Batched, caches: Mapping[int, RollingCache], emitted: Sequence[Tensor]
    ) -> None:
        """Replace the rows and statistics that a batch computed.

        Args:
            layout: The batch.
            caches: The caches to write, by the number of the member; all hold rows of this block.
            emitted: The rows that the batch computed, by tap.
        """
        places = self.places(layout, caches)
        norms: dict[StatsKey, list[Tensor]] = {}
        writes, by_sets = RowWrites(), SetWrites(self.rows, self.by_sets, places, emitted)
        summed = {tap for cache in caches.values() for tap in cache.sums}
        meter = ChangeMeter(list(caches.values()))
        for tap, rows in zip(self.interface.taps.values(), emitted, strict=True):
            key = tap.segments, tap.stats
            if tap.name not in self.taps and key not in self.keys:
                continue
            watched = tap.name in summed or meter.reads(tap.name)
            if not tap.stats and not watched and by_sets.add(tap.name, rows):
                continue
            place = places.written(tap.segments)
            if not place.target.shape[0]:
                continue
            new = place.of(moved(rows, place.target.device))
            if tap.stats:
                norms.setdefault(key, []).append(new)
                continue
            buffer = self.rows[tap.name]
            if tap.name in summed:
                self._add_sums(tap.name, place, new, list(caches.values()))
            table = self.patch_of.get(self.regions.groups[tap.name])
            sums: Sequence[Tensor] = ()
            if table is not None and meter.reads(tap.name):
                sums = meter.sums_of(tap.name, tap.segments, place, table, new.dtype)
            writes.add(buffer, place, new, sums)
        writes.run()
        by_sets.run()
        self.written += writes.nbytes + by_sets.nbytes
        for key, found in norms.items():
            place = places.written(key[0])
            self._write_stats(key, place, found, list(caches.values()))
        meter.finish()
        comparing = {n: cache for n, cache in caches.items() if cache.compares_inputs}
        if self.inputs is not None and comparing:
            self.inputs.read(self, layout, comparing)

    def group_of(self, segments: tuple[str, ...]) -> Group:
        """Return the image segments without their regions."""
        return self.regions.group_of(segments)

    def places(self, layout: Batched, caches: Mapping[int, RollingCache]) -> RowPlaces:
        """Return where the rows of these members of a batch lie in the buffers."""
        numbers, own = tuple(caches), list(caches.values())
        starts = {group: self._starts_of(group, own) for group in own[0].starts}
        key = self.number, numbers, *(found.tobytes() for found in starts.values())
        return layout.places.find(
            key, lambda: RowPlaces(self.regions, layout, numbers, starts, self.device)
        )

    def _starts_of(self, group: Group, caches: Sequence[RollingCache]) -> NDArray[np.int64]:
        """Return where the rows of each batch element of these caches start."""
        return np.array(
            [
                cache.starts[group] + i * cache.totals[group]
                for cache in caches
                for i in range(cache.sizes["batch"])
            ],
            np.int64,
        )

    def _add_sums(
        self, tap: str, place: RowPlacement, new: Tensor, caches: Sequence[RollingCache]
    ) -> None:
        """Add what the new rows differ by to the sums of those caches that have sums."""
        old = self.rows[tap].index_select(0, place.target)
        change = place.summed(new.flatten(1).double() - old.flatten(1).double())
        batches = [cache.sizes["batch"] for cache in caches]
        for cache, part in zip(caches, change.split(batches), strict=True):
            if tap in cache.sums:
                cache.sums[tap] += part

    def _write_stats(
        self,
        key: StatsKey,
        place: RowPlacement,
        norms: Sequence[Tensor],
        caches: Sequence[RollingCache],
    ) -> None:
        """Replace the statistics of the new rows, and add what they differ by to the totals.

        Where all sites are new, the centre is their mean again.
        """
        kept = [cache.stats[key] for cache in caches]
        batches = [cache.sizes["batch"] for cache in caches]
        grouped = [r.to(wide(r.dtype)).reshape(len(r), key[1], -1) for r in norms]
        centre = torch.cat([stats.centre for stats in kept])
        values, owner = self.values[key], place.owner
        old = values.index_select(0, place.target).double()
        complete = moved(torch.tensor(place.complete), owner.device)
        if any(place.complete):
            means = torch.stack([rows.mean(2) for rows in grouped], 1)
            counts = torch.bincount(owner, minlength=len(complete)).clamp_(min=1)
            middle = (place.summed(means) / counts.view(-1, 1, 1)).to(centre.dtype)
            centre = torch.where(complete.view(-1, 1, 1), middle, centre)
            old[complete[owner]] = 0
            for stats, new in zip(kept, centre.split(batches), strict=True):
                stats.centre.copy_(new)
        around = centre.index_select(0, owner)
        centred = [rows - around[:, i, :, None] for i, rows in enumerate(grouped)]
        offsets = [rows.mean(2) for rows in centred]
        found = torch.cat([*offsets, *(rows.square_().sum(2) for rows in centred)], 1)
        found = found.to(values.dtype)
        values.index_copy_(0, place.target, found)
        self.written += found.nbytes
        change = place.summed(found.double() - old)
        parts = zip(kept, change.split(batches), complete.split(batches), strict=True)
        for stats, part, all_new in parts:
            stats.total.mul_(~all_new[:, None]).add_(part)


def write_rows(
    layout: Batched, caches: Mapping[int, RollingCache], emitted: Sequence[Tensor]
) -> None:
    """Replace the rows that a batch computed in the caches of its members, given by number."""
    blocks: dict[int, dict[int, RollingCache]] = {}
    for number, cache in caches.items():
        blocks.setdefault(id(cache.block), {})[number] = cache
    for written in blocks.values():
        next(iter(written.values())).block.write(layout, written, emitted)


def group_of(interface: Interface, segments: Sequence[str]) -> Group:
    """Return the image segments without their regions."""
    return tuple(filter(is_image, interface.pyramid.base_segments(segments)))
