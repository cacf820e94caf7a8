"""RecordedRows: picks the rows of a batch out of its members' caches, on the batch's device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.ir.geometry.lanes import is_image
from maskfx.ir.programs.program import Interface
from maskfx.ir.programs.sources import Cached, HeadShare, Rest
from maskfx.ops import wide
from maskfx.runtime.batch.head_rows import head_bytes, pick_heads, units_at, units_of
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.batch.rows import index_rows
from maskfx.runtime.cache.quantize import Packed
from maskfx.runtime.cache.rolling.places import Picks
from maskfx.runtime.cache.rolling.set_rows import RowsAhead
from maskfx.runtime.cache.rolling.shared_rows import SharedRows, shared_rows
from maskfx.runtime.cache.rows import (
    InterpolatedRows,
    Rows,
    RowSubset,
    RowTables,
    in_memory,
    pick,
)
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.hardware.devices import moved, read_here


@dataclass
class RecordedRows:
    """Picks rows and sums them.

    Args:
        interface: The program's inputs and outputs.
        layout: The rows of the batch.
        device: The device of the batch.
        tables: Copies of index tables on devices.
    """

    interface: Interface
    layout: Layout
    device: torch.device
    tables: RowTables
    _stacks: dict[object, Tensor] = field(default_factory=dict)
    _together: tuple[weakref.ref[Member], SharedRows | None] | None = None

    def begin_step(self) -> None:
        """Forget the statistics of the last step."""
        self._stacks = {}

    def pick(
        self,
        source: Cached,
        picks: Picks,
        members: Sequence[Member],
        take: Callable[[Tensor, Tensor], Tensor] = index_rows,
    ) -> Tensor:
        """Return the rows of a source, one member after the other.

        Args:
            source: The source.
            picks: Returns the sites that it reads of each member.
            members: The members.
            take: Picks rows.
        """
        if isinstance(source, HeadShare):
            return self._heads(source, picks, members)
        tap, shared = source.tap, self.shared(source, picks, members)
        if shared is not None:
            buffer, places = shared
            if len(places):
                return moved(take(read_here(buffer), places), self.device)
            return self._nothing(tap)
        out = []
        for held, index in self._held(tap, picks, members):
            if isinstance(held, Tensor):
                index = self.tables.on(index, held.device)
                out += [moved(take(rows, index), self.device) for rows in read_here(held)]
            else:
                out.append(pick(held, index, self.device, self.tables).flatten(0, 1))
        if not out:
            return self._nothing(tap)
        return out[0] if len(out) == 1 else torch.cat(out)

    def _heads(self, source: HeadShare, picks: Picks, members: Sequence[Member]) -> Tensor:
        """Return the units of the heads that are read here, request by request."""
        heads, at, out = source.heads, 0, []
        rest = Rest(source.tap, source.segments)
        shared = self.shared(rest, picks, members)
        for number, (member, index) in enumerate(zip(members, picks(), strict=True)):
            own = self.layout.heads(number, heads)
            if member.cache is None or not len(index):
                continue
            if shared is None:
                held = self.of(member.cache, source.tap)
                units = pick_heads(held, index, heads, own, self.tables).flatten(0, 1)
                out.append(moved(units, self.device))
                continue
            buffer, places = shared
            for _ in range(member.batch):
                part = places[at : at + len(index)]
                units = units_of(read_here(buffer), units_at(part, heads, own), heads)
                out.append(moved(units, self.device))
                at += len(index)
        if out:
            return out[0] if len(out) == 1 else torch.cat(out)
        kept = self.interface.taps[source.tap]
        shape = (kept.shape[0] // heads, *kept.shape[1:])
        return torch.empty(0, *shape, dtype=kept.dtype, device=self.device)

    def head_bytes(
        self, source: HeadShare, picks: Sequence[Tensor], members: Sequence[Member]
    ) -> int:
        """Return the bytes of the columns that are read of the cached rows of a source."""
        total = 0
        for number, (member, index) in enumerate(zip(members, picks, strict=True)):
            if member.cache is not None and len(index):
                own = self.layout.heads(number, source.heads)
                rows = self.of(member.cache, source.tap)
                total += head_bytes(rows, len(index), source.heads, len(own))
        return total

    def _held(
        self, tap: str, picks: Picks, members: Sequence[Member]
    ) -> Iterator[tuple[Tensor | Packed | InterpolatedRows, Tensor]]:
        """Yield the rows that members with any hold, and the places among them that are read."""
        for member, index in zip(members, picks(), strict=True):
            if member.cache is None or not len(index):  # the cache may lack the tap
                continue
            kept = in_memory(self.of(member.cache, tap), index)
            if isinstance(kept, RowSubset):
                yield kept.rows, self.tables.places(kept, index)
            else:
                yield kept, index

    def shared(
        self, source: Cached, picks: Picks, members: Sequence[Member]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the buffer with all members' rows of a tap, if one has them, and the places."""
        together = self._shared(members)
        return None if together is None else together.find(source, picks)

    def ahead(self, members: Sequence[Member]) -> RowsAhead | None:
        """Return what reads rows of several inputs at once; None if no block has them here."""
        together = self._shared(members) if members and self.device.type == "cpu" else None
        return None if together is None else together.ahead()

    def _shared(self, members: Sequence[Member]) -> SharedRows | None:
        if self._together is None or self._together[0]() is not members[0]:
            self._together = weakref.ref(members[0]), shared_rows(self.layout, members)
        return self._together[1]

    def of(self, cache: StepCache, tap: str) -> Rows:
        """Return a cache's rows of a tap."""
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

    def stats(self, tap: str, segments: tuple[str, ...], members: Sequence[Member]) -> Tensor:
        """Return one norm's part of the statistics, which all norms of a row set are built with."""
        kind = self.interface.taps[tap]
        key = (segments, kind.stats)
        if key not in self._stacks:
            self._stacks[key] = by_norm(
                [self._rest_stats(key, members, i) for i in range(len(members))]
            )
        return self._stacks[key][self.interface.stats_index(tap)]

    def _rest_stats(
        self, key: tuple[tuple[str, ...], int], members: Sequence[Member], number: int
    ) -> Tensor:
        """Return (batch, norms, groups, 3) statistics of one member's inactive sites."""
        segments, member = key[0], members[number]
        rest = self.rest_count(segments, number)
        if member.cache is None or not rest:
            return self.no_stats(key, member.batch)
        stats = member.cache.stats[key]
        active = pick(
            stats.values, self.active(segments)[number], stats.total.device, self.tables, some=True
        )
        found = rest_stats(active, stats.total, stats.centre, stats.size, rest)
        return moved(found, self.device)

    def no_stats(self, key: tuple[tuple[str, ...], int], batch: int) -> Tensor:
        """Return the statistics of members of which nothing is recorded, or nothing inactive."""
        norms = self.interface.stats_taps(*key)
        return torch.zeros(batch, len(norms), key[1], 3, device=self.device)

    def active(self, segments: tuple[str, ...]) -> list[Tensor]:
        """Return the active sites of each member whose statistics are recorded."""
        # texts are always active and not recorded
        return self.layout.active(tuple(filter(is_image, segments)))

    def rest_count(self, segments: tuple[str, ...], number: int) -> int:
        """Return the number of a member's inactive sites."""
        sites = self.layout.sites[number]
        return sum(sites.count(s) - sites.active_count(s) for s in segments)

    def sum_of(self, tap: str, segments: tuple[str, ...], members: Sequence[Member]) -> Tensor:
        """Return the sums of a tap over each member's inactive sites, and their number."""
        out = []
        for number, (member, index) in enumerate(
            zip(members, self.layout.active(segments), strict=True)
        ):
            rest = self.rest_count(segments, number)
            if member.cache is None or not rest:
                unrecorded = self.interface.taps[tap]
                shape, dtype = (member.batch, prod(unrecorded.shape) + 1), wide(unrecorded.dtype)
                out.append(torch.zeros(shape, dtype=dtype, device=self.device))
                continue
            kept, total = self.of(member.cache, tap), member.cache.total_of(tap)
            active = pick(kept, index, total.device, self.tables).flatten(2)
            left = total - active.sum(1, dtype=torch.float64)
            count = left.new_full((member.batch, 1), float(rest))
            out.append(moved(torch.cat([left, count], 1).to(wide(kept.dtype)), self.device))
        return torch.cat(out)


def by_norm(parts: Sequence[Tensor]) -> Tensor:
    """Return (batch, norms, groups, 3) statistics of members as (norms, batch, groups, 3)."""
    stack = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return stack.transpose(0, 1).contiguous()


def rest_stats(active: Tensor, total: Tensor, centre: Tensor, size: Tensor, rest: int) -> Tensor:
    """Return (batch, norms, groups, 3) statistics of the sites that aren't active.

    Args:
        active: Those of each active site, as `SiteStats.values`.
        total, centre, size: As in `SiteStats`; the total excludes sites that weren't kept.
        rest: The number of sites that aren't active.
    """
    batch, norms, groups = centre.shape
    left = total - active.sum(1, dtype=torch.float64)
    offset, spread = left.view(batch, 2, norms, groups).unbind(1)
    mean = offset / rest
    spread = (spread - size * rest * mean.square()).clamp_(min=0)
    count = (size * rest).expand_as(mean)
    return torch.stack([count, centre + mean, spread], 3).to(active.dtype)
