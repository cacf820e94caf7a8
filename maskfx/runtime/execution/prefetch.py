"""Prefetcher: loads the cached rows that a step of a batch reads, from its start or before.

Loads are begun for the members of a step that are known then. Requests join and leave, so the
batch that reads the rows may have other members: its inputs are assembled from the loads of its
members, whichever step's members these were begun for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maskfx.ir.programs.program import Program
from maskfx.runtime.backends.eager import first_uses
from maskfx.runtime.backends.graph_function import Fetch
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.computed_rows import computed_taps
from maskfx.runtime.cache.loader import Loader, Loading
from maskfx.runtime.cache.step_cache import has_unread


@dataclass
class Stopwatch:
    """Records when a graph requested each of its inputs, and when it received it."""

    clock: Callable[[], float] = time.perf_counter
    started: float = 0.0
    stopped: float = 0.0
    marks: list[tuple[str, float, float]] = field(default_factory=list)

    def over(self, fetch: Fetch) -> Fetch:
        self.marks.clear()
        self.started = self.clock()

        def timed(name: str) -> Tensor:
            asked = self.clock()
            value = fetch(name)
            self.marks.append((name, asked, self.clock()))
            return value

        return timed

    def stop(self) -> None:
        self.stopped = self.clock()


AHEAD = 8  # loads of later steps that may be in flight; a further one cancels the oldest


@dataclass(frozen=True, eq=False)
class StartedLoad:
    """Loads in flight, and the members that they were begun for, in the order of their rows.

    `early` loads were begun while an earlier step ran.
    """

    frame: Frame
    members: tuple[Member, ...]
    loading: Loading
    early: bool = False

    def places(self, member: Member) -> Iterator[int]:
        """Yield the places of the members that read what this member reads."""
        for place, own in enumerate(self.members):
            same = own.cache is member.cache and own.sites is member.sites
            if same and (own.batch, own.device) == (member.batch, member.device):
                yield place

    def serves(self, member: Member) -> bool:
        return next(self.places(member), None) is not None

    def reading(self) -> list[int]:
        """Return the places of the members that read cached rows."""
        return [place for place, member in enumerate(self.members) if member.cache is not None]

    def rows(self, name: str) -> Tensor:
        """Return the rows of an input for all members, loaded or picked where nothing loads."""
        if name in self.loading:
            return self.loading.take(name)
        return self.frame.fetch(self.members, all_inputs=False)(name)


Slot = tuple[int, int]  # number of a load, and the place of a member in it


@dataclass(frozen=True)
class BatchLoads:
    """The loads of a running step, assembled from loads that were begun for its members.

    `slots` has one entry per member that reads cached rows, in the order of the batch.
    """

    loads: Sequence[StartedLoad]
    slots: Sequence[Slot]

    @property
    def early(self) -> bool:
        """Whether all were begun while an earlier step ran."""
        return all(load.early for load in self.loads)

    def __contains__(self, name: str) -> bool:
        return any(name in load.loading for load in self.loads)

    def take(self, name: str) -> Tensor:
        """Wait for an input and return it; each can be taken once."""
        rows = [load.rows(name) for load in self.loads]
        if len(rows) == 1 and [place for _, place in self.slots] == self.loads[0].reading():
            return rows[0]
        parts = [
            own.split(load.frame.loaded_counts(name))
            for own, load in zip(rows, self.loads, strict=True)
        ]
        return torch.cat([parts[load][place] for load, place in self.slots])

    def cancel(self) -> None:
        for load in self.loads:
            load.loading.cancel()


class TakenRows:
    """The loads of a step whose inputs may be read twice: again where they don't fit a capture."""

    def __init__(self, loads: BatchLoads) -> None:
        self._loads = loads
        self._taken: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._taken or name in self._loads

    def take(self, name: str) -> Tensor:
        """Wait for an input and return it."""
        if name not in self._taken:
            self._taken[name] = self._loads.take(name)
        return self._taken[name]


@dataclass
class Prefetcher:
    """Manages the loads of one denoiser; without a loader the graph picks rows on demand.

    `frame_of` returns the frame of a batch of members.
    """

    frame_of: Callable[[Program, Sequence[Member]], Frame]
    loader: Loader | None = None
    _begun: list[StartedLoad] = field(default_factory=list)
    _taken: list[tuple[StartedLoad, int]] = field(default_factory=list)  # by the next step
    _orders: dict[str, list[str]] = field(default_factory=dict)

    @contextmanager
    def step(
        self, program: Program, frame: Frame, members: Sequence[Member]
    ) -> Iterator[BatchLoads | None]:
        """Provide the loads of the running step; cancel those that it leaves unread."""
        if not self.has_loads(members):
            yield None
            return
        self._taken = []
        loads = self._assembled(program, frame, members)
        self._begun = [begun for begun in self._begun if begun not in loads.loads]
        try:
            yield loads
        finally:
            loads.cancel()

    def ahead(
        self, program: Program, frame: Frame, members: Sequence[Member], next_step: bool = False
    ) -> list[Loading]:
        """Start the loads of a later step, as far as they aren't in flight already.

        What the next step takes doesn't serve one after it, which may read the same rows again.
        """
        loads = self._assembled(program, frame, members, early=not next_step)
        self._begun += [load for load in loads.loads if load not in self._begun]
        if next_step:
            self._taken += [(loads.loads[number], place) for number, place in loads.slots]
        while len(self._begun) > AHEAD:
            self._begun.pop(0).loading.cancel()
        return [load.loading for load in loads.loads]

    def forget_others(self, members: Sequence[Member]) -> None:
        """Cancel the loads that none of these members reads."""
        wanted = [begun for begun in self._begun if any(map(begun.serves, members))]
        for begun in self._begun:
            if begun not in wanted:
                begun.loading.cancel()
        self._begun, self._taken = wanted, []

    def has_loads(self, members: Sequence[Member]) -> bool:
        """Return True if rows that these members read are loaded, not read where they lie."""
        if self.loader is None:
            return False
        caches = [(m.cache, m.device) for m in members if m.cache is not None]
        return any(self.loader.takes_all(device) or has_unread(cache) for cache, device in caches)

    def pending(self, member: Member) -> set[str] | None:
        """Return the inputs of a member that aren't loaded yet; None if its loads aren't begun."""
        begun = next((begun for begun in self._begun if begun.serves(member)), None)
        return None if begun is None else set(begun.loading.pending())

    def order(self, program: Program) -> list[str]:
        """Return the inputs of a program in the order in which its graph reads them."""
        if program.code not in self._orders:
            uses = first_uses(program.module.graph)
            self._orders[program.code] = [name for _, names in uses for name in names]
        return self._orders[program.code]

    def _assembled(
        self, program: Program, frame: Frame, members: Sequence[Member], early: bool = False
    ) -> BatchLoads:
        """Return the loads of a batch's members; begin those that aren't in flight.

        They are begun together where the same rows are computed instead.
        """
        loads, slots = list(self._begun), list[Slot | None]()
        missing: dict[frozenset[str], list[tuple[int, Member]]] = {}  # by what they don't load
        for member in members:
            if member.cache is not None:
                slots.append(self._slot(member, slots))
                if slots[-1] is None:
                    alike = missing.setdefault(computed_taps(member.cache), [])
                    alike.append((len(slots) - 1, member))
        for group in missing.values():
            whole = len(group) == len(slots)
            chosen = members if whole else [member for _, member in group]
            own = frame if whole else self.frame_of(program, chosen)
            loads.append(self._begin(program, own, chosen, early))
            for (number, _), place in zip(group, loads[-1].reading(), strict=True):
                slots[number] = len(loads) - 1, place
        filled = [slot for slot in slots if slot is not None]
        used = sorted({number for number, _ in filled})
        return BatchLoads(
            [loads[number] for number in used],
            [(used.index(number), place) for number, place in filled],
        )

    def _slot(self, member: Member, taken: Sequence[Slot | None]) -> Slot | None:
        """Return where a member's rows are in flight, not given to another member."""
        found = (
            (number, place)
            for number, begun in enumerate(self._begun)
            for place in begun.places(member)
            if (begun, place) not in self._taken
        )
        return next((slot for slot in found if slot not in taken), None)

    def _begin(
        self, program: Program, frame: Frame, members: Sequence[Member], early: bool
    ) -> StartedLoad:
        assert self.loader is not None, "nothing loads without a loader"
        jobs = frame.jobs(members, self.order(program), self.loader.takes_all(frame.device))
        loading = self.loader.begin(jobs, frame.device)
        return StartedLoad(frame, tuple(members), loading, early)
