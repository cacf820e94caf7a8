"""What is planned, as arrays: the choices, what a plan must obey, and what a selection costs."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from maskfx.runtime.timeline import Block, Choice, Cost, Start, Timeline, run_streams

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEAD, LIVE = 0, 1
NEVER = 1e30  # seconds: what is closed takes that long where endless times can't be reckoned with
KNOWN = 64  # how many lists of blocks keep their tables

_numbers = attrgetter(
    "compute_seconds",
    "leaves_full",
    "load_seconds",
    "load_bytes",
    "needs_full",
    "extra_seconds",
    "extra_bytes",
)


@dataclass(frozen=True, eq=False)
class Problem:
    """What a plan must obey, beside its choices.

    slack: so many seconds from the best are near enough; share: or that much of the plan's end.
    """

    buffer_bytes: float
    start: Start
    budgets: Floats
    slack: float
    share: float = 0.0

    def enough(self, best: Found | None, proved: float) -> bool:
        return proved >= (best.end - self.near(best.end) if best else math.inf)

    def near(self, end: float) -> float:
        return max(self.slack, self.share * end)


@dataclass(frozen=True, eq=False)
class Found:
    """A selection that is allowed, and when all of it happens."""

    selection: Ints
    timeline: Timeline

    @property
    def end(self) -> float:
        return self.timeline.end


def better(one: Found | None, other: Found | None) -> Found | None:
    if one is None or other is None:
        return one or other
    return other if other.end < one.end else one


@dataclass(frozen=True, eq=False)
class Ways:
    """The choices of each kind of member, sorted by whether they leave the stream live.

    columns: (block, [slot, after, before, kind], column), which are load, compute, NEVER where
    that way is closed, and kept bytes by tier. choice: (block, slot, after, kind), its number.
    """

    columns: Floats
    choice: Ints


@dataclass(frozen=True, eq=False)
class Tables:
    """The choices as arrays: (blocks, [dead/live,] members, choices).

    closed: infinite where there is no such choice, or where its bytes alone exceed the buffer.
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
        """More seconds than any useful plan needs."""
        return float(self.compute.sum() + self.fixed.sum()) or float(self.load.sum()) or 1.0

    @cached_property
    def kinds(self) -> tuple[Ints, Ints]:
        """Members that no block tells apart are of one kind: a member of each, each one's kind."""
        values = (self.closed, self.load, self.staged, self.compute[:, None], self.leaves[:, None])
        rows = [np.moveaxis(v, 2, 0).reshape(v.shape[2], -1) for v in (*values, self.kept)]
        known: dict[bytes, int] = {}
        kinds = [known.setdefault(row.tobytes(), len(known)) for row in np.concatenate(rows, 1)]
        return np.array([kinds.index(kind) for kind in range(len(known))]), np.array(kinds)

    def twins(self) -> Ints:
        """For each member the one before it if no block tells them apart, else -1."""
        kind = self.kinds[1]
        return np.append(-1, np.where(kind[1:] == kind[:-1], np.arange(len(kind) - 1), -1))

    @cached_property
    def ways(self) -> Ways:
        member, _ = self.kinds
        leaves = self.leaves[:, member]
        states = np.arange(2)[:, None]
        slots = int(max((leaves == state).sum(2).max() for state in (DEAD, LIVE)))
        order = [np.argsort(leaves != state, axis=2, kind="stable") for state in (DEAD, LIVE)]
        choice = np.moveaxis(np.stack(order, 1)[..., :slots], 3, 1)  # block, slot, after, kind
        block = np.arange(len(leaves))[:, None, None, None]
        leads = self.leaves[block, member, choice] == states
        at = (block[..., None], states, member, choice[:, :, :, None])
        numbers = np.empty((*np.broadcast_shapes(*(np.shape(i) for i in at)), 3 + self.tiers))
        numbers[..., 0] = self.load[at]
        numbers[..., 1] = self.compute[block, member, choice][:, :, :, None]
        shut = (self.closed[at] > 0) | ~leads[:, :, :, None]
        numbers[..., 2] = np.where(shut, NEVER, 0.0)
        numbers[..., 3:] = self.kept[at]
        return Ways(numbers.reshape(len(leaves), -1, 3 + self.tiers), choice)

    @property
    def tiers(self) -> int:
        return int(self.kept.shape[-1])

    @cached_property
    def computed(self) -> Ints | None:
        """The selection that computes everything and keeps nothing, if the choices allow it."""
        load = self.load[:, LIVE] + self.staged[:, LIVE] + self.kept[:, LIVE].sum(-1)
        able = (load == 0) & (self.leaves == LIVE) & (self.closed[:, LIVE] == 0)
        return np.where(able, self.compute, math.inf).argmin(-1) if able.any(-1).all() else None

    @cached_property
    def alike(self) -> list[list[tuple[float, float]]]:
        """Per number of a choice and block: load and compute if all members take it, live."""
        load = (self.load[:, LIVE] + self.closed[:, LIVE]).sum(1).T
        compute = (self.compute.sum(1) + self.fixed[:, None]).T
        return [
            list(zip(*rows, strict=True))
            for rows in zip(load.tolist(), compute.tolist(), strict=True)
        ]

    def places(self, selections: Ints, live: bool) -> tuple[Ints, Ints, Ints]:
        """Indices of blocks and members, and which of them stand at a block with a live stream."""
        blocks, members = selections.shape[-2:]
        every, each = np.arange(blocks)[:, None], np.arange(members)
        before = np.empty_like(selections)
        before[..., 0, :] = int(live)
        before[..., 1:, :] = self.leaves[every, each, selections][..., :-1, :]
        return every, each, before

    def sums(self, selections: Ints, live: bool) -> tuple[Floats, Floats]:
        """(..., blocks): seconds of load and of compute of the whole batch."""
        every, each, before = self.places(selections, live)
        load: Floats = self.load[every, before, each, selections].sum(-1)
        compute: Floats = self.compute[every, each, selections].sum(-1) + self.fixed
        return load, compute

    def costs(self, selection: Ints, live: bool) -> list[Cost]:
        """As `batch_costs`, from the tables."""
        every, each, before = self.places(selection, live)
        at = (every, before, each, selection)
        load, staged = self.load[at].sum(1), self.staged[at].sum(1)
        compute = self.compute[every, each, selection].sum(1) + self.fixed
        return list(map(Cost, load.tolist(), staged.tolist(), compute.tolist()))

    def kept_by(self, selections: Ints, live: bool) -> Floats:
        """(..., tiers): what a template keeps for a selection."""
        if not self.tiers:
            return np.zeros((*selections.shape[:-2], 0))
        every, each, before = self.places(selections, live)
        total: Floats = self.kept[every, before, each, selections].sum((-3, -2))
        return total

    def tried(self, selection: Ints, problem: Problem) -> Found | None:
        """When it ends, if it is allowed."""
        live = problem.start.live
        every, each, before = self.places(selection, live)
        if not np.isfinite(self.closed[every, before, each, selection]).all():
            return None
        if (self.kept_by(selection, live) > problem.budgets).any():
            return None
        costs = self.costs(selection, live)
        if max(cost.staged for cost in costs) > problem.buffer_bytes:
            return None
        return Found(selection, run_streams(costs, problem.buffer_bytes, problem.start))


@lru_cache(maxsize=KNOWN)
def tables_of(blocks: tuple[Block, ...], buffer_bytes: float, tiers: int) -> Tables:
    """The tables of these very blocks, made once: serving plans the same ones again and again."""
    every = [menu for block in blocks for menu in block.members]
    different = {id(menu): menu for menu in every}
    row_of = {key: row for row, key in enumerate(different)}
    rows = np.array([row_of[id(menu)] for menu in every]).reshape(len(blocks), -1)
    numbers, known = _menu_numbers(list(different.values()), tiers)
    columns = np.ascontiguousarray(np.moveaxis(numbers, 2, 0))
    compute, leaves, load, staged, needs, extra, more, *kept = columns[:, rows]
    begins = np.array([block.begins_step for block in blocks])[:, None, None]
    pays = np.stack([np.where(begins, 0.0, needs), np.zeros_like(needs)], 1)
    staged = staged[:, None] + pays * more[:, None]
    fits = known[rows][:, None] & (staged <= min(buffer_bytes, sys.float_info.max))
    by_tier = [kept[t][:, None] + pays * kept[tiers + t][:, None] for t in range(tiers)]
    return Tables(
        closed=np.where(fits, 0.0, math.inf),
        compute=compute,
        leaves=leaves.astype(np.int64),
        load=load[:, None] + pays * extra[:, None],
        staged=np.where(fits, staged, 0.0),
        kept=np.stack(by_tier, -1) if tiers else np.zeros((*fits.shape, 0)),
        fixed=np.array([block.fixed_seconds for block in blocks]),
    )


def _menu_numbers(menus: list[tuple[Choice, ...]], tiers: int) -> tuple[Floats, NDArray[np.bool_]]:
    """(menus, choices, columns), and which of these choices there are."""

    def numbers_of(choice: Choice) -> tuple[float, ...]:
        kept, extra = _padded(choice.kept_bytes, tiers), _padded(choice.extra_kept, tiers)
        return (*_numbers(choice), *kept, *extra)

    lengths = np.array([len(menu) for menu in menus])
    known = np.arange(lengths.max()) < lengths[:, None]
    rows = map(numbers_of if tiers else _numbers, chain.from_iterable(menus))
    flat = np.fromiter(chain.from_iterable(rows), np.float64)
    numbers = np.zeros((*known.shape, 7 + 2 * tiers))
    numbers[known] = flat.reshape(-1, 7 + 2 * tiers)
    return numbers, known


def _padded(sizes: tuple[float, ...], tiers: int) -> tuple[float, ...]:
    return (*sizes, *[0.0] * tiers)[:tiers]
