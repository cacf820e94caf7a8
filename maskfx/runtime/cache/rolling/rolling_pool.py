"""RollingPool: makes rolling caches of recorded steps, within a bounded number of bytes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import prod

import torch
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.ir.geometry.lanes import grid_segment
from maskfx.ir.programs.program import STRETCH, Interface, Program
from maskfx.ir.programs.sources import Halo, Kept, Loaded, Rest, RestStats, RestSum
from maskfx.runtime.cache.rolling.patch_changes import PatchChanges, boundary_taps, reading_sets
from maskfx.runtime.cache.rolling.places import Group
from maskfx.runtime.cache.rolling.read_inputs import ReadInputs
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, RowBlock, group_of
from maskfx.runtime.cache.rows import tensors_of, whole
from maskfx.runtime.cache.step_cache import SiteStats, StepCache, changed
from maskfx.runtime.hardware.devices import copied
from maskfx.runtime.sites.patches import PatchGrid


class RollingPool:
    """Holds the rolling caches of many requests in a bounded number of bytes.

    Args:
        nbytes: The most bytes that all caches hold.
        requests: How many requests of equal size a block of buffers has room for.
    """

    def __init__(self, nbytes: int, requests: int = 16) -> None:
        self.limit, self.requests = nbytes, requests
        self._lock = threading.Lock()  # pipelines may start requests in several threads
        self._blocks: dict[tuple[str, int, torch.device, bool], list[RowBlock]] = {}
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
        self,
        program: Program,
        recording: StepCache,
        nbytes: int | None = None,
        patches: PatchGrid | None = None,
        since_read: bool = False,
    ) -> RollingCache:
        """Return a cache with the values of a recorded step, in full precision.

        Args:
            program: The program that made the recording.
            recording: The first step of the request, or a template's.
            nbytes: The most bytes of this request. If it takes more, the first stretches compute
                all sites in every step, and nothing is kept of them.
            patches: The patches whose changes are summed at each step (`RollingCache.changes`).
            since_read: Whether these are the changes since stretches last read their inputs, which
                are kept for it.
        """
        with self._lock:
            return self._start(program, recording, nbytes, patches, since_read)

    def _start(
        self,
        program: Program,
        recording: StepCache,
        nbytes: int | None,
        patches: PatchGrid | None,
        since_read: bool,
    ) -> RollingCache:
        interface = program.interface
        if recording.program != program.code:
            raise CacheError(
                "RollingPool.start(): another program made this recording; record it again, with "
                "the denoiser whose steps read it"
            )
        first, kept = fitting(interface, recording, nbytes, since_read)
        counts = rows_by_group(interface, kept)
        own = sum(v.nbytes for v in kept.output if isinstance(v, Tensor))
        own += sum(stats.total.nbytes + stats.centre.nbytes for stats in kept.stats.values())
        device = next((v.device for v in kept.output if isinstance(v, Tensor)), torch.device("cpu"))
        self._collect()
        block, starts = self._room(program, (first, device, since_read), kept, counts, own)
        block.own += own
        with block.lock:
            cache = filled(block, kept, starts, counts, first)

        def leave() -> None:
            block.give(starts, counts)
            block.own -= own

        # appended only: a collected object may be finalized inside of start()
        cache._free = weakref.finalize(cache, self._left.append, leave)
        if patches is not None:
            stretches = len(interface.regions_of(STRETCH))
            boundaries = boundary_taps(interface)
            block.watch(cache, PatchChanges(patches, boundaries, stretches, since_read))
        if block.inputs is not None:
            block.inputs.start(block, cache)
        return cache

    def _all(self) -> list[RowBlock]:
        return [block for blocks in self._blocks.values() for block in blocks]

    def _collect(self) -> None:
        while self._left:
            self._left.popleft()()

    def _room(
        self,
        program: Program,
        kind: tuple[int, torch.device, bool],
        like: StepCache,
        counts: Mapping[Group, int],
        own: int,
    ) -> tuple[RowBlock, dict[Group, int]]:
        """Return a block with room for a request, and where the request's rows start in it."""
        key = program.code, *kind
        for block in self._blocks.get(key, ()):
            starts = block.take(counts)
            if starts is not None:
                return block, starts
        for others in self._blocks.values():
            others[:] = [block for block in others if not block.unused]
        unit = buffer_bytes(program.interface, like, since_read=kind[2])
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
        if kind[2]:
            block.inputs = ReadInputs(block)
        self._blocks.setdefault(key, []).append(block)
        starts = block.take(counts)
        assert starts is not None
        return block, starts


def filled(
    block: RowBlock,
    kept: StepCache,
    starts: dict[Group, int],
    counts: Mapping[Group, int],
    first: int,
) -> RollingCache:
    """Write a recording to a block; return the cache that has it there."""
    interface, rows = block.interface, {}
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
        own = (copied(value, block.device) for value in (found.total, found.centre, found.size))
        stats[key] = SiteStats(values, *own)
    named = {f.name: getattr(kept, f.name) for f in fields(StepCache)}
    output = [v.clone() if isinstance(v, Tensor) else v for v in kept.output]
    named |= {"rows": rows, "stats": stats, "sums": {}, "output": output}
    batch = kept.sizes["batch"]
    totals = {group: count // batch for group, count in counts.items()}
    return RollingCache(
        **named, block=block, starts=starts, totals=totals, in_full=range(1, first + 1)
    )


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


def buffer_bytes(interface: Interface, cache: StepCache, since_read: bool = False) -> int:
    """Return the bytes of a recording's rows and statistics in full precision.

    With `since_read`, the inputs of stretches are kept a second time.
    """
    twice = reading_sets(interface, boundary_taps(interface)) if since_read else {}
    counts = rows_by_group(interface, cache)
    total = 0
    for name, rows in cache.rows.items():
        tap = interface.taps[name]
        count = counts[group_of(interface, tap.segments)]
        total += count * prod(tap.shape) * rows.dtype.itemsize * (2 if name in twice else 1)
    for key, stats in cache.stats.items():
        width = stats.total.shape[1] * stats.values.dtype.itemsize
        total += counts[group_of(interface, key[0])] * width
    return total


def fitting(
    interface: Interface, recording: StepCache, nbytes: int | None, since_read: bool = False
) -> tuple[int, StepCache]:
    """Return how many first stretches have to compute all sites, and what the others read."""
    stretches = len(interface.regions_of(STRETCH))
    for first in range(stretches + 1):
        kept = part_behind(interface, recording, first)
        small = sum(v.nbytes for v in kept.output if isinstance(v, Tensor))
        small += sum(stats.total.nbytes + stats.centre.nbytes for stats in kept.stats.values())
        least = buffer_bytes(interface, kept, since_read) + small
        if nbytes is None or least <= nbytes:
            return first, kept
    raise CacheError(
        f"RollingPool: {nbytes} bytes are too few for a request, which needs {least} even if all "
        f"of its {stretches} stretches compute all sites; allow it more, or run it dense"
    )


def part_behind(interface: Interface, recording: StepCache, first: int) -> StepCache:
    """Return the part of a recording that is read if the first stretches compute all sites."""
    taps, stretch_of = set(), interface.stretch_of
    for source in interface.inputs.values():
        match source:
            case Rest(tap, segments) | RestStats(tap, segments) | RestSum(tap, segments):
                read = stretch_of(segments)
            case Kept(tap, segments):
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
