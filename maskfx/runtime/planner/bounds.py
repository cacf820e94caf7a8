"""Lower bounds on the end of any plan, by which the planner's search skips most plans.

With L the sums of loads and K the sums of compute, a plan ends no earlier than
`load start + L(1..j) + K(j..N)` for each block j, nor than `compute start + K(1..N)`. So it ends no
earlier than any weighted mean of these. With fixed weights the members are independent: the
cheapest choices of each are a shortest path over (block, whether its stream is live), and the sum
of these paths bounds all plans. The buffer only delays, so the bound holds with it. Byte budgets
are added with a price (a Lagrange multiplier) each.

The weights are found by Kelley's cutting-plane method: the cheapest plans under some weights
determine which weights could be best, these suggest further plans, and so on until the bound can't
rise any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskfx.runtime.planner.problem import DEAD, LIVE, NEVER, CostTables, Floats, Ints, Problem

SHARES = 5  # number of initial weights: means of the two extremes, all compute and all loads
STEPS = np.array([1.0, 0.3])[:, None]  # step sizes from the best weights to the suggested ones
PRICES = np.append(0.0, np.geomspace(1e-2, 1e2, 5))  # of a tier, in longest paths per budget
PIVOTS = 100
TINY = 1e-12


@dataclass(frozen=True)
class Sweep:
    """The bounds for rows of weights (over blocks + 1 paths) and prices.

    `rest` is the least that the blocks from here on add to the bound, `through` the same by the
    state of the stream after the block, and `cost` what each choice for the block adds.
    """

    ends: Floats  # the bound on all plans, by row
    weights: Floats
    prices: Floats
    rest: Floats  # blocks + 1, dead/live before, kinds, rows
    through: Floats  # block, after, before, kind, row
    cost: Floats  # block, choice, after, before, kind, row


def sweep(tables: CostTables, weights: Floats, prices: Floats, problem: Problem) -> Sweep:
    start, budgets, ways = problem.start, problem.budgets, tables.ways
    count, rows = len(tables.fixed), len(weights)
    early = np.cumsum(weights, axis=1)
    late = early[:, -1:] - early + weights  # from this path on, inclusive
    factors = np.ones((count, 3 + tables.tiers, rows))
    factors[:, 0], factors[:, 1], factors[:, 3:] = late.T[1:], early.T[1:], prices.T
    kinds, columns = ways.shape[-2:]
    cost = (ways.reshape(count, -1, columns) @ factors).reshape(*ways.shape[:-1], rows)
    through = cost.min(1)
    rest = np.zeros((count + 1, 2, kinds, rows))
    each_way = (through, through[:, DEAD], through[:, LIVE], rest[1:, :, None], rest[:-1])
    for way, to_dead, to_live, then, now in zip(*(v[::-1] for v in each_way), strict=True):
        way += then
        np.minimum(to_dead, to_live, out=now)
    rest[rest >= NEVER] = math.inf
    every = np.bincount(tables.kinds[1])
    begin = weights[:, 0] * start.compute + late[:, 1] * start.load - prices @ budgets
    ends = begin + early[:, 1:] @ tables.fixed + every @ rest[0, int(start.live)]
    return Sweep(ends, weights, prices, rest, through, cost)


def suggested(tables: CostTables, swept: Sweep, live: bool) -> Ints:
    """Return for each row the cheapest selection under its weights: (rows, blocks, members)."""
    count, choices, _, _, kinds, rows = swept.cost.shape
    is_live = live_after(swept.through[:, LIVE] < swept.through[:, DEAD], live)
    one = kinds * rows  # size of the last axes of cost; a choice has 4 of them, by after and before
    every = np.arange(0, 4 * one * count * choices, 4 * one).reshape(count, choices).T
    at = (2 * is_live[1:] + is_live[:-1]) * one + np.arange(one).reshape(kinds, rows)
    picked = swept.cost.take(at + every[:, :, None, None]).argmin(0)
    selections: Ints = np.moveaxis(picked, 2, 0)[:, :, tables.kinds[1]]
    return selections


def live_after(to_live: NDArray[np.bool_], live: bool) -> NDArray[np.bool_]:
    """Return whether the stream is live before the first block and after each.

    Args:
        to_live: whether a block leaves it live, (blocks, dead/live before, kinds, rows).
        live: whether it is live at the start.

    A block ends with the same state whatever it began with, or keeps or flips it. So the state
    depends on the last block of the first sort, and on the number of flips since.
    """
    flips = np.empty((len(to_live) + 1, *to_live.shape[2:]), dtype=np.int64)
    flips[0], flips[1:] = live, to_live[:, DEAD]
    total = flips.cumsum(0)
    fixed = np.zeros(flips.shape, dtype=np.int64)
    numbers = np.arange(1, len(flips)).reshape(-1, 1, 1)
    np.multiply(numbers, to_live[:, DEAD] == to_live[:, LIVE], out=fixed[1:])
    last = np.maximum.accumulate(fixed, axis=0)
    before = np.take_along_axis(total - flips, last, 0)
    found: NDArray[np.bool_] = (total - before) % 2 == 1
    return found


def path_lengths(tables: CostTables, selections: Ints, problem: Problem) -> Floats:
    """Return path lengths (selections, blocks + 1), ignoring buffer delays.

    The first path is all compute; the others go through each block's load.
    """
    start = problem.start
    load, compute = tables.sums(selections, start.live)
    onwards = compute[:, ::-1].cumsum(1)[:, ::-1]
    return np.column_stack([start.compute + onwards[:, 0], start.load + load.cumsum(1) + onwards])


@dataclass(frozen=True)
class PlanMix:
    """A mix (convex combination) of plans within the budgets whose longest path is shortest.

    Args:
        shares: share of each plan.
        length: length of the longest path.
        weights: weights of the paths under which no mix is shorter.
        prices: prices of the tiers under which no mix is shorter.
    """

    shares: Floats
    length: float
    weights: Floats
    prices: Floats


def best_mix(lengths: Floats, over: Floats) -> PlanMix | None:
    """Find the best mix by the simplex method; None if every mix exceeds a budget.

    Args:
        lengths: path lengths, (plans, paths).
        over: bytes by which a plan exceeds the budgets, (plans, tiers).
    """
    plans, paths = lengths.shape
    least, span = float(lengths.min()), float(np.ptp(lengths)) or 1.0
    sizes = np.abs(over).max(0) + TINY
    table = np.zeros((paths + over.shape[1] + 1, plans + 1))  # rows: paths, tiers, objective
    table[:paths, :-1] = ((lengths - least) / span + 1.0).T
    table[paths:-1, :-1] = (over / sizes).T
    table[:paths, -1] = 1.0
    table[-1, :-1] = -1.0
    inside, outside = np.arange(plans, plans + len(table) - 1), np.arange(plans)
    for _ in range(PIVOTS):
        enters = int(table[-1, :-1].argmin())
        if table[-1, enters] > -TINY:
            break
        column = table[:, enters].copy()
        ratios = np.full(len(inside), math.inf)
        np.divide(table[:-1, -1], column[:-1], out=ratios, where=column[:-1] > TINY)
        leaves = int(ratios.argmin())
        row = table[leaves] / column[leaves]
        table -= column[:, None] * row
        table[leaves] = row
        table[:, enters] = column / -column[leaves]
        table[leaves, enters] = 1.0 / column[leaves]
        inside[leaves], outside[enters] = outside[enters], inside[leaves]
    total = float(table[-1, -1])
    if not total > TINY:
        return None
    values, duals = np.zeros(plans + len(inside)), np.zeros(plans + len(inside))
    values[inside] = np.maximum(table[:-1, -1], 0.0) / total
    duals[outside] = np.maximum(table[-1, :-1], 0.0)
    weights, prices = np.split(duals[plans:], [paths])
    shares = values[:plans]
    return PlanMix(
        shares=shares,
        length=(1.0 / total - 1.0) * span + least,
        weights=weights / weights.sum(),
        prices=prices / total * span / sizes,
    )


@dataclass(frozen=True)
class Ascent:
    """The best weights and prices found, the bound that they prove, and the plans suggested.

    Args:
        end: the lower bound on the end of any plan.
        weights: best weights of the paths.
        prices: best prices of the tiers.
        rest: as `Sweep.rest`, for the best weights only, (blocks + 1, dead/live, members).
        plans: suggested selections.
        lengths: path lengths of these plans.
        shares: share of each plan in the best mix.
    """

    end: float
    weights: Floats
    prices: Floats
    rest: Floats
    plans: Ints
    lengths: Floats
    shares: Floats


def ascend(tables: CostTables, problem: Problem, rounds: int, near: float) -> Ascent:
    """Find weights whose bound is within `near` (relative) of the highest, in at most `rounds`."""
    weights, prices = _first_rows(tables, problem)
    swept = sweep(tables, weights, prices, problem)
    top, row = swept, int(swept.ends.argmax())
    plans = suggested(tables, swept, problem.start.live)
    lengths = path_lengths(tables, plans, problem)
    shares = np.full(len(plans), 1 / len(plans))
    for _ in range(rounds):
        end = float(top.ends[row])
        if math.isinf(end):
            break
        mix = best_mix(lengths, tables.kept_by(plans, problem.start.live) - problem.budgets)
        own, price = top.weights[row], top.prices[row]
        if mix is None:
            weights, prices = np.tile(own, (len(STEPS), 1)), (price + 1e-9) * 4 / STEPS
        else:
            shares = mix.shares
            shortest = float(lengths.max(1).min()) if not tables.tiers else math.inf
            if min(mix.length - near * abs(mix.length), shortest - problem.near(shortest)) <= end:
                break
            weights = own + STEPS * (mix.weights - own)
            prices = price + STEPS * (mix.prices - price)
        swept = sweep(tables, weights, prices, problem)
        if swept.ends.max() > end:
            top, row = swept, int(swept.ends.argmax())
        more = suggested(tables, swept, problem.start.live)
        plans = np.concatenate([plans, more])
        lengths = np.concatenate([lengths, path_lengths(tables, more, problem)])
        shares = np.append(shares, np.zeros(len(more)))
    return Ascent(
        end=float(top.ends[row]),
        weights=top.weights[row],
        prices=top.prices[row],
        rest=top.rest[:, :, tables.kinds[1], row],
        plans=plans,
        lengths=lengths,
        shares=shares,
    )


def _first_rows(tables: CostTables, problem: Problem) -> tuple[Floats, Floats]:
    """Return means of the two extremes, all compute and all loads, each at several prices.

    Without budgets there are no prices.
    """
    shares = np.linspace(0.0, 1.0, SHARES)
    weights = np.zeros((SHARES, len(tables.fixed) + 1))
    weights[:, 0] = 1 - shares
    weights[:, -1] += shares
    if not tables.tiers:
        return weights, np.zeros((SHARES, 0))
    prices = PRICES[:, None] * tables.scale / np.maximum(problem.budgets, 1.0)
    return np.tile(weights, (len(PRICES), 1)), prices.repeat(SHARES, axis=0)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds for several sets of weights.

    A plan in state (load end, compute end, live, kept) after n blocks ends no earlier than
    early[n] * compute end + late[n] * load end + rest[n] + gone[n] of the members whose stream is
    dead + (kept - budgets) * prices, for each of the weights.
    """

    prices: Floats
    budgets: Floats
    early: Floats  # blocks + 1, weights
    late: Floats
    rest: Floats  # fixed compute plus every member's rest, with all streams live
    gone: Floats  # blocks + 1, weights, members
    more: Floats  # blocks, members, weights, dead/live, choices: what a choice adds

    @staticmethod
    def of(tables: CostTables, weights: Floats, prices: Floats, problem: Problem) -> Bounds:
        swept = sweep(tables, weights, prices, problem)
        early = np.cumsum(weights, axis=1).T
        late = early[-1] - early
        load, closed = (np.moveaxis(v, 1, 2)[:, :, None] for v in (tables.load, tables.closed))
        way = load * (late + weights.T)[1:, None, :, None, None]
        way += tables.compute[:, :, None, None] * early[1:, None, :, None, None]
        way += np.moveaxis(tables.kept @ prices.T, (1, 4), (3, 2)) + closed
        # block, member, weights, dead/live
        each = swept.rest[:, :, tables.kinds[1]].transpose(0, 2, 3, 1)
        block, member = np.ogrid[: len(way), : way.shape[1]]
        after = np.moveaxis(each[1:][block[..., None], member[..., None], :, tables.leaves], 3, 2)
        before = np.where(np.isfinite(each), each, 0.0)  # without continuation, `more` is infinite
        later = np.cumsum((early[1:] * tables.fixed[:, None])[::-1], axis=0)[::-1]
        most = 1e3 * (tables.compute.sum() + tables.load.sum() + 1.0)  # exceeds any plan
        return Bounds(
            prices=prices,
            budgets=problem.budgets,
            early=early,
            late=late,
            rest=np.vstack([later, np.zeros((1, len(weights)))]) + before[..., LIVE].sum(1),
            gone=np.swapaxes(np.minimum(each[..., DEAD] - before[..., LIVE], most), 1, 2),
            more=np.ascontiguousarray(way + after[:, :, :, None] - before[:-1, ..., None]),
        )

    @staticmethod
    def around(tables: CostTables, ascent: Ascent, problem: Problem) -> Bounds:
        """Return the bounds of the best weights, and of weights shifted towards the main paths.

        The main paths are the first, the last and up to three of the largest weights.
        """
        own = ascent.weights
        leading = np.argsort(own)[-3:]
        paths = np.unique([0, len(own) - 1, *leading[own[leading] > 0]])
        lean = np.array([0.02, 0.06, 0.2, 1.0]).repeat(len(paths))[:, None]
        leaning = (1 - lean) * own + lean * np.tile(np.eye(len(own))[paths], (4, 1))
        weights = np.vstack([own, leaning])
        return Bounds.of(tables, weights, np.tile(ascent.prices, (len(weights), 1)), problem)

    def at(self, n: int, load: Floats, compute: Floats, live: Ints, kept: Floats) -> Floats:
        """Return lower bounds on the ends of plans in these states after n blocks:
        (weights, states).
        """
        ends = np.outer(self.early[n], compute) + np.outer(self.late[n], load)
        ends += self.rest[n][:, None] + self.gone[n] @ (1.0 - live).T
        if len(self.budgets):
            ends += self.prices @ (kept - self.budgets).T
        total: Floats = ends
        return total
