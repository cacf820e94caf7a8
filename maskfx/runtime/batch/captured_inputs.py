"""CapturedInputs: the memory from which a captured graph reads the inputs of a batch.

What depends on the layout alone is read where it is. Arguments are copied here if they changed,
and cached rows by their addresses, all in one launch. What is computed from these copies, such as
the rows of an argument and statistics, is computed inside of the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor

from maskfx.ir.programs.sources import Cached, Given, RestStats
from maskfx.ops import has_kernels
from maskfx.runtime.backends.graph_function import Fetch
from maskfx.runtime.batch.copied_rows import CopiedRows
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.batch.recorded import by_norm, rest_stats
from maskfx.runtime.batch.row_addresses import STATS, AddressBook, RowAddresses
from maskfx.runtime.cache.loader import StagedRows
from maskfx.runtime.cache.rolling.rolling_cache import StatsKey

Value = tuple[str, int, int]  # where an argument is from: its origin, its index, the member


@dataclass(frozen=True)
class BatchInputs:
    """What a step gives a batch.

    Args:
        frame: Of the batch.
        members: Its members, with the values of this step.
        book: The addresses of recordings.
        loading: The rows that are loaded for this step, if any are.
    """

    frame: Frame
    members: Sequence[Member]
    book: AddressBook
    loading: StagedRows | None = None

    @cached_property
    def addresses(self) -> list[RowAddresses | None]:
        """Return the addresses of each member's recording."""
        return [None if m.cache is None else self.book.of(m.cache) for m in self.members]

    @property
    def form(self) -> Hashable:
        """Return what decides, beside the layout, how rows are copied."""
        return tuple(None if one is None else one.form for one in self.addresses)

    @cached_property
    def fetch(self) -> Fetch:
        """Return what gives the inputs of this step."""
        return self.frame.fetch(self.members, self.loading)

    def memory(self) -> CapturedInputs:
        """Return the memory of a capture, with the inputs of this step."""
        return CapturedInputs(self)


class CapturedInputs:
    """The inputs of one capture.

    Args:
        first: The inputs of the step that is captured.
    """

    def __init__(self, first: BatchInputs) -> None:
        self._frame, self._members = first.frame, len(first.members)
        self._rows: dict[str, Tensor] = {}  # of cached rows, by the input's name
        self._stats: dict[StatsKey, list[Callable[[], Tensor]]] = {}  # a member's statistics
        self._copies = CopiedRows(first.book, first.addresses, first.frame.tables)
        sources = first.frame.interface.inputs
        if has_kernels(self._frame.device):
            self._find_rows(first)
        self._copies.end()
        self._given = {
            name: [(source.origin, source.index, m) for m in range(self._members)]
            for name, source in sources.items()
            if isinstance(source, Given) and self._is_copied(source, first.members)
        }
        rest = [name for name in sources if not self._computes(name)]
        fetch = first.fetch
        self._fixed = {name: fetch(name) for name in rest if first.frame.is_fixed(sources[name])}
        fetched = [name for name in rest if name not in self._fixed]
        self._once = [name for name in fetched if is_of_request(sources[name])]
        self._fetched = [name for name in fetched if not is_of_request(sources[name])]
        self._requests: list[object] = []
        values = self._values(first)
        # cached rows that are fetched: each step has others, whose memory is free after the copy
        self._passing = {name for name in fetched if isinstance(sources[name], Cached)}
        # what was copied last, and its version
        self._last = {key: self._mark(key, value) for key, value in values.items()}
        self._kept = {key: value.clone() for key, value in values.items()}
        self._requests = requests_of(first)
        self._copies.run(first.addresses)

    def fetch(self) -> Fetch:
        """Return what gives the graph its inputs; call it inside of the capture."""
        stacks = {key: by_norm([own() for own in parts]) for key, parts in self._stats.items()}

        def fetch(name: str) -> Tensor:
            if name in self._fixed:
                return self._fixed[name]
            if name in self._rows:
                return self._rows[name]
            source = self._frame.interface.inputs[name]
            if isinstance(source, Given) and name in self._given:
                return self._frame.gather([self._kept[v] for v in self._given[name]], source.lane)
            if isinstance(source, RestStats) and self._key(source) in stacks:
                place = self._frame.interface.stats_index(source.tap)
                return stacks[self._key(source)][place]
            return self._kept[name]

        return fetch

    def bring(self, step: BatchInputs) -> bool:
        """Copy a step's inputs here; return False, with nothing copied, if they don't fit."""
        targets, values, marks = [], [], {}
        for key, value in self._values(step).items():
            last, before = self._last[key]
            if value is last and version(value) == before >= 0:
                continue
            if not fits(value, self._kept[key]):
                return False
            marks[key] = self._mark(key, value)
            targets.append(self._kept[key])
            values.append(value)
        if targets:
            torch._foreach_copy_(targets, values)
            self._last.update(marks)
        self._requests = requests_of(step)
        self._copies.run(step.addresses)
        return True

    def _values(self, step: BatchInputs) -> dict[Hashable, Tensor]:
        """Return the values of a step that are copied as they are.

        Those that are computed once per request only if another request is in the batch.
        """
        fetch = step.fetch
        found: dict[Hashable, Tensor] = {name: fetch(name) for name in self._fetched}
        requests = requests_of(step)
        if len(requests) != len(self._requests) or not all(map(is_, requests, self._requests)):
            found.update((name, fetch(name)) for name in self._once)
        for values in self._given.values():
            for origin, index, member in values:
                found[origin, index, member] = step.members[member].given[origin][index]
        return found

    def _mark(self, key: Hashable, value: object) -> tuple[object, int]:
        return (None, -1) if key in self._passing else (value, version(value))

    def _computes(self, name: str) -> bool:
        """Return True if an input is copied by address, or computed from copies."""
        if name in self._given or name in self._rows:
            return True
        source = self._frame.interface.inputs[name]
        return isinstance(source, RestStats) and self._key(source) in self._stats

    def _is_copied(self, source: Given, members: Sequence[Member]) -> bool:
        """Return True if an argument is copied in full, and its rows are picked afterwards."""
        if source.lane.kind == "const" or is_of_request(source):
            return False  # one value for the batch, which is compared; rows that are kept
        values = [member.given[source.origin][source.index] for member in members]
        return all(isinstance(v, Tensor) and v.device == self._frame.device for v in values)

    def _find_rows(self, first: BatchInputs) -> None:
        for name, source in first.frame.interface.inputs.items():
            if isinstance(source, Cached):
                rows = self._copies.add(source.tap, first.frame.picks_of(name, source))
                if rows is not None:
                    self._rows[name] = rows
            elif isinstance(source, RestStats) and self._key(source) not in self._stats:
                parts = [self._stats_of(self._key(source), first, m) for m in range(self._members)]
                found = [part for part in parts if part is not None]
                if len(found) == len(parts):
                    self._stats[self._key(source)] = found

    def _stats_of(
        self, key: StatsKey, first: BatchInputs, number: int
    ) -> Callable[[], Tensor] | None:
        """Return what computes the statistics of a member's rest; None if it can't be copied."""
        recorded, member = self._frame.recorded, first.members[number]
        rest = recorded.rest_count(key[0], number)
        if member.cache is None or not rest:
            return lambda: recorded.no_stats(key, member.batch)
        active = recorded.active(key[0])[number]
        found = []
        for part, index in zip(STATS, (active, FIRST, FIRST), strict=True):
            picks = [index if m == number else NONE for m in range(self._members)]
            found.append(self._copies.add((key, part), picks, some=True))
        values, total, centre = found
        if values is None or total is None or centre is None:
            return None
        size, shape = member.cache.stats[key].size, member.cache.stats[key].centre.shape
        per_site = values.view(member.batch, -1, values.shape[1])
        return lambda: rest_stats(per_site, total, centre.view(shape), size, rest)

    def _key(self, source: RestStats) -> StatsKey:
        return source.segments, self._frame.interface.taps[source.tap].stats


def is_of_request(source: object) -> bool:
    return isinstance(source, Given) and source.origin == "request"


def requests_of(step: BatchInputs) -> list[object]:
    """Return what is computed once per request; other objects if it was computed again."""
    return [member.given["request"] for member in step.members]


NONE = torch.empty(0, dtype=torch.long)
FIRST = torch.zeros(1, dtype=torch.long)


def fits(value: Any, kept: Tensor) -> bool:
    """Return True if a value can be copied to where the graph reads one."""
    same = isinstance(value, Tensor) and value.shape == kept.shape and value.dtype == kept.dtype
    return same and value.device == kept.device


def version(value: object) -> int:
    """Return the number of changes in place; -1 if they can't be counted."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else -1
