"""The plan of a step: which choice each block takes for each member, so that the step ends first.

What is optimised, exactly: `simulate(...).end` over all selections, under the rules of
`timeline.py`, the bounded buffer included; with budgets, over the selections that keep at most that
many bytes per tier. The problem contains PARTITION (loads on one stream, compute on the other), so
no method is both exact and fast on every input. This one is a dynamic programme over the blocks
with two ways to drop a state, both without loss:

- dominance: another state is no later in the ends of both streams, has no more members whose full
  stream is gone, has kept no more bytes, and its buffer is freed no later;
- bounds (`planner_bounds.py`): even its best rest of the way ends later than a plan in hand.

It runs with few states first, and with more for as long as a state had to be dropped otherwise that
might have led to a better plan. `Plan.bound` says what was proved: `bound == end` is optimal.

Pure numbers: knows nothing of tensors, streams or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from maskfx.errors import InputError
from maskfx.runtime.planner_bounds import LIVE, Bounds, Floats, Ints, Tables, cheapest, sweep
from maskfx.runtime.planner_states import Found, Problem, better, search
from maskfx.runtime.timeline import NOW, Block, Cost, Start, Timeline, check, run_streams

QUICK = (16,)  # states kept per block, pass by pass: what serving can wait for
WIDTHS = (16, 128, 1024, 8192)  # a batch of different requests may take minutes to prove
ROUNDS = 6  # of better weights for the bound
CLOSE = 1e-11  # relative: two ends this close are one


@dataclass(frozen=True)
class Plan:
    """selection: per block and member, the number of its choice. No plan ends before `bound`."""

    selection: tuple[tuple[int, ...], ...]
    timeline: Timeline
    bound: float

    @property
    def end(self) -> float:
        return self.timeline.end

    @property
    def optimal(self) -> bool:
        return self.bound >= self.end

    def names(self, blocks: Sequence[Block]) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(choices[i].name for choices, i in zip(block.members, picked, strict=True))
            for block, picked in zip(blocks, self.selection, strict=True)
        )


def plan(
    blocks: Sequence[Block],
    buffer_bytes: float = math.inf,
    start: Start = NOW,
    budgets: Sequence[float] = (),
    within: float = 0.0,
    widths: Sequence[int] = WIDTHS,
) -> Plan:
    """The selection that ends first; `within` seconds of it is near enough.

    widths: how much to search (QUICK, WIDTHS); `Plan.bound` says how much that has proved.
    budgets: per tier, how many kept bytes the selection may need. For several steps, or a steady
    state, plan `repeat(blocks, steps)`, or start where the last step's `timeline.carry()` says.
    """
    check(blocks, buffer_bytes)
    tables = Tables.of(blocks, buffer_bytes, len(budgets))
    close = CLOSE * _horizon(tables, start)
    problem = Problem(buffer_bytes, start, np.array(budgets, dtype=np.float64), max(within, close))
    best, proved = _solve(tables, problem, widths)
    if best is None:
        raise InputError(
            f"no selection found whose loads fit into a staging buffer of {buffer_bytes:g} bytes "
            f"and whose kept bytes fit into {list(budgets)}; give more of them"
        )
    timeline = run_streams(tables.costs(best.selection, start.live), buffer_bytes, start)
    bound = proved if proved < timeline.end - 2 * close else timeline.end
    return Plan(tuple(map(tuple, best.selection.tolist())), timeline, bound)


def _solve(tables: Tables, problem: Problem, widths: Sequence[int]) -> tuple[Found | None, float]:
    """The best selection found, and an end that no selection undercuts."""
    bounds, best = _weigh(tables, problem)
    proved = float(bounds.ends[0])
    if not problem.enough(best, proved):
        best = better(best, _greedy(tables, problem))
        best = better(best, _alike(tables, problem, widths[:1]))
    for width in widths:
        if problem.enough(best, proved):
            break
        bounds = bounds if len(bounds.ends) > 1 else bounds.leaning(tables, problem.start)
        best, left = search(tables, bounds, problem, width, best)
        proved = max(proved, left)
    return best, proved


def _horizon(tables: Tables, start: Start) -> float:
    """Later than any useful plan: the scale of what counts as equal."""
    compute = (
        float(tables.compute.sum() + tables.fixed.sum()) + abs(start.load) + abs(start.compute)
    )
    return compute or float(tables.load.sum()) or 1.0


def _weigh(tables: Tables, problem: Problem) -> tuple[Bounds, Found | None]:
    """Weights whose bound is high, and the best of the plans that they suggest.

    First means of the two ends, all compute and all loads; then each round moves towards the path
    that the suggested plan makes longest, and the price of a tier up while its budget is exceeded.
    """
    count, budgets, start = len(tables.fixed), problem.budgets, problem.start
    shares = np.linspace(0.0, 1.0, 6)
    weights = np.zeros((2 * len(shares), count + 1))
    first = np.arange(2).repeat(len(shares))  # without and with the first block's load
    weights[np.arange(len(first)), first] = 1 - np.tile(shares, 2)
    weights[:, count] += np.tile(shares, 2)
    prices = np.zeros((len(weights), len(budgets)))
    bounds, best = None, _without_loads(tables, start)
    for _ in range(ROUNDS + 5 * len(budgets)):
        ends, _rest = sweep(tables, weights, prices, budgets, start)
        top = int(ends.argmax())
        if bounds is None or ends[top] > bounds.ends[0]:
            row = slice(top, top + 1)
            bounds = Bounds.of(tables, weights[row], prices[row], budgets, start)
        elif not len(budgets):
            break
        selection = cheapest(tables, bounds, start.live)
        best = better(best, _tried(tables, selection, problem))
        if problem.enough(best, float(bounds.ends[0])):
            break
        paths = _paths(tables.costs(selection, start.live), start)
        over = tables.kept_by(selection, start.live) - budgets
        towards = np.zeros(count + 1)
        towards[paths.argmax()] = 1.0
        steps = np.append(0.0, np.geomspace(0.5, 2e-3, 8))[:, None]
        weights = (1 - steps) * bounds.weights[0] + steps * towards
        scale = paths.max() / np.maximum(budgets, 1.0)
        prices = np.maximum(bounds.prices[0] + steps * np.sign(over) * scale, 0.0)
    assert bounds is not None
    return bounds, best


def _paths(costs: Sequence[Cost], start: Start) -> Floats:
    """The lengths whose weighted mean is the bound: all compute, then through each block's load."""
    loads = np.cumsum([cost.load for cost in costs])
    computes = np.cumsum([cost.compute for cost in reversed(costs)])[::-1]
    return np.append(start.compute + computes[0], start.load + loads + computes)


def _tried(tables: Tables, selection: Ints, problem: Problem) -> Found | None:
    """When a suggested selection ends, if it is allowed."""
    live = problem.start.live
    costs = tables.costs(selection, live)
    over = (tables.kept_by(selection, live) > problem.budgets).any()
    if over or not tables.fits(selection, live, problem.buffer_bytes):
        return None
    return Found(selection, run_streams(costs, problem.buffer_bytes, problem.start).end)


def _without_loads(tables: Tables, start: Start) -> Found | None:
    """Everything computed and nothing kept, if the choices allow it: "don't cache"."""
    load = tables.load[:, LIVE] + tables.staged[:, LIVE] + tables.kept[:, LIVE].sum(-1)
    able = (load == 0) & (tables.leaves == LIVE) & (tables.closed[:, LIVE] == 0)
    if not (start.live and able.any(-1).all()):
        return None
    compute = np.where(able, tables.compute, math.inf)
    end = start.compute + float(compute.min(-1).sum() + tables.fixed.sum())
    return Found(compute.argmin(-1), end)


def _greedy(tables: Tables, problem: Problem) -> Found | None:
    """The best of Algorithm 1's (see `planner_baselines.py`): so ours is never later than it.

    For the whole batch, between computing everything and the choices of one number.
    """
    everything = _without_loads(tables, problem.start)
    if everything is None:
        return None
    best: Found | None = everything
    blocks, members = np.ogrid[: len(tables.fixed), : tables.compute.shape[1]]
    long = tables.compute[blocks, members, everything.selection].sum(1).tolist()
    for choice in range(tables.compute.shape[2]):
        closed = tables.closed[:, LIVE, :, choice].sum(1)
        loads = (tables.load[:, LIVE, :, choice].sum(1) + closed).tolist()
        short = tables.compute[:, :, choice].sum(1).tolist()
        load, compute = problem.start.load, problem.start.compute
        cached = np.zeros(len(loads), dtype=bool)
        for n, fixed in enumerate(tables.fixed.tolist()):
            loaded = max(load + loads[n], compute) + short[n]
            cached[n] = loaded <= compute + long[n]
            load += loads[n] if cached[n] else 0.0
            compute = fixed + (loaded if cached[n] else compute + long[n])
        selection = np.where(cached[:, None], choice, everything.selection)
        best = better(best, _tried(tables, selection, problem))
    return best


def _alike(tables: Tables, problem: Problem, widths: Sequence[int]) -> Found | None:
    """A good plan among those that treat all members alike."""
    members = tables.compute.shape[1]
    if members == 1:
        return None
    found, _ = _solve(tables.together(), problem, widths)
    return found and _tried(tables, found.selection.repeat(members, axis=1), problem)
