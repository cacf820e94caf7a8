"""The planning problem as arrays: choices, constraints, and the costs of selections."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import is_, itemgetter
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from maskfx.runtime.planner.timeline import NUMBERS, BlockTimes, Cost, Start, Timeline, run_streams

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEAD, LIVE = 0, 1
AS_COST = partial(tuple.__new__, Cost)  # as Cost(*numbers), without a call in Python per block
NEVER = 1e30  # seconds, where infinity can't be used in arithmetic: of what is closed or too big


@dataclass(frozen=True, eq=False)
class Problem:
    """The constraints and tolerances of a plan.

    Args:
        buffer_bytes: size of the staging buffer.
        start: state of the two streams at the start.
        budgets: maximum kept bytes per tier.
        slack: accepted distance from the best plan in seconds.
        share: accepted distance as a fraction of the plan's end; the larger of the two counts.
    """

    buffer_bytes: float
    start: Start
    budgets: Floats
    slack: float
    share: float = 0.0

    def enough(self, best: SearchResult | None, proved: float) -> bool:
        return proved >= (best.end - self.near(best.end) if best else math.inf)

    def near(self, end: float) -> float:
        return max(self.slack, self.share * end)


@dataclass(frozen=True, eq=False)
class SearchResult:
    """A selection that meets the constraints, and its timeline."""

    selection: Ints
    timeline: Timeline

    @property
    def end(self) -> float:
        return self.timeline.end


def better(one: SearchResult | None, other: SearchResult | None) -> SearchResult | None:
    if one is None or other is None:
        return one or other
    return other if other.end < one.end else one


@dataclass(frozen=True, eq=False)
class CostTables:
    """The choices as arrays: (blocks, [dead/live,] members, choices).

    Dead or live is the state of the member's full stream before the block. `closed` is infinite
    where the choice doesn't exist or its bytes alone exceed the buffer.
    """

    closed: Floats
    compute: Floats
    leaves: Ints
    load: Floats
    staged: Floats
    kept: Floats  # last axis: tiers
    fixed: Floats

    @cached_property
    def scale(self) -> float:
        """An upper bound in seconds on any useful plan."""
        return float(self.compute.sum() + self.fixed.sum()) or float(self.load.sum()) or 1.0

    @cached_property
    def kinds(self) -> tuple[Ints, Ints]:
        """One member of each kind, and the kind of each member.

        Members with equal choices in all blocks are of one kind.
        """
        values = (self.closed, self.load, self.staged, self.compute[:, None], self.leaves[:, None])
        rows = [np.moveaxis(v, 2, 0).reshape(v.shape[2], -1) for v in (*values, self.kept)]
        known: dict[bytes, int] = {}
        kinds = [known.setdefault(row.tobytes(), len(known)) for row in np.concatenate(rows, 1)]
        return np.array([kinds.index(kind) for kind in range(len(known))]), np.array(kinds)

    def twins(self) -> Ints:
        """Return for each member the previous one if they are of one kind (twins), else -1."""
        kind = self.kinds[1]
        return np.append(-1, np.where(kind[1:] == kind[:-1], np.arange(len(kind) - 1), -1))

    @cached_property
    def ways(self) -> Floats:
        """Costs of each choice by kind of member and by the state of the stream after and before:
        (block, choice, after, before, kind, column).

        The columns are load, compute, NEVER if the transition is closed, and kept bytes by tier.
        """
        member, _ = self.kinds
        by_before = [
            np.moveaxis(v[:, :, member], 3, 1) for v in (self.load, self.closed, self.kept)
        ]
        load, closed, kept = (v[:, :, None] for v in by_before)
        compute, leaves = (
            np.moveaxis(v[:, member], 2, 1)[:, :, None, None] for v in (self.compute, self.leaves)
        )
        shut = (closed > 0) | (leaves != np.arange(2)[:, None, None])
        ways = np.empty((*shut.shape, 3 + self.tiers))
        ways[..., 0], ways[..., 1], ways[..., 3:] = load, compute, kept
        ways[..., 2] = np.where(shut, NEVER, 0.0)
        return ways

    @property
    def tiers(self) -> int:
        return int(self.kept.shape[-1])

    @cached_property
    def computed(self) -> Ints | None:
        """The selection that computes everything and keeps nothing; None if there is none."""
        load = self.load[:, LIVE] + self.staged[:, LIVE] + self.kept[:, LIVE].sum(-1)
        able = (load == 0) & (self.leaves == LIVE) & (self.closed[:, LIVE] == 0)
        return np.where(able, self.compute, math.inf).argmin(-1) if able.any(-1).all() else None

    @cached_property
    def alike(self) -> list[list[tuple[float, float]]]:
        """Load and compute, by choice and block, if all members select it with a live stream."""
        load = (self.load[:, LIVE] + self.closed[:, LIVE]).sum(1).T
        compute = (self.compute.sum(1) + self.fixed[:, None]).T
        return [
            list(zip(*rows, strict=True))
            for rows in zip(load.tolist(), compute.tolist(), strict=True)
        ]

    @cached_property
    def first(self) -> tuple[Ints, Ints]:
        """Flat index of each member's first choice: in (blocks, members, choices), and, with a dead
        stream, in (blocks, dead/live, members, choices)."""
        blocks, members, choices = self.compute.shape
        first = choices * np.arange(blocks * members).reshape(blocks, members)
        return first, first + members * choices * np.arange(blocks)[:, None]

    def before(self, selections: Ints, live: bool) -> Ints:
        """Return (..., blocks, members): 1 where the member's stream is live before the block."""
        after = self.leaves.take(self.first[0] + selections)
        before = np.empty_like(after)
        before[..., 0, :], before[..., 1:, :] = int(live), after[..., :-1, :]
        return before

    def places(self, selections: Ints, live: bool) -> tuple[Ints, Ints]:
        """Return the flat indices of the selected choices in the two layouts of `first`."""
        alone, dead = self.first
        _, members, choices = self.compute.shape
        by_stream = dead + selections + members * choices * self.before(selections, live)
        return alone + selections, by_stream

    def sums(self, selections: Ints, live: bool) -> tuple[Floats, Floats]:
        """Return (..., blocks): seconds of load and of compute of the whole batch."""
        alone, by_stream = self.places(selections, live)
        load: Floats = self.load.take(by_stream).sum(-1)
        compute: Floats = self.compute.take(alone).sum(-1) + self.fixed
        return load, compute

    def costs(self, selection: Ints, live: bool) -> list[Cost]:
        """Return the same as `batch_costs`, from the tables."""
        return self._costs_at(*self.places(selection, live))

    def _costs_at(self, alone: Ints, by_stream: Ints) -> list[Cost]:
        sums = (
            self.load.take(by_stream).sum(1).tolist(),
            self.staged.take(by_stream).sum(1).tolist(),
            (self.compute.take(alone).sum(1) + self.fixed).tolist(),
        )
        return list(map(AS_COST, zip(*sums, strict=True)))

    def kept_by(self, selections: Ints, live: bool) -> Floats:
        """Return (..., tiers): bytes that a template keeps for a selection."""
        if not self.tiers:
            return np.zeros((*selections.shape[:-2], 0))
        _, by_stream = self.places(selections, live)
        total: Floats = self.kept.reshape(-1, self.tiers)[by_stream].sum((-3, -2))
        return total

    def tried(self, selection: Ints, problem: Problem) -> SearchResult | None:
        """Simulate a selection; return None if it violates a constraint."""
        live = problem.start.live
        alone, by_stream = self.places(selection, live)
        if self.closed.take(by_stream).any():
            return None
        if self.tiers and (self.kept_by(selection, live) > problem.budgets).any():
            return None
        costs, room = self._costs_at(alone, by_stream), problem.buffer_bytes
        if room < math.inf and max(map(itemgetter(1), costs)) > room:
            return None
        return SearchResult(selection, run_streams(costs, room, problem.start))


@dataclass(frozen=True)
class KnownTables:
    """The tables of blocks, and what they were made for."""

    blocks: tuple[ref[BlockTimes], ...]
    buffer_bytes: float
    tiers: int
    tables: CostTables

    def are_of(self, blocks: tuple[BlockTimes, ...], buffer_bytes: float, tiers: int) -> bool:
        same = (self.buffer_bytes, self.tiers, len(self.blocks)) == (
            buffer_bytes,
            tiers,
            len(blocks),
        )
        return same and all(map(is_, [known() for known in self.blocks], blocks))


# by the first block; tables live as long as their blocks, which their users keep
_known: WeakKeyDictionary[BlockTimes, KnownTables] = WeakKeyDictionary()


def tables_of(blocks: tuple[BlockTimes, ...], buffer_bytes: float, tiers: int) -> CostTables:
    """Return the tables of these blocks, cached: serving plans the same blocks repeatedly."""
    known = _known.get(blocks[0])
    if known is None or not known.are_of(blocks, buffer_bytes, tiers):
        refs = tuple(map(ref, blocks))
        made = made_tables(blocks, buffer_bytes, tiers)
        known = _known[blocks[0]] = KnownTables(refs, buffer_bytes, tiers, made)
    return known.tables


def made_tables(blocks: tuple[BlockTimes, ...], buffer_bytes: float, tiers: int) -> CostTables:
    numbers, known = _numbers(blocks, tiers)
    compute, leaves, load, staged, needs, extra, more, *kept = numbers
    begins = np.array([block.begins_step for block in blocks])[:, None, None]
    pays = np.stack([np.where(begins, 0.0, needs), np.zeros_like(needs)], 1)
    staged = staged[:, None] + np.where(pays > 0, more[:, None], 0.0)
    fits = known[:, None] & (staged <= min(buffer_bytes, sys.float_info.max))
    by_tier = [kept[t][:, None] + pays * kept[tiers + t][:, None] for t in range(tiers)]
    return CostTables(
        closed=np.where(fits, 0.0, math.inf),
        compute=compute,
        leaves=leaves.astype(np.int64),
        load=load[:, None] + pays * extra[:, None],
        staged=np.where(fits, staged, 0.0),
        kept=np.stack(by_tier, -1) if tiers else np.zeros((*fits.shape, 0)),
        fixed=np.array([block.fixed_seconds for block in blocks]),
    )


def _numbers(blocks: tuple[BlockTimes, ...], tiers: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the numbers as (columns, blocks, members, choices), and a mask of existing choices."""
    menus = list(chain.from_iterable([block.members for block in blocks]))
    choices = list(chain.from_iterable(menus))
    lengths = np.array(list(map(len, menus))).reshape(len(blocks), -1)
    known = np.arange(lengths.max()) < lengths[..., None]
    packed = np.frombuffer(b"".join([choice.packed for choice in choices]))
    if known.all() and not tiers:
        return np.moveaxis(packed.reshape(*known.shape, len(NUMBERS)), -1, 0).copy(), known
    numbers = np.zeros((len(NUMBERS) + 2 * tiers, *known.shape))
    numbers[: len(NUMBERS), known] = packed.reshape(-1, len(NUMBERS)).T
    if tiers:
        kept = [_padded(choice.kept_bytes, tiers) for choice in choices]
        extra = [_padded(choice.extra_kept, tiers) for choice in choices]
        numbers[len(NUMBERS) :, known] = np.column_stack([kept, extra]).T
    return numbers, known


def _padded(sizes: tuple[float, ...], tiers: int) -> tuple[float, ...]:
    return (*sizes, *[0.0] * tiers)[:tiers]
