"""How early any plan could end at best: lower bounds that let the planner's search skip most plans.

With L the sums of loads and K the sums of compute, a plan ends no earlier than
`load start + L(1..j) + K(j..N)` for each block j, nor than `compute start + K(1..N)`. So it ends no
earlier than any weighted mean of these. Under fixed weights the members don't matter to each other:
each one's cheapest way is a shortest path over (block, is its stream live), and their sum bounds
all plans. The buffer only delays, so the bound holds with it. Byte budgets join with a price each.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskfx.runtime.timeline import Block, Cost, Start

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEAD, LIVE = 0, 1


def _sized(numbers: Floats, width: int, tiers: int) -> Floats:
    """A block's numbers with that many choices and tiers; choices too many have endless bytes."""
    members, choices, columns = numbers.shape
    ways = numbers[..., 2:].reshape(members, choices, 2, (columns - 2) // 2)
    sized = np.zeros((members, width, 2, 2 + tiers))
    known = min(ways.shape[-1], 2 + tiers)
    sized[:, :choices, :, :known] = ways[..., :known]
    sized[:, choices:, :, 1] = math.inf
    head = np.zeros((members, width, 2))
    head[:, :choices] = numbers[..., :2]
    return np.concatenate([head, sized.reshape(members, width, -1)], axis=2)


@dataclass(frozen=True)
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

    @staticmethod
    def of(blocks: Sequence[Block], buffer_bytes: float, tiers: int) -> Tables:
        width = max(block.numbers.shape[1] for block in blocks)
        different: dict[int, Floats] = {}
        for block in blocks:
            if id(block) not in different:
                different[id(block)] = _sized(block.numbers, width, tiers)
        all_rows = np.array([different[id(block)] for block in blocks])
        ways = np.moveaxis(all_rows[..., 2:].reshape(*all_rows.shape[:3], 2, 2 + tiers), 3, 1)
        fits = ways[..., 1] <= min(buffer_bytes, sys.float_info.max)
        return Tables(
            closed=np.where(fits, 0.0, math.inf),
            compute=all_rows[..., 0],
            leaves=all_rows[..., 1].astype(np.int64),
            load=ways[..., 0],
            staged=np.where(fits, ways[..., 1], 0.0),
            kept=ways[..., 2:],
            fixed=np.array([block.fixed_seconds for block in blocks]),
        )

    def together(self) -> Tables:
        """The batch as one member: everyone takes the choice of the same number."""
        return Tables(
            closed=self.closed.sum(2, keepdims=True),
            compute=self.compute.sum(1, keepdims=True),
            leaves=self.leaves.min(1, keepdims=True),
            load=self.load.sum(2, keepdims=True),
            staged=self.staged.sum(2, keepdims=True),
            kept=self.kept.sum(2, keepdims=True),
            fixed=self.fixed,
        )

    def twins(self) -> Ints:
        """For each member the one before it if no block tells them apart, else -1."""
        values = (self.closed, self.load, self.staged, self.compute[:, None], self.leaves[:, None])
        rows = [np.moveaxis(v, 2, 0).reshape(v.shape[2], -1) for v in (*values, self.kept)]
        flat = np.concatenate(rows, axis=1)
        same = (flat[1:] == flat[:-1]).all(1)
        return np.append(-1, np.where(same, np.arange(len(same)), -1))

    def costs(self, selection: Ints, live: bool) -> list[Cost]:
        """As `batch_costs`, from the tables."""
        every, each, before = self._places(selection, live)
        load = self.load[every, before, each, selection].sum(1)
        staged = self.staged[every, before, each, selection].sum(1)
        compute = self.compute[every, each, selection].sum(1) + self.fixed
        rows = zip(load.tolist(), staged.tolist(), compute.tolist(), strict=True)
        return [Cost(*row) for row in rows]

    def fits(self, selection: Ints, live: bool, buffer_bytes: float) -> bool:
        """Do every block's loads fit into the buffer, and is every choice open?"""
        every, each, before = self._places(selection, live)
        at = (every, before, each, selection)
        most = self.staged[at].sum(1).max()
        return bool(most <= buffer_bytes and np.isfinite(self.closed[at]).all())

    def kept_by(self, selection: Ints, live: bool) -> Floats:
        """What a template keeps for a selection, by tier."""
        every, each, before = self._places(selection, live)
        total: Floats = self.kept[every, before, each, selection].sum((0, 1))
        return total

    def _places(self, selection: Ints, live: bool) -> tuple[Ints, Ints, Ints]:
        """Indices of blocks and members, and which of them stand at a block with a live stream."""
        blocks, members = selection.shape
        every, each = np.arange(blocks)[:, None], np.arange(members)
        after = self.leaves[every, each, selection]
        before = np.vstack([np.full((1, members), int(live)), after[:-1]])
        return every, each, before


def _choices_early(values: NDArray[Any]) -> NDArray[Any]:
    """(block, dead/live, member, choice) as (block, dead/live, choice, -, member)."""
    return np.moveaxis(values, 3, 2)[:, :, :, None]


def sweep(
    tables: Tables, weights: Floats, prices: Floats, budgets: Floats, start: Start
) -> tuple[Floats, Floats]:
    """For each row of weights (over blocks + 1 paths) and prices: the bound on all plans, and per
    block, dead or live, row and member, the least that the rest of the way adds to it."""
    early = np.cumsum(weights, axis=1)
    late = early[:, -1:] - early + weights  # from this path on, itself included
    at = (slice(None), None, None, slice(None), None)  # block, dead/live, choice, row, member
    cost = np.multiply(_choices_early(tables.load), late.T[1:][at], order="C")
    cost += _choices_early(tables.compute[:, None]) * early.T[1:][at]
    if prices.shape[1]:
        cost += np.moveaxis(tables.kept @ prices.T, (2, 3, 4), (4, 2, 3))
    cost += _choices_early(tables.closed)
    leaves = _choices_early(tables.leaves[:, None]) == LIVE
    to_dead = np.where(leaves, math.inf, cost).min(2)
    ways = np.stack([to_dead, np.where(leaves, cost, math.inf).min(2)], 1)
    rest = np.zeros((len(ways) + 1, *ways.shape[2:]))
    through = np.empty(ways.shape[1:])
    for n in range(len(ways) - 1, -1, -1):
        np.add(ways[n], rest[n + 1][:, None], out=through)
        np.minimum(through[0], through[1], out=rest[n])
    begin = weights[:, 0] * start.compute + late[:, 1] * start.load
    ends = begin + early[:, 1:] @ tables.fixed + rest[0, int(start.live)].sum(1) - prices @ budgets
    return ends, rest


@dataclass(frozen=True)
class Bounds:
    """Several sets of weights at once.

    A plan that stands after n blocks at (load end, compute end, live, kept) ends no earlier than
    early[n] * compute end + late[n] * load end + rest[n] + gone[n] of the members whose stream is
    dead + (kept - budgets) * prices, for each of the weights.
    """

    ends: Floats  # of all plans
    weights: Floats
    prices: Floats
    budgets: Floats
    early: Floats  # blocks + 1, weights
    late: Floats
    rest: Floats  # the fixed compute and every member's rest, all streams live
    gone: Floats  # blocks + 1, weights, members
    more: Floats  # blocks, members, weights, dead/live, choices: what a choice adds

    @staticmethod
    def of(
        tables: Tables, weights: Floats, prices: Floats, budgets: Floats, start: Start
    ) -> Bounds:
        ends, rest = sweep(tables, weights, prices, budgets, start)
        early = np.cumsum(weights, axis=1).T
        late = early[-1] - early
        load, closed = (np.moveaxis(v, 1, 2)[:, :, None] for v in (tables.load, tables.closed))
        way = load * (late + weights.T)[1:, None, :, None, None]
        way += tables.compute[:, :, None, None] * early[1:, None, :, None, None]
        way += np.moveaxis(tables.kept @ prices.T, (1, 4), (3, 2)) + closed
        each = np.swapaxes(rest, 1, 3)  # block, member, weights, dead/live
        block, member = np.ogrid[: len(way), : way.shape[1]]
        after = np.moveaxis(each[1:][block[..., None], member[..., None], :, tables.leaves], 3, 2)
        before = np.where(np.isfinite(each), each, 0.0)  # where no way leads on, more is infinite
        later = np.cumsum((early[1:] * tables.fixed[:, None])[::-1], axis=0)[::-1]
        most = 1e3 * (tables.compute.sum() + tables.load.sum() + 1.0)  # no way on: more than any
        return Bounds(
            ends=ends,
            weights=weights,
            prices=prices,
            budgets=budgets,
            early=early,
            late=late,
            rest=np.vstack([later, np.zeros((1, len(weights)))]) + before[..., LIVE].sum(1),
            gone=np.swapaxes(np.minimum(each[..., DEAD] - before[..., LIVE], most), 1, 2),
            more=np.ascontiguousarray(way + after[:, :, :, None] - before[:-1, ..., None]),
        )

    def leaning(self, tables: Tables, start: Start) -> Bounds:
        """The first weights, and others leaning more and more towards each path that matters."""
        own = self.weights[0]
        leading = np.argsort(own)[-3:]
        paths = np.unique([0, len(own) - 1, *leading[own[leading] > 0]])
        lean = np.array([0.02, 0.06, 0.2, 1.0]).repeat(len(paths))[:, None]
        weights = np.vstack(
            [own, (1 - lean) * own + lean * np.tile(np.eye(len(own))[paths], (4, 1))]
        )
        prices = np.tile(self.prices[0], (len(weights), 1))
        return Bounds.of(tables, weights, prices, self.budgets, start)

    def at(self, n: int, load: Floats, compute: Floats, live: Ints, kept: Floats) -> Floats:
        """How early a plan can end that stands here after n blocks: (weights, states)."""
        ends = np.outer(self.early[n], compute) + np.outer(self.late[n], load)
        ends += self.rest[n][:, None] + self.gone[n] @ (1.0 - live).T
        if len(self.budgets):
            ends += self.prices @ (kept - self.budgets).T
        total: Floats = ends
        return total


def cheapest(tables: Tables, bounds: Bounds, live: bool) -> Ints:
    """The plan that the first weights alone would choose."""
    picks = np.swapaxes(bounds.more[:, :, 0].argmin(-1), 1, 2)
    each = np.arange(picks.shape[2])
    now = np.full(len(each), int(live))
    selection = np.empty((len(picks), len(each)), dtype=np.int64)
    for n in range(len(picks)):
        selection[n] = picks[n][now, each]
        now = tables.leaves[n][each, selection[n]]
    return selection
