"""Frame: builds the inputs of a compiled graph for one ragged batch.

Tables depend on the batch's masks and sizes alone and are kept from step to step; rows of
arguments and of the cache are picked in every step. What operators read is on the batch's device;
spans, which Python reads, stay on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maskfx.errors import InputError
from maskfx.ir.geometry.lanes import Batch, Lane, is_image
from maskfx.ir.late import is_late, wait_for
from maskfx.ir.programs.program import Interface
from maskfx.ir.programs.sources import (
    Adapted,
    Cached,
    Down,
    Given,
    Halo,
    HeadShare,
    Kept,
    LinePairs,
    Loaded,
    OwnBiases,
    OwnGroups,
    OwnWeights,
    Pairs,
    PairTable,
    RankGroups,
    Rest,
    RestShare,
    RestStats,
    RestSum,
    Tapped,
    Up,
    Updated,
    Weights,
)
from maskfx.ir.values import Equality
from maskfx.ir.weak_memo import LastMade
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.batch.pair_masks import line_masks, pair_masks, pair_table
from maskfx.runtime.batch.recorded import RecordedRows
from maskfx.runtime.batch.rows import pick_rows, picked_bytes, take_rows
from maskfx.runtime.cache.computed_rows import is_computed
from maskfx.runtime.cache.loader import LoadJob, StagedRows
from maskfx.runtime.cache.rows import (
    InterpolatedRows,
    Rows,
    RowSubset,
    RowTables,
    device_of,
    stored_parts,
    tensors_of,
)
from maskfx.runtime.hardware.devices import CPU
from maskfx.runtime.lora.stacks import StackCache, Stacks


class MembersDiffer(InputError):
    """Members of a batch have different values where the model has one for the whole batch."""


@dataclass
class Frame:
    """Builds the inputs of one program for batches of one layout.

    Args:
        interface: The program's inputs and outputs.
        layout: Where the batch's rows lie.
        device: The device of the batch.
        tables: Copies of index tables on devices.
        equal: Compares values that members share; may be shared by frames.
        adapters: The matrices of the members' adapters; may be shared by frames.
        code: The program's.
        originals: The weights of the program's graph by name, if it has low-rank terms.
        by_stretch: Whether the sites of stretches are chosen while the graph runs (`bring`).
    """

    interface: Interface
    layout: Layout
    device: torch.device = CPU
    tables: RowTables = field(default_factory=RowTables)
    equal: Equality = field(default_factory=Equality)
    adapters: StackCache = field(default_factory=StackCache)
    code: str = ""
    originals: Mapping[str, Tensor] = field(default_factory=dict)
    by_stretch: bool = False
    _adapted: tuple[Stacks, list[int | None]] | None = None
    _brought: bool = False
    _fixed: dict[str, Tensor] = field(default_factory=dict)
    _given: dict[str, LastMade[Tensor]] = field(default_factory=dict)
    _picks: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recorded = RecordedRows(self.interface, self.layout, self.device, self.tables)

    def fetch(
        self,
        members: Sequence[Member],
        loading: StagedRows | None = None,
        all_inputs: bool = True,
    ) -> Callable[[str], Tensor]:
        """Return a function that gives an input by its name, for one step of these members.

        Args:
            members: The members.
            loading: Rows that are being loaded.
            all_inputs: Whether all inputs will be asked for, so that small rows of several of them
                may be read at once.
        """
        self.recorded.begin_step()
        self._bring(members)
        if self.originals:
            self._adapted = self._adapters_of(members)
        sources = self.interface.inputs
        ahead = self.recorded.ahead(members) if all_inputs else None

        def fetch(name: str) -> Tensor:
            if loading is not None and name in loading:
                return loading.take(name)
            rows = None if ahead is None else ahead.take(name)
            return self._input(name, sources[name], members) if rows is None else rows

        return fetch

    def is_fixed(self, source: object) -> bool:
        """Return True if an input depends on the layout alone."""
        made = Given | Tapped | Pairs | PairTable | LinePairs | Adapted
        return not isinstance(source, made)

    def jobs(
        self, members: Sequence[Member], names: Iterable[str], copies: bool = True
    ) -> list[LoadJob]:
        """Return load jobs for the cached rows among these inputs.

        Rows that are on the batch's device already need no load. On a CPU all rows are loaded, as
        from a slower memory; without `copies`, those that have to be read from a store.
        """
        self._bring(members)
        out = []
        for name, nbytes in self.loaded_bytes(members, names, copies).items():
            source = self.interface.inputs[name]
            assert isinstance(source, Cached), "no other input has cached rows"
            # copied before the load begins, which reads it on a separate stream
            self.tables.bring(self._needed(name, source, members), self.device)
            picks = partial(self.picks_of, name, source)
            job = partial(self.recorded.pick, source, picks, members, take_rows)
            parts = [p for rows, _ in self.stored(name, members) for p in stored_parts(rows)]
            out.append(LoadJob(name, nbytes, job, tuple(part.fetch for part in parts)))
        return out

    def loaded_bytes(
        self, members: Sequence[Member], names: Iterable[str], copies: bool = True
    ) -> dict[str, int]:
        """Return the bytes of those of these inputs that have to be loaded (see `jobs`)."""
        found = {}
        for name in names:
            source = self.interface.inputs[name]
            if not isinstance(source, Cached):
                continue
            if isinstance(source, HeadShare):
                found[name] = self.recorded.head_bytes(source, self.picks_of(name, source), members)
                continue
            pairs = self.stored(name, members)
            found[name] = sum(
                picked_bytes(rows, index) for rows, index in pairs if self._loads(rows, copies)
            )
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    def stored(self, name: str, members: Sequence[Member]) -> list[tuple[Rows, Tensor]]:
        """Return the cached rows of an input and the sites read of them, of members with any."""
        source = self.interface.inputs[name]
        assert isinstance(source, Cached), "no other input has cached rows"
        return [
            (self.recorded.of(m.cache, source.tap), index)
            for m, index in zip(members, self.picks_of(name, source), strict=True)
            if m.cache is not None and len(index)
        ]

    def loaded_counts(self, name: str) -> list[int]:
        """Return, for each member, the number of cached rows in an input."""
        source = self.interface.inputs[name]
        assert isinstance(source, Cached), "no other input has cached rows"
        picks = zip(self.picks_of(name, source), self.layout.batches, strict=True)
        return [len(index) * batch for index, batch in picks]

    def _loads(self, rows: Rows, copies: bool) -> bool:
        if is_computed(rows):
            return False
        if self.device.type == "cpu":
            return copies or bool(stored_parts(rows))
        return any(t.device != self.device for t in tensors_of(rows))

    def late(self, members: Sequence[Member]) -> frozenset[str]:
        """Return the inputs whose values are still being computed elsewhere."""
        if not any(is_late(value) for m in members for value in m.given["step"]):
            return frozenset()
        return frozenset(name for name in self.interface.inputs if self.waits(name, members))

    def waits(self, name: str, members: Sequence[Member]) -> bool:
        """Return True if an input is made from a value that is still being computed elsewhere."""
        source = self.interface.inputs[name]
        if not isinstance(source, Given) or source.origin != "step":
            return False
        return any(is_late(m.given["step"][source.index]) for m in members)

    def inputs(self, members: Sequence[Member]) -> list[Tensor]:
        """Return all inputs of the graph in its order."""
        return list(map(self.fetch(members), self.interface.inputs))

    def _bring(self, members: Sequence[Member]) -> None:
        """Copy all tables of this batch to its device, in one copy, before its first step."""
        if self.device.type == "cpu" or self._brought or self.by_stretch:
            return
        self._brought = True
        needed = self._tables(members, self.interface.inputs)
        for lane in self.interface.outputs:
            if lane is not None and lane.kind == "rows":
                needed += self.layout.active(lane.segments)
        self.tables.bring(needed, self.device)

    def bring(self, members: Sequence[Member], names: Iterable[str]) -> None:
        """Copy the tables of these inputs to the device of the batch, in one copy."""
        if self.device.type != "cpu":
            self.tables.bring(self._tables(members, names), self.device)

    def _tables(self, members: Sequence[Member], names: Iterable[str]) -> list[Tensor]:
        sources = ((name, self.interface.inputs[name]) for name in names)
        return [table for name, s in sources for table in self._needed(name, s, members)]

    def _needed(self, name: str, source: object, members: Sequence[Member]) -> list[Tensor]:
        """Return the tables that an input is, or that its rows are picked with."""
        match source:
            case Given(_, _, lane):
                own = (self.layout.index(m, s) for s in lane.segments for m in range(len(members)))
                return [index for index in own if index is not None]
            case HeadShare():
                return self._picking(source, zip(members, self.picks_of(name, source), strict=True))
            case Halo() | Rest() | Loaded() | Kept() | RestShare():
                if self.recorded.shared(source, partial(self.picks_of, name, source), members):
                    return []  # the places are there already
                return self._picking(source, zip(members, self.picks_of(name, source), strict=True))
            case RestStats(_, segments):
                return self.layout.active(tuple(filter(is_image, segments)))
            case RestSum(_, segments):
                return self.layout.active(segments)
            case Pairs() | PairTable():
                return [
                    *self.layout.order(source.keys, True),
                    *self.layout.order(source.queries, False),
                ]
            case RankGroups() | Down() | Up() | Updated() | Weights() | LinePairs():
                return []  # one copy brings tables of indices
            case OwnWeights() | OwnBiases() | OwnGroups():
                return []  # one copy brings tables of indices
        return [] if self.layout.on_host(source) else [self._table_of(name, source)]

    def _picking(self, source: Cached, picks: Iterable[tuple[Member, Tensor]]) -> list[Tensor]:
        """Return the tables that pick the sites of each member out of its recording."""
        return [
            table
            for member, index in picks
            if member.cache is not None and len(index)
            for table in self._indexing(self.recorded.of(member.cache, source.tap), index)
        ]

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
                return self._kept(name, values, lambda: self.gather(values, lane))
            case Halo() | Rest() | Loaded() | Kept() | RestShare() | HeadShare():
                return self.recorded.pick(source, partial(self.picks_of, name, source), members)
            case RestStats(tap, segments):
                return self.recorded.stats(tap, segments, members)
            case RestSum(tap, segments):
                return self.recorded.sum_of(tap, segments, members)
            case Pairs():
                return torch.cat(
                    [own.reshape(-1) for own in pair_masks(source, members, self.layout, self._on)]
                )
            case LinePairs(value):
                values = [m.given[value.origin][value.index] for m in members]
                return self._kept(
                    name, values, lambda: line_masks(source, members, self.layout, self._on)
                )
            case PairTable():
                return pair_table(source, members, self.layout, self._on)
            case Down() | Up() | OwnWeights() | OwnBiases():
                return self._stacks_of()[0].read(source)
            case OwnGroups(_, _, segments):
                stacks, owners = self._stacks_of()
                return stacks.own_groups(source, self.layout.row_counts(segments), owners)
            case Updated():
                stacks, owners = self._stacks_of()
                return stacks.updated(source, owners)
            case RankGroups(_, segments):
                stacks, owners = self._stacks_of()
                return stacks.groups(source, self.layout.row_counts(segments), owners)
        table = self._table_of(name, source)
        return table if self.layout.on_host(source) else self.tables.on(table, self.device)

    def _kept(self, name: str, values: list[Any], make: Callable[[], Tensor]) -> Tensor:
        """Return what is made of values of the members, made again if one of them is another."""
        # detached, because a view would hold its base
        return self._given.setdefault(name, LastMade()).of(values, lambda: make().detach())

    def _on(self, table: Tensor) -> Tensor:
        return self.tables.on(table, self.device)

    def _table_of(self, name: str, source: object) -> Tensor:
        if name not in self._fixed:
            self._fixed[name] = self.layout.table(source)
        return self._fixed[name]

    def picks_of(self, name: str, source: Cached) -> list[Tensor]:
        """Return the sites that an input reads of each member's recording."""
        if name not in self._picks:
            self._picks[name] = self.layout.picks(source)
        return self._picks[name]

    def forget_given(self) -> None:
        """Drop the values that are computed once per request, because they are computed again."""
        self._given.clear()

    # Adapters.

    def _adapters_of(self, members: Sequence[Member]) -> tuple[Stacks, list[int | None]]:
        """Return the stacks of the members' adapters, and the index of each owner's set."""
        sets = [member.adapters for member in members]
        stacks, indices = self.adapters.of(self.code, sets, self.originals, self.device)
        return stacks, [
            i for i, b in zip(indices, self.layout.batches, strict=True) for _ in range(b)
        ]

    def drop_adapters(self, gone: Collection[int]) -> None:
        """Release stacks with updates of these ids (of their `Layers`)."""
        if self._adapted is not None and any(one.own.has(gone) for one in self._adapted[0].sets):
            self._adapted = None

    def _stacks_of(self) -> tuple[Stacks, list[int | None]]:
        assert self._adapted is not None, "a graph with low-rank terms has their weights"
        return self._adapted

    # Rows of full values.

    def gather(self, values: Sequence[Any], lane: Lane) -> Tensor:
        """Return the members' full values as rows, as one row per owner, or as one shared value."""
        if lane.kind == "const":
            first: Tensor = values[0]
            for other in values[1:]:
                if not self.equal(other, first):
                    raise MembersDiffer(
                        f"step(): the members differ in a value of shape {tuple(first.shape)} that "
                        "the model uses for the whole batch; run them in separate calls"
                    )
            return first
        if lane.kind == "sample":
            axis = next(i for i, d in enumerate(lane.dims) if any(isinstance(a, Batch) for a in d))
            parts = []
            for value, batch in zip(values, self.layout.batches, strict=True):
                own = value.reshape([1] * (len(lane.dims) - value.dim()) + list(value.shape))
                if own.shape[axis] % batch:
                    own = own.expand([batch if i == axis else -1 for i in range(own.dim())])
                parts.append(own)
            return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, axis)
        pieces: list[list[Tensor]] = [[] for _ in lane.segments]
        for m, (value, batch) in enumerate(zip(values, self.layout.batches, strict=True)):
            indices = [self.layout.index(m, segment) for segment in lane.segments]
            there = [i if i is None else self.tables.on(i, value.device) for i in indices]
            for i, part in enumerate(pick_rows(value, lane, self.layout.sites[m], there)):
                part = part if part.shape[0] == batch else part.expand(batch, *part.shape[1:])
                pieces[i].append(part.flatten(0, 1))
        flat = [p for piece in pieces for p in piece]
        return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)
