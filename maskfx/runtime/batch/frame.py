"""Frame: builds the inputs of a compiled graph for one ragged batch.

A ragged batch concatenates the rows of members with different numbers of active sites. Owners,
spans and tables depend on the batch's masks and sizes alone and are kept from step to step; rows of
arguments and of the cache are picked in every step. What operators read is on the batch's device;
spans, which Python reads, and the sites from which tables are made stay on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from maskfx.errors import CacheError, InputError
from maskfx.ir.lanes import Batch, Lane, is_image
from maskfx.ir.late import is_late, wait_for
from maskfx.ir.program import (
    Cached,
    Down,
    Enter,
    Given,
    Halo,
    Interface,
    Kept,
    Loaded,
    Neighbours,
    Owner,
    Pairs,
    PairTable,
    Parents,
    RankGroups,
    Requests,
    Rest,
    RestOwner,
    RestShare,
    RestSpans,
    RestStats,
    RestSum,
    Spans,
    Subsites,
    Up,
    Updated,
)
from maskfx.ir.pyramid import Window
from maskfx.ir.values import Equality
from maskfx.ops import wide
from maskfx.runtime.batch.rows import index_rows, pick_rows, picked_bytes, take_rows
from maskfx.runtime.cache.loader import LoadedRows, LoadJob
from maskfx.runtime.cache.rolling import RollingCache, SharedRows, shared_rows
from maskfx.runtime.cache.rows import (
    InterpolatedRows,
    Rows,
    RowSubset,
    RowTables,
    device_of,
    pick,
    tensors_of,
)
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.devices import CPU, moved, read_here
from maskfx.runtime.lora.stacks import NamedSet, StackCache, Stacks
from maskfx.runtime.sites.active import ActiveSites

PLACES = 4096  # tables of rows in shared buffers that a frame keeps


@dataclass
class Member:
    """One request of a batch; it has as many owners (batch elements) as its `batch`."""

    sites: ActiveSites
    batch: int
    given: dict[str, Sequence[Any]]
    cache: StepCache | None = None
    recording: bool = False
    written: RollingCache | None = None
    device: torch.device = CPU
    adapters: NamedSet | None = None


@dataclass
class Frame:
    """Builds the inputs of one program for batches of the same members' sites and batch sizes.

    Args:
        interface: The program's inputs and outputs.
        sites: The active sites of each member.
        batches: The number of batch elements of each member.
        device: The device of the batch.
        tables: Copies of index tables on devices.
        equal: Compares values that members share; may be shared by frames.
        adapters: The matrices of the members' adapters; may be shared by frames.
        code: The program's.
        originals: The weights of the program's graph by name, if it has low-rank terms.
    """

    interface: Interface
    sites: tuple[ActiveSites, ...]
    batches: tuple[int, ...]
    device: torch.device = CPU
    tables: RowTables = field(default_factory=RowTables)
    equal: Equality = field(default_factory=Equality)
    adapters: StackCache = field(default_factory=StackCache)
    code: str = ""
    originals: Mapping[str, Tensor] = field(default_factory=dict)
    _adapted: tuple[Stacks, list[int | None]] | None = None
    _brought: bool = False
    _fixed: dict[str, Tensor] = field(default_factory=dict)
    _given: dict[str, tuple[list[Any], Tensor]] = field(default_factory=dict)
    _stacks: dict[Any, Tensor] = field(default_factory=dict)
    _counts: dict[tuple[str, ...], list[tuple[int, ...]]] = field(default_factory=dict)
    _picks: dict[str, list[Tensor]] = field(default_factory=dict)
    _indices: dict[tuple[str, ...], list[Tensor]] = field(default_factory=dict)
    _active: dict[tuple[str, ...], list[Tensor]] = field(default_factory=dict)
    _orders: dict[tuple[Any, ...], list[Tensor]] = field(default_factory=dict)
    _together: tuple[weakref.ref[Member], SharedRows | None] | None = None
    _places: dict[tuple[int, bytes], Tensor] = field(default_factory=dict)

    def fetch(
        self, members: Sequence[Member], loading: LoadedRows | None = None
    ) -> Callable[[str], Tensor]:
        """Return a function that gives an input by its name, for one step of these members."""
        self._stacks = {}
        self._bring(members)
        if self.originals:
            self._adapted = self._adapters_of(members)
        sources = self.interface.inputs
        if loading is None:
            return lambda name: self._input(name, sources[name], members)
        return lambda name: (
            loading.take(name) if name in loading else self._input(name, sources[name], members)
        )

    def jobs(self, members: Sequence[Member], names: Iterable[str]) -> list[LoadJob]:
        """Return load jobs for the cached rows among these inputs.

        Rows that are on the batch's device already need no load.
        """
        self._bring(members)
        out = []
        for name, nbytes in self.loaded_bytes(members, names).items():
            source = self.interface.inputs[name]
            assert isinstance(source, Cached), "no other input has cached rows"
            # copied before the load begins, which reads it on a separate stream
            self.tables.bring(self._needed(name, source, members), self.device)
            picks = self._picks_of(name, source)
            job = partial(self._pick, source.tap, picks, members, take_rows)
            out.append(LoadJob(name, nbytes, job))
        return out

    def loaded_bytes(self, members: Sequence[Member], names: Iterable[str]) -> dict[str, int]:
        """Return the bytes of those of these inputs that have to be loaded."""
        found = {}
        for name in names:
            source = self.interface.inputs[name]
            if not isinstance(source, Cached):
                continue
            pairs = self.stored(name, members)
            found[name] = sum(
                picked_bytes(rows, index) for rows, index in pairs if self._loads(rows)
            )
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    def stored(self, name: str, members: Sequence[Member]) -> list[tuple[Rows, Tensor]]:
        """Return the cached rows of an input and the sites read of them, of members with any."""
        source = self.interface.inputs[name]
        assert isinstance(source, Cached), "no other input has cached rows"
        return [
            (self._rows_of(m.cache, source.tap), index)
            for m, index in zip(members, self._picks_of(name, source), strict=True)
            if m.cache is not None and len(index)
        ]

    def row_counts(self, name: str) -> list[int]:
        """Return, for each member, the number of cached rows in an input."""
        source = self.interface.inputs[name]
        assert isinstance(source, Cached), "no other input has cached rows"
        picks = zip(self._picks_of(name, source), self.batches, strict=True)
        return [len(index) * batch for index, batch in picks]

    def _loads(self, rows: Rows) -> bool:
        """Return True if rows have to be loaded; on a CPU always, as from a slower memory."""
        return self.device.type == "cpu" or any(t.device != self.device for t in tensors_of(rows))

    def late(self, members: Sequence[Member]) -> frozenset[str]:
        """Return the inputs whose values are still being computed elsewhere."""
        if not any(is_late(value) for m in members for value in m.given["step"]):
            return frozenset()
        return frozenset(
            name
            for name, source in self.interface.inputs.items()
            if isinstance(source, Given)
            and source.origin == "step"
            and any(is_late(m.given["step"][source.index]) for m in members)
        )

    def inputs(self, members: Sequence[Member]) -> list[Tensor]:
        """Return all inputs of the graph in its order."""
        return list(map(self.fetch(members), self.interface.inputs))

    def _bring(self, members: Sequence[Member]) -> None:
        """Copy all tables of this batch to its device, in one copy, before its first step."""
        if self.device.type == "cpu" or self._brought:
            return
        self._brought = True
        needed: list[Tensor] = []
        for name, source in self.interface.inputs.items():
            needed += self._needed(name, source, members)
        for lane in self.interface.outputs:
            if lane is not None and lane.kind == "rows":
                needed += self.active(lane.segments)
        self.tables.bring(needed, self.device)

    def _needed(self, name: str, source: object, members: Sequence[Member]) -> list[Tensor]:
        """Return the tables that an input is, or that its rows are picked with."""
        match source:
            case Given(_, _, lane):
                images = filter(is_image, lane.segments)
                return [s.active(i) for i in images for s in self.sites if not s.full]
            case Halo() | Rest() | Loaded() | Kept():
                if self._shared_rows(source.tap, self._picks_of(name, source), members):
                    return []  # the places are there already
                picks = zip(members, self._picks_of(name, source), strict=True)
                return [
                    table
                    for m, index in picks
                    if m.cache is not None and len(index)
                    for table in self._indexing(self._rows_of(m.cache, source.tap), index)
                ]
            case RestStats(_, segments):
                return self.active(tuple(filter(is_image, segments)))
            case RestSum(_, segments):
                return self.active(segments)
            case Pairs() | PairTable():
                return [*self._order(source.keys, True), *self._order(source.queries, False)]
            case Spans() | RestSpans() | RankGroups() | Down() | Up() | Updated():
                return []
        return [self._table_of(name, source)]

    def _indexing(self, rows: Rows, index: Tensor) -> list[Tensor]:
        """Return the tables that pick these sites out of rows on the batch's device."""
        if isinstance(rows, InterpolatedRows):
            return self._indexing(rows.first, index) + self._indexing(rows.second, index)
        if device_of(rows) != self.device:
            return []
        if isinstance(rows, RowSubset):
            return [self.tables.places(rows, index)]
        return [index]

    def _input(self, name: str, source: object, members: Sequence[Member]) -> Tensor:
        match source:
            case Given(origin, index, lane):
                values = [wait_for(m.given[origin][index]) for m in members]
                if origin != "request":
                    return self.gather(values, lane)
                kept = self._given.get(name)
                if kept is None or any(a is not b for a, b in zip(kept[0], values, strict=True)):
                    kept = self._given[name] = (values, self.gather(values, lane))
                return kept[1]
            case Halo() | Rest() | Loaded() | Kept():
                return self._pick(source.tap, self._picks_of(name, source), members)
            case RestStats(tap, segments):
                return self._stats(tap, segments, members)
            case RestSum(tap, segments):
                return self._sum(tap, segments, members)
            case Pairs():
                return torch.cat([own.reshape(-1) for own in self._pairs(source, members)])
            case PairTable():
                return self._pair_table(source, members)
            case Spans() | RestSpans():
                return self._table_of(name, source)
            case Down() | Up():
                return self._stacks_of()[0].read(source)
            case Updated():
                stacks, owners = self._stacks_of()
                return stacks.updated(source, owners)
            case RankGroups(_, segments):
                stacks, owners = self._stacks_of()
                return stacks.groups(source, self._row_counts(segments), owners)
            case _:
                return self.tables.on(self._table_of(name, source), self.device)

    def _table_of(self, name: str, source: object) -> Tensor:
        if name not in self._fixed:
            self._fixed[name] = self._table(source)
        return self._fixed[name]

    def _picks_of(self, name: str, source: Cached) -> list[Tensor]:
        if name not in self._picks:
            self._picks[name] = self.picks(source)
        return self._picks[name]

    def picks(self, source: Cached) -> list[Tensor]:
        """Return, for each member, the indices of the cached rows that are loaded."""
        match source:
            case Halo(_, window):
                return [s.window(window)[1] for s in self.sites]
            case Rest(_, segments):
                if segments not in self._indices:
                    self._indices[segments] = [s.laid_out(segments, s.rest) for s in self.sites]
                return self._indices[segments]
            case Loaded(_, before, after):
                return [self._loaded_index(s, before, after) for s in self.sites]
            case Kept(_, segments):
                return [
                    s.laid_out(
                        segments, s.active if any(map(len, map(s.rest, segments))) else s.rest
                    )
                    for s in self.sites
                ]
            case RestShare():
                raise AssertionError("shares of the rest are picked by the frame of a rank")

    def forget_given(self) -> None:
        """Drop the values that are computed once per request, because they are computed again."""
        self._given.clear()

    def active(self, segments: tuple[str, ...]) -> list[Tensor]:
        """Return, for each member, the indices of its active sites in the concatenated segments."""
        if segments not in self._active:
            self._active[segments] = [s.laid_out(segments, s.active) for s in self.sites]
        return self._active[segments]

    # Tables, which depend on masks and sizes alone.

    def counts(self, segment: str) -> list[int]:
        """Return the number of active rows of each owner."""
        return [
            s.active_count(segment)
            for s, b in zip(self.sites, self.batches, strict=True)
            for _ in range(b)
        ]

    def _table(self, source: object) -> Tensor:
        match source:
            case Owner(segments):
                count = sum(self.batches)
                if count == 1:
                    rows = sum(self.sites[0].active_count(s) for s in segments)
                    return torch.zeros(rows, dtype=torch.long)
                each = torch.arange(count)
                return torch.cat(
                    [each.repeat_interleave(torch.tensor(self.counts(s))) for s in segments]
                )
            case Spans(segments):
                return self._spans([self.counts(s) for s in segments])
            case RestSpans(segments):
                return self._rest_spans(segments)
            case Requests():
                return torch.arange(sum(self.batches))
            case RestOwner(segments):
                spans = self._rest_spans(segments)
                counts = (spans[:, 1::2] - spans[:, ::2]).sum(1)
                return torch.arange(len(spans)).repeat_interleave(counts)
            case Enter(before, after):
                return self._enter(before, after)
            case Neighbours(window):
                return self._neighbours(window)
            case Parents(source_level, target):
                return self._offset(
                    [s.parents(source_level, target) for s in self.sites],
                    f"grid{source_level}",
                    1,
                )
            case Subsites(coarse, fine, patch):
                return self._offset(
                    [s.subsites(coarse, fine, patch) for s in self.sites],
                    f"grid{coarse}",
                    patch * patch,
                )
        raise AssertionError(f"no way to build {source}")

    def _spans(self, counts: list[list[int]]) -> Tensor:
        owners = sum(self.batches)
        out, start = [[0] * (2 * len(counts)) for _ in range(owners)], 0
        for i, segment in enumerate(counts):
            for owner, n in enumerate(segment):
                out[owner][2 * i], out[owner][2 * i + 1] = start, start + n
                start += n
        return torch.tensor(out, dtype=torch.long).view(owners, -1)

    def _rest_spans(self, segments: tuple[str, ...]) -> Tensor:
        """Return the spans of the rest (inactive sites): owner by owner, each by segment."""
        out, start = [], 0
        for sites, batch in zip(self.sites, self.batches, strict=True):
            for _ in range(batch):
                row = []
                for segment in segments:
                    n = sites.count(segment) - sites.active_count(segment)
                    row += [start, start + n]
                    start += n
                out.append(row)
        return torch.tensor(out, dtype=torch.long).view(sum(self.batches), -1)

    def _enter(self, before: tuple[str, ...], after: tuple[str, ...]) -> Tensor:
        """Return an Enter's table: rows of `before` lie by segment, loaded ones by owner."""
        starts, at = [], 0
        for segment in before:
            starts.append(at)
            at += sum(self.counts(segment))
        pieces: list[list[Tensor]] = [[] for _ in after]
        for sites, batch in zip(self.sites, self.batches, strict=True):
            for _ in range(batch):
                for j, (old, new) in enumerate(zip(before, after, strict=True)):
                    own = sites.active_count(old)
                    if is_image(old):
                        table, missing = sites.enter(old, new)
                        pieces[j].append(table + torch.where(table < own, starts[j], at - own))
                        at += len(missing)
                    else:
                        pieces[j].append(torch.arange(starts[j], starts[j] + own))
                    starts[j] += own
        return torch.cat([p for piece in pieces for p in piece])

    def _neighbours(self, window: Window) -> Tensor:
        tables = [s.window(window) for s in self.sites]
        if sum(self.batches) == 1:
            return tables[0][0]
        segment = f"grid{window.source}"
        rows = sum(self.counts(segment))
        halos = sum(len(h) * b for (_, h), b in zip(tables, self.batches, strict=True))
        out, base_row, base_halo = [], 0, rows
        for sites, batch, (table, halo) in zip(self.sites, self.batches, tables, strict=True):
            own = sites.active_count(segment)
            for _ in range(batch):
                shift = torch.where(table < own, base_row, base_halo - own)
                moved = table + shift
                moved[table == own + len(halo)] = rows + halos
                out.append(moved)
                base_row += own
                base_halo += len(halo)
        return torch.cat(out)

    def _offset(self, tables: list[Tensor], segment: str, scale: int) -> Tensor:
        if sum(self.batches) == 1:
            return tables[0]
        out, base = [], 0
        for sites, batch, table in zip(self.sites, self.batches, tables, strict=True):
            for _ in range(batch):
                out.append(table + base * scale)
                base += sites.active_count(segment)
        return torch.cat(out)

    # Adapters.

    def _adapters_of(self, members: Sequence[Member]) -> tuple[Stacks, list[int | None]]:
        """Return the stacks of the members' adapters, and the index of each owner's set."""
        sets = [member.adapters for member in members]
        stacks, indices = self.adapters.of(self.code, sets, self.originals, self.device)
        return stacks, [i for i, b in zip(indices, self.batches, strict=True) for _ in range(b)]

    def _stacks_of(self) -> tuple[Stacks, list[int | None]]:
        assert self._adapted is not None, "a graph with low-rank terms has their weights"
        return self._adapted

    def _row_counts(self, segments: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return the rows of each owner by segment; without segments, one row for each."""
        if segments not in self._counts:
            found = [tuple(self.counts(s)) for s in segments]
            self._counts[segments] = found or [(1,) * sum(self.batches)]
        return self._counts[segments]

    # Rows of full values.

    def gather(self, values: Sequence[Any], lane: Lane) -> Tensor:
        """Return the members' full values as rows, as one row per owner, or as one shared value."""
        if lane.kind == "const":
            first: Tensor = values[0]
            for other in values[1:]:
                if not self.equal(other, first):
                    raise InputError(
                        f"step(): the members differ in a value of shape {tuple(first.shape)} that "
                        "the model uses for the whole batch; run them in separate calls"
                    )
            return first
        if lane.kind == "sample":
            axis = next(i for i, d in enumerate(lane.dims) if any(isinstance(a, Batch) for a in d))
            parts = []
            for value, batch in zip(values, self.batches, strict=True):
                own = value.reshape([1] * (len(lane.dims) - value.dim()) + list(value.shape))
                if own.shape[axis] % batch:
                    own = own.expand([batch if i == axis else -1 for i in range(own.dim())])
                parts.append(own)
            return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, axis)
        pieces: list[list[Tensor]] = [[] for _ in lane.segments]
        for value, sites, batch in zip(values, self.sites, self.batches, strict=True):
            for i, part in enumerate(pick_rows(value, lane, sites, self.tables)):
                part = part if part.shape[0] == batch else part.expand(batch, *part.shape[1:])
                pieces[i].append(part.flatten(0, 1))
        flat = [p for piece in pieces for p in piece]
        return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)

    # Rows of the cache.

    def _loaded_index(
        self, sites: ActiveSites, before: tuple[str, ...], after: tuple[str, ...]
    ) -> Tensor:
        out, base = [], 0
        for old, new in zip(before, after, strict=True):
            if is_image(old):
                missing = sites.enter(old, new)[1]
                out.append(missing + base if base else missing)
                base += sites.count(old) if len(before) > 1 else 0
        return out[0] if len(out) == 1 else torch.cat(out)

    def _pick(
        self,
        tap: str,
        picks: list[Tensor],
        members: Sequence[Member],
        take: Callable[[Tensor, Tensor], Tensor] = index_rows,
    ) -> Tensor:
        shared = self._shared_rows(tap, picks, members)
        if shared is not None:
            buffer, places = shared
            if len(places):
                return moved(take(read_here(buffer), places), self.device)
            return self._nothing(tap)
        out = []
        for member, index in zip(members, picks, strict=True):
            if member.cache is None or not len(index):  # the cache may lack the tap
                continue
            kept = self._rows_of(member.cache, tap)
            held = kept.rows if isinstance(kept, RowSubset) else kept
            if isinstance(kept, RowSubset):
                index = self.tables.places(kept, index)
            if isinstance(held, Tensor):
                index = self.tables.on(index, held.device)
                out += [moved(take(rows, index), self.device) for rows in read_here(held)]
            else:
                out.append(pick(held, index, self.device, self.tables).flatten(0, 1))
        if not out:
            return self._nothing(tap)
        return out[0] if len(out) == 1 else torch.cat(out)

    def _shared_rows(
        self, tap: str, picks: list[Tensor], members: Sequence[Member]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the buffer with all members' rows of a tap, if one has them, and the places."""
        if self._together is None or self._together[0]() is not members[0]:
            self._together = weakref.ref(members[0]), shared_rows([m.cache for m in members])
        shared = self._together[1]
        buffer = shared.block.rows.get(tap) if shared is not None else None
        if shared is None or buffer is None:
            return None
        key, starts = shared.starts(tap)
        places = self._places.get((id(picks), key))  # the frame holds the picks
        if places is None:
            if len(self._places) >= PLACES:
                self._places.clear()
            places = moved(shared.places(starts, picks), buffer.device)
            self._places[id(picks), key] = places
        return buffer, places

    def _rows_of(self, cache: StepCache, tap: str) -> Rows:
        if tap not in cache.rows:
            raise CacheError(
                f"EditStep.cache holds no rows of {tap}, which this edit reads; record the step "
                "again and keep them"
            )
        return cache.rows[tap]

    def _nothing(self, tap: str) -> Tensor:
        """Return zero rows in the tap's shape, for batches in which no member has rows."""
        kept = self.interface.taps[tap]
        return torch.empty(0, *kept.shape, dtype=kept.dtype, device=self.device)

    def _stats(self, tap: str, segments: tuple[str, ...], members: Sequence[Member]) -> Tensor:
        """Return one norm's part of the statistics, which all norms of a row set are built with."""
        kind = self.interface.taps[tap]
        key = (segments, kind.stats)
        if key not in self._stacks:
            parts = [self._rest_stats(key, members, i) for i in range(len(members))]
            self._stacks[key] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._stacks[key][:, self.interface.stats_index(tap)].contiguous()

    def _rest_stats(
        self, key: tuple[tuple[str, ...], int], members: Sequence[Member], number: int
    ) -> Tensor:
        """Return (batch, norms, groups, 3) statistics of one member's inactive sites."""
        (segments, groups), member, sites = key, members[number], self.sites[number]
        norms = self.interface.stats_taps(*key)
        rest = sum(sites.count(s) - sites.active_count(s) for s in segments)
        if member.cache is None or not rest:
            return torch.zeros(member.batch, len(norms), groups, 3, device=self.device)
        stats = member.cache.stats[key]
        images = tuple(filter(is_image, segments))  # texts are always active and not recorded
        index, there = self.active(images)[number], stats.total.device
        # the total excludes the sites whose statistics weren't kept
        active = pick(stats.values, index, there, self.tables, some=True)
        left = stats.total - active.sum(1, dtype=torch.float64)
        offset, spread = left.view(member.batch, 2, len(norms), groups).unbind(1)
        mean = offset / max(rest, 1)
        spread = (spread - stats.size * rest * mean.square()).clamp_(min=0)
        count = (stats.size * rest).expand_as(mean)
        found = torch.stack([count, stats.centre + mean, spread], 3).to(stats.values.dtype)
        return moved(found, self.device)

    def _sum(self, tap: str, segments: tuple[str, ...], members: Sequence[Member]) -> Tensor:
        out = []
        for member, sites, index in zip(members, self.sites, self.active(segments), strict=True):
            rest = sum(sites.count(s) - sites.active_count(s) for s in segments)
            if member.cache is None or not rest:
                unrecorded = self.interface.taps[tap]
                shape, dtype = (member.batch, prod(unrecorded.shape) + 1), wide(unrecorded.dtype)
                out.append(torch.zeros(shape, dtype=dtype, device=self.device))
                continue
            kept, total = self._rows_of(member.cache, tap), member.cache.total_of(tap)
            active = pick(kept, index, total.device, self.tables).flatten(2)
            left = total - active.sum(1, dtype=torch.float64)
            count = left.new_full((member.batch, 1), float(rest))
            out.append(moved(torch.cat([left, count], 1).to(wide(kept.dtype)), self.device))
        return torch.cat(out)

    # Attention masks.

    def _pairs(self, source: Pairs | PairTable, members: Sequence[Member]) -> list[Tensor]:
        """Return the (heads, queries, keys) mask of each owner."""
        value, out = source.value, []
        orders = self._order(source.keys, True), self._order(source.queries, False)
        for member, *order in zip(members, *orders, strict=True):
            full = member.given[value.origin][value.index]
            columns, rows = (self.tables.on(table, self.device) for table in order)
            full = full.reshape(-1, source.heads, *torch.atleast_2d(full).shape[-2:])
            for b in range(member.batch):
                own = full[min(b, full.shape[0] - 1)]
                if source.queries and own.shape[1] > 1:
                    own = own.index_select(1, rows)
                elif source.queries:
                    own = own.expand(-1, len(rows), -1)
                if own.shape[2] > 1:
                    own = own.index_select(2, columns)
                else:
                    own = own.expand(-1, -1, len(columns))
                out.append(own)
        return out

    def _pair_table(self, source: PairTable, members: Sequence[Member]) -> Tensor:
        """Return the masks of all owners in one table, as numbers, between zeros."""
        masks = [added(own, source.dtype) for own in self._pairs(source, members)]
        images = tuple(filter(is_image, source.keys))
        keys = torch.cat([self._table(Owner(source.keys)), self._table(RestOwner(images))])
        queries = self._table(Owner(source.queries)) if source.queries else None
        rows = 1 if queries is None else len(queries)
        out = masks[0].new_zeros(source.heads, rows, len(keys))
        for owner, own in enumerate(masks):
            columns = moved((keys == owner).nonzero()[:, 0], self.device)
            if queries is None:
                out[:, :, columns] = own
            else:
                at = moved((queries == owner).nonzero()[:, 0], self.device)
                out[:, at[:, None], columns] = own
        return out

    def _order(self, segments: tuple[str, ...], with_rest: bool) -> list[Tensor]:
        """Return, per member, the sources of a joint axis' rows: active ones, then the rest."""
        key = segments, with_rest
        if key not in self._orders:
            self._orders[key] = [self._order_of(s, segments, with_rest) for s in self.sites]
        return self._orders[key]

    def _order_of(self, sites: ActiveSites, segments: tuple[str, ...], with_rest: bool) -> Tensor:
        active, rest, base = [torch.arange(0)], [], 0
        for segment in segments:
            active.append(sites.active(segment) + base)
            if with_rest and is_image(segment):
                rest.append(sites.rest(segment) + base)
            base += sites.count(segment)
        return torch.cat([*active, *rest])


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what an attention mask adds to products."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
