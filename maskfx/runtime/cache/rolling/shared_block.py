"""SharedBuffers: the buffers of a block of rolling rows in memory that other processes map.

Ranks read the rows of requests there. The process with the block alone writes them, between steps,
so a step that fails in a rank leaves them as they were. Rows and statistics of a device move to
host memory with the block; steps read them from there.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from maskfx.ir.programs.program import Interface
from maskfx.ir.programs.sources import RestSum
from maskfx.runtime.cache.rolling.patch_changes import PatchChanges
from maskfx.runtime.cache.rolling.places import Group
from maskfx.runtime.cache.rolling.read_inputs import ReadInputs
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, RowBlock, StatsKey
from maskfx.runtime.cache.step_cache import SiteStats, StepCache
from maskfx.runtime.hardware.devices import CPU, moved
from maskfx.runtime.processes import memory_files

ALIGN = 64  # bytes
NAME = "maskfx-rows"
APART = ("rows", "stats", "sums", "output")  # fields of a cache that aren't sent as they are


@dataclass(frozen=True)
class Buffer:
    """Where a buffer lies in the memory file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def within(self, memory: Tensor) -> Tensor:
        nbytes = prod(self.shape) * self.dtype.itemsize
        part = memory[self.offset : self.offset + nbytes]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SharedBuffers:
    """The buffers of a block.

    Args:
        number: The block's.
        nbytes: The size of the memory file.
        rows: By tap.
        values: The statistics of sites, by row set and group count.
        inputs: By tap, the rows that stretches last read, of a block that keeps them.
        patch_of: The patch of each row, of such a block.
    """

    number: int
    nbytes: int
    rows: dict[str, Buffer]
    values: dict[StatsKey, Buffer]
    inputs: dict[str, Buffer]
    patch_of: dict[Group, Buffer]

    @classmethod
    def of(cls, block: RowBlock) -> SharedBuffers:
        at = 0

        def placed(value: Tensor) -> Buffer:
            nonlocal at
            start, at = at, at + -(-value.nbytes // ALIGN) * ALIGN
            return Buffer(start, tuple(value.shape), value.dtype)

        rows = {tap: placed(value) for tap, value in block.rows.items()}
        values = {key: placed(value) for key, value in block.values.items()}
        if block.inputs is None:
            return cls(block.number, max(at, ALIGN), rows, values, {}, {})
        inputs = {tap: placed(value) for tap, value in block.inputs.rows.items()}
        patch_of = {group: placed(value) for group, value in block.patch_of.items()}
        return cls(block.number, max(at, ALIGN), rows, values, inputs, patch_of)

    def mapped(self, descriptor: int) -> MappedBuffers:
        memory = torch.from_file(
            memory_files.path_of(descriptor), shared=True, size=self.nbytes, dtype=torch.uint8
        )
        return MappedBuffers(
            {tap: one.within(memory) for tap, one in self.rows.items()},
            {key: one.within(memory) for key, one in self.values.items()},
            {tap: one.within(memory) for tap, one in self.inputs.items()},
            {group: one.within(memory) for group, one in self.patch_of.items()},
        )


@dataclass(frozen=True)
class MappedBuffers:
    """The buffers, in a process that has mapped them."""

    rows: dict[str, Tensor]
    values: dict[StatsKey, Tensor]
    inputs: dict[str, Tensor]
    patch_of: dict[Group, Tensor]

    def block(self, interface: Interface) -> RowBlock:
        """Return a block over the buffers, from which nothing is taken."""
        found = RowBlock(interface, StepCache("", {}, torch.float32, [], {}), {}, 0)
        found.rows, found.values = self.rows, self.values
        found.taps, found.keys = set(self.rows), set(self.values)
        found.patch_of = self.patch_of
        found.inputs = ReadInputs(found, self.inputs) if self.inputs else None
        return found


class SharedBlock:
    """A block whose buffers lie in a memory file.

    Making one moves them there; no step may read the rows meanwhile. It raises OSError if there is
    no memory, or the system has no memory files. The file is closed with this object.

    Args:
        block: The block, which isn't held.
    """

    def __init__(self, block: RowBlock) -> None:
        if not memory_files.exist():
            raise OSError("this system has no memory files")
        with block.lock:
            self.buffers = SharedBuffers.of(block)
            self.descriptor = memory_files.memory_file(NAME, self.buffers.nbytes)
            weakref.finalize(self, os.close, self.descriptor)
            there = self.buffers.mapped(self.descriptor)
            for tap, rows in block.rows.items():
                there.rows[tap].copy_(rows)
            for key, values in block.values.items():
                there.values[key].copy_(values)
            block.rows, block.values = there.rows, there.values
            if block.inputs is not None:
                for tap, rows in block.inputs.rows.items():
                    there.inputs[tap].copy_(rows)
                for group, patches in block.patch_of.items():
                    there.patch_of[group].copy_(patches)
                block.inputs.rows, block.patch_of = there.inputs, there.patch_of
            for cache in list(block.caches):
                cache.stats = {key: stats.on(CPU) for key, stats in cache.stats.items()}
                cache.sums = {tap: moved(total, CPU) for tap, total in cache.sums.items()}
                cache.find_rows()


@dataclass(frozen=True)
class RollingContents:
    """What another process needs of a rolling cache once, beside the buffers of its block.

    Args:
        named: Fields of the cache.
        starts, totals: Where its rows lie.
        in_full: See `RollingCache`.
        shapes: The shape of the rows of each tap.
        stats: By row set and group count, the shape of the statistics of sites, and their size.
        compares: By which patches the inputs of stretches are compared; None if they aren't.
    """

    named: dict[str, Any]
    starts: dict[Group, int]
    totals: dict[Group, int]
    in_full: range
    shapes: dict[str, tuple[int, ...]]
    stats: dict[StatsKey, tuple[tuple[int, ...], Tensor]]
    compares: PatchChanges | None

    @classmethod
    def of(cls, cache: RollingCache) -> RollingContents:
        named = {f.name: getattr(cache, f.name) for f in fields(StepCache) if f.name not in APART}
        shapes = {tap: tuple(rows.shape) for tap, rows in cache.rows.items()}  # type: ignore[union-attr]
        stats = {key: (tuple(s.values.shape), s.size) for key, s in cache.stats.items()}  # type: ignore[union-attr]
        compares = None
        if cache.compares_inputs and cache.changes is not None:
            compares = replace(cache.changes, _parts=[])
        return cls(named, cache.starts, cache.totals, cache.in_full, shapes, stats, compares)

    def cache(self, block: RowBlock) -> RollingCache:
        """Return the cache over a block; `RollingState.put` gives it its sums."""
        nothing = torch.empty(0)
        empty = partial(torch.empty, device="meta")  # gives shapes, until the rows are found
        found = RollingCache(
            **self.named,
            output=[],
            rows={tap: empty(shape) for tap, shape in self.shapes.items()},
            stats={
                key: SiteStats(empty(shape), nothing, nothing, size)
                for key, (shape, size) in self.stats.items()
            },
            block=block,
            starts=self.starts,
            totals=self.totals,
            in_full=self.in_full,
            changes=self.compares,
        )
        found.find_rows()
        return found


@dataclass(frozen=True)
class RollingState:
    """What a step changes of a rolling cache, beside the rows in the buffers of its block.

    Args:
        stats: The sums and centres of statistics.
        sums: The sums of taps over all sites.
    """

    stats: dict[StatsKey, tuple[Tensor, Tensor]]
    sums: dict[str, Tensor]

    @classmethod
    def of(cls, cache: RollingCache) -> RollingState:
        for source in cache.block.interface.inputs.values():
            if isinstance(source, RestSum) and source.tap in cache.rows:
                cache.total_of(source.tap)  # from now on steps add to it
        stats = {key: (stats.total, stats.centre) for key, stats in cache.stats.items()}
        return cls(stats, dict(cache.sums))

    def put(self, cache: RollingCache) -> None:
        """Give these values to the cache of another process."""
        for key, (total, centre) in self.stats.items():
            stats = cache.stats[key]
            cache.stats[key] = SiteStats(stats.values, total, centre, stats.size)
        cache.sums = dict(self.sums)
