"""RollingCache: a recorded step whose rows are replaced where later steps compute them.

A request that reads its own last step has one of these per call of a step. Its rows are ranges of
buffers that the requests of a pool share, so that a batch replaces the rows of all its members with
one `index_copy_` per tap.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.ir.lanes import grid_segment, is_image
from maskfx.ir.program import (
    STRETCH,
    Halo,
    Interface,
    Loaded,
    Program,
    Rest,
    RestStats,
    RestSum,
)
from maskfx.ops import wide
from maskfx.runtime.cache.rows import device_of, tensors_of, whole
from maskfx.runtime.cache.step_cache import SiteStats, StepCache, changed, with_tensors
from maskfx.runtime.devices import moved
from maskfx.runtime.sites.active import ActiveSites

Group = tuple[str, ...]  # row sets without regions: their taps have equal numbers of rows
StatsKey = tuple[tuple[str, ...], int]


class Batched(Protocol):
    """The members of a batch: their sites, batch elements, and rows per batch element."""

    @property
    def sites(self) -> Sequence[ActiveSites]: ...

    @property
    def batches(self) -> Sequence[int]: ...

    def counts(self, segment: str) -> Sequence[int]: ...


@dataclass
class FreeRanges:
    """The unused ranges of a number of rows, in order."""

    ranges: list[tuple[int, int]]

    def take(self, count: int) -> int | None:
        """Return the start of a range of this length, or None if no range is long enough."""
        for i, (start, stop) in enumerate(self.ranges):
            if stop - start >= count:
                self.ranges[i : i + 1] = [(start + count, stop)] if stop - start > count else []
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Take a range back and join it with its neighbours."""
        insort(self.ranges, (start, start + count))
        joined: list[tuple[int, int]] = []
        for one, other in self.ranges:
            if joined and joined[-1][1] == one:
                joined[-1] = joined[-1][0], other
            else:
                joined.append((one, other))
        self.ranges = joined


@dataclass(eq=False, kw_only=True)
class RollingCache(StepCache):
    """A recorded step whose rows, statistics and outputs are replaced where they are computed.

    Args:
        block: The buffers that hold the rows.
        starts: Where its rows start in the buffers, by row set.
        in_full: The first stretches, of which nothing is kept: they compute all sites.
    """

    block: RowBlock
    starts: dict[Group, int]
    in_full: range = range(0)
    closed: bool = False
    _free: Callable[[], Any] = field(default=lambda: None)

    def close(self) -> None:
        """Return the rows to the pool; the cache can't be used afterwards."""
        self.closed = True
        self.rows, self.stats, self.sums = {}, {}, {}
        self._free()

    def copy(self) -> StepCache:
        """Return a recording of the present values, which later steps don't change."""
        return with_tensors(self, torch.clone)

    def take_outputs(self, output: Sequence[Any], step: Mapping[str, Tensor]) -> None:
        """Replace the outputs and the arguments that identify the step."""
        for kept, new in zip(self.output, output, strict=True):
            kept.copy_(new)
        self.step = dict(step)


@dataclass(frozen=True)
class Placement:
    """Which rows of a row set a batch writes, and where.

    Args:
        source: The rows among those that the batch computed.
        target: Their places in the buffers, on the device of the buffers.
        sizes: The number of rows of each range; ranges lie by segment, member and batch element.
        elements: The batch element of each range, counted over the written members.
        complete: By batch element, whether all of its sites are written.
    """

    source: slice | Tensor
    target: Tensor
    sizes: list[int]
    elements: list[int]
    complete: list[bool]

    @cached_property
    def owner(self) -> Tensor:
        """Return the batch element of each row."""
        each = torch.repeat_interleave(torch.tensor(self.elements), torch.tensor(self.sizes))
        return moved(each, self.target.device)

    def of(self, rows: Tensor) -> Tensor:
        """Return the rows that are written."""
        return rows[self.source] if isinstance(self.source, slice) else rows[self.source]

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of the rows of each batch element in float64."""
        out = values.new_zeros(len(self.complete), *values.shape[1:], dtype=torch.float64)
        return out.index_add_(0, self.owner, values.double())


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
        self.own = 0  # bytes of outputs and sums, which requests hold on their own
        self.written = 0  # bytes of rows replaced so far
        self.taps, self.keys = set(like.rows), set(like.stats)
        self.free = {group: FreeRanges([(0, count)]) for group, count in counts.items()}
        self.empty = {group: list(free.ranges) for group, free in self.free.items()}
        self.rows, self.values = {}, {}
        for tap, kept in like.rows.items():
            kind = interface.taps[tap]
            count = counts[group_of(interface, kind.segments)]
            self.rows[tap] = torch.empty(
                count, *kind.shape, dtype=kept.dtype, device=device_of(kept)
            )
        for key, stats in like.stats.items():
            count, width = counts[group_of(interface, key[0])], stats.total.shape[1]
            self.values[key] = torch.empty(
                count, width, dtype=stats.values.dtype, device=stats.total.device
            )

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

    def write(
        self, frame: Batched, caches: Mapping[int, RollingCache], emitted: Sequence[Tensor]
    ) -> None:
        """Replace the rows and statistics that a batch computed.

        Args:
            frame: The batch.
            caches: The caches to write, by the number of the member; all hold rows of this block.
            emitted: The rows that the batch computed, by tap.
        """
        places: dict[tuple[str, ...], Placement] = {}
        norms: dict[StatsKey, list[Tensor]] = {}
        for tap, rows in zip(self.interface.taps.values(), emitted, strict=True):
            key = tap.segments, tap.stats
            if tap.name not in self.taps and key not in self.keys:
                continue
            if tap.segments not in places:
                places[tap.segments] = self._placement(tap.segments, frame, caches, rows.device)
            place = places[tap.segments]
            if not len(place.target):
                continue
            new = place.of(rows)
            if tap.stats:
                norms.setdefault(key, []).append(new)
                continue
            buffer = self.rows[tap.name]
            if any(tap.name in cache.sums for cache in caches.values()):
                self._add_sums(tap.name, place, new, list(caches.values()))
            buffer.index_copy_(0, place.target, new)
            self.written += new.nbytes
        for key, found in norms.items():
            self._write_stats(key, places[key[0]], found, list(caches.values()))

    def _placement(
        self,
        segments: tuple[str, ...],
        frame: Batched,
        caches: Mapping[int, RollingCache],
        device: torch.device,
    ) -> Placement:
        group, images = group_of(self.interface, segments), list(filter(is_image, segments))
        sites: list[Tensor] = []
        starts: list[int] = []
        sizes: list[int] = []
        elements: list[int] = []
        source: list[tuple[int, int]] = []
        complete: list[bool] = []
        at = 0
        for segment in segments:
            if not is_image(segment):
                at += sum(frame.counts(segment))
                continue
            before = images[: images.index(segment)]
            element = 0
            for number, (own, batch) in enumerate(zip(frame.sites, frame.batches, strict=True)):
                count = own.active_count(segment)
                if number in caches:
                    total = sum(map(own.count, images))
                    start = caches[number].starts[group] + sum(map(own.count, before))
                    sites += [own.active(segment)] * batch
                    starts += [start + i * total for i in range(batch)]
                    sizes += [count] * batch
                    elements += range(element, element + batch)
                    element += batch
                    if source and source[-1][1] == at:
                        source[-1] = source[-1][0], at + count * batch
                    elif count:
                        source.append((at, at + count * batch))
                    if not before:
                        active = sum(map(own.active_count, images))
                        complete += [active == total] * batch
                at += count * batch
        target = torch.cat(sites)
        target += torch.repeat_interleave(torch.tensor(starts), torch.tensor(sizes))
        if len(source) == 1:
            return Placement(slice(*source[0]), moved(target, device), sizes, elements, complete)
        index = torch.cat([torch.arange(0), *(torch.arange(*span) for span in source)])
        return Placement(moved(index, device), moved(target, device), sizes, elements, complete)

    def _add_sums(
        self, tap: str, place: Placement, new: Tensor, caches: Sequence[RollingCache]
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
        place: Placement,
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


class RollingPool:
    """Holds the rolling caches of many requests in a bounded number of bytes.

    Args:
        nbytes: The most bytes that all caches hold.
        requests: How many requests of equal size a block of buffers has room for.
    """

    def __init__(self, nbytes: int, requests: int = 16) -> None:
        self.limit, self.requests = nbytes, requests
        self._blocks: dict[tuple[str, int, torch.device], list[RowBlock]] = {}
        self._left: deque[Callable[[], None]] = deque()  # of closed caches, in any thread

    def nbytes(self) -> int:
        """Return the bytes that are held: of all buffers, and of each request's outputs."""
        self._collect()
        return sum(block.nbytes + block.own for block in self._all())

    @property
    def written(self) -> int:
        """Return the bytes of rows and statistics that steps have replaced so far."""
        return sum(block.written for block in self._all())

    def start(
        self, program: Program, recording: StepCache, nbytes: int | None = None
    ) -> RollingCache:
        """Return a cache with the values of a recorded step, in full precision.

        Args:
            program: The program that made the recording.
            recording: The first step of the request, or a template's.
            nbytes: The most bytes of this request. If it takes more, the first stretches compute
                all sites in every step, and nothing is kept of them.
        """
        interface = program.interface
        if recording.program != program.code:
            raise CacheError("RollingPool.start(): another program made this recording")
        first, kept = fitting(interface, recording, nbytes)
        counts = rows_by_group(interface, kept)
        own = sum(v.nbytes for v in kept.output if isinstance(v, Tensor))
        own += sum(stats.total.nbytes + stats.centre.nbytes for stats in kept.stats.values())
        device = next((v.device for v in kept.output if isinstance(v, Tensor)), torch.device("cpu"))
        self._collect()
        block, starts = self._room(program, first, device, kept, counts, own)
        block.own += own
        rows = {}
        for tap, value in kept.rows.items():
            start = starts[group_of(interface, interface.taps[tap].segments)]
            full = whole(value)
            part = block.rows[tap][start : start + full.shape[0] * full.shape[1]]
            rows[tap] = part.view(full.shape).copy_(full)
        stats = {}
        for key, found in kept.stats.items():
            start, full = starts[group_of(interface, key[0])], whole(found.values)
            part = block.values[key][start : start + full.shape[0] * full.shape[1]]
            values = part.view(full.shape).copy_(full)
            stats[key] = SiteStats(values, found.total.clone(), found.centre.clone(), found.size)
        named = {f.name: getattr(kept, f.name) for f in fields(StepCache)}
        output = [v.clone() if isinstance(v, Tensor) else v for v in kept.output]
        named |= {"rows": rows, "stats": stats, "sums": {}, "output": output}
        cache = RollingCache(**named, block=block, starts=starts, in_full=range(1, first + 1))

        def leave() -> None:
            block.give(starts, counts)
            block.own -= own

        # appended only: a collected object may be finalized inside of start()
        cache._free = weakref.finalize(cache, self._left.append, leave)
        return cache

    def _all(self) -> list[RowBlock]:
        return [block for blocks in self._blocks.values() for block in blocks]

    def _collect(self) -> None:
        while self._left:
            self._left.popleft()()

    def _room(
        self,
        program: Program,
        first: int,
        device: torch.device,
        like: StepCache,
        counts: Mapping[Group, int],
        own: int,
    ) -> tuple[RowBlock, dict[Group, int]]:
        """Return a block with room for a request, and where the request's rows start in it."""
        kind = program.code, first, device
        for block in self._blocks.get(kind, ()):
            starts = block.take(counts)
            if starts is not None:
                return block, starts
        for others in self._blocks.values():
            others[:] = [block for block in others if not block.unused]
        unit = buffer_bytes(program.interface, like)
        room = self.limit - sum(block.nbytes + block.own for block in self._all())
        requests = min(self.requests, room // (unit + own))
        if requests < 1:
            raise CacheError(
                f"RollingPool: a request of {unit + own} bytes doesn't fit, {max(room, 0)} of "
                f"{self.limit} are left; close other caches, give the pool more bytes, or limit "
                "the bytes of each request"
            )
        scaled = {group: requests * count for group, count in counts.items()}
        block = RowBlock(program.interface, like, scaled, requests * unit)
        self._blocks.setdefault(kind, []).append(block)
        starts = block.take(counts)
        assert starts is not None
        return block, starts


def write_rows(
    frame: Batched, caches: Mapping[int, RollingCache], emitted: Sequence[Tensor]
) -> None:
    """Replace the rows that a batch computed in the caches of its members, given by number."""
    blocks: dict[int, dict[int, RollingCache]] = {}
    for number, cache in caches.items():
        blocks.setdefault(id(cache.block), {})[number] = cache
    for written in blocks.values():
        next(iter(written.values())).block.write(frame, written, emitted)


def group_of(interface: Interface, segments: Sequence[str]) -> Group:
    """Return the image segments without their regions."""
    return tuple(filter(is_image, interface.pyramid.base_segments(segments)))


def rows_by_group(interface: Interface, cache: StepCache) -> dict[Group, int]:
    """Return how many rows a recording has in each row set."""
    counts: dict[Group, int] = {}
    for tap, rows in cache.rows.items():
        shape = tensors_of(rows)[0].shape
        counts[group_of(interface, interface.taps[tap].segments)] = shape[0] * shape[1]
    for key, stats in cache.stats.items():
        shape = tensors_of(stats.values)[0].shape
        counts[group_of(interface, key[0])] = shape[0] * shape[1]
    return counts


def buffer_bytes(interface: Interface, cache: StepCache) -> int:
    """Return the bytes of a recording's rows and statistics in full precision."""
    counts = rows_by_group(interface, cache)
    total = 0
    for name, rows in cache.rows.items():
        tap = interface.taps[name]
        count = counts[group_of(interface, tap.segments)]
        total += count * prod(tap.shape) * rows.dtype.itemsize
    for key, stats in cache.stats.items():
        width = stats.total.shape[1] * stats.values.dtype.itemsize
        total += counts[group_of(interface, key[0])] * width
    return total


def fitting(
    interface: Interface, recording: StepCache, nbytes: int | None
) -> tuple[int, StepCache]:
    """Return how many first stretches have to compute all sites, and what the others read."""
    stretches = len(interface.regions_of(STRETCH))
    for first in range(stretches + 1):
        kept = part_behind(interface, recording, first)
        small = sum(v.nbytes for v in kept.output if isinstance(v, Tensor))
        small += sum(stats.total.nbytes + stats.centre.nbytes for stats in kept.stats.values())
        least = buffer_bytes(interface, kept) + small
        if nbytes is None or least <= nbytes:
            return first, kept
    raise CacheError(
        f"RollingPool: {nbytes} bytes are too few for a request, which needs {least} even if all "
        f"of its {stretches} stretches compute all sites; allow it more, or run it dense"
    )


def part_behind(interface: Interface, recording: StepCache, first: int) -> StepCache:
    """Return the part of a recording that is read if the first stretches compute all sites."""

    def stretch_of(segments: Sequence[str]) -> int:
        region = interface.pyramid.region_in(segments)
        kind = interface.regions[region - 1] if region else None
        return kind.inside if kind is not None and kind.kind != STRETCH else region

    taps = set()
    for source in interface.inputs.values():
        match source:
            case Rest(tap, segments) | RestStats(tap, segments) | RestSum(tap, segments):
                read = stretch_of(segments)
            case Halo(tap, window):
                read = stretch_of((grid_segment(window.target),))
            case Loaded(tap, before, after):
                read = stretch_of(after)
                if 1 <= stretch_of(before) <= first:  # all rows are at hand
                    continue
            case _:
                continue
        if not 1 <= read <= first:
            taps.add(tap)
    keys = {(t.segments, t.stats) for t in interface.taps.values() if t.name in taps and t.stats}
    return changed(
        recording,
        rows={tap: rows for tap, rows in recording.rows.items() if tap in taps},
        stats={key: stats for key, stats in recording.stats.items() if key in keys},
    )
