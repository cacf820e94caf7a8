"""The plan of a step: which choice each block takes for each member, so that the step ends first.

What is optimised, exactly: `simulate(...).end` over all selections, under the rules of
`timeline.py`, the bounded buffer included; with budgets, over the selections that keep at most that
many bytes per tier. The problem contains PARTITION (loads on one stream, compute on the other), so
no method is both exact and fast on every input. This one is a dynamic programme over the blocks
with two ways to drop a state, both without loss:

- dominance: another state is no later in the ends of both streams, has no more members whose full
  stream is gone, has kept no more bytes, and its buffer is freed no later;
- bounds (`bounds.py`): even its best rest of the way ends later than a plan in hand.

Before it come the bound alone and the plans that it suggests (`heuristics.py`): all that serving
waits for. The search runs with few states first, and with more for as long as a state had to be
dropped otherwise that might have led to a better plan. `Plan.bound` says what was proved:
`bound == end` is optimal.

Pure numbers: knows nothing of tensors, streams or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from maskfx.errors import InputError
from maskfx.runtime.planner.bounds import Bounds, ascend
from maskfx.runtime.planner.heuristics import quick_plan
from maskfx.runtime.planner.problem import CostTables, Problem, SearchResult, tables_of
from maskfx.runtime.planner.search import search
from maskfx.runtime.planner.timeline import NOW, BlockTimes, Start, Timeline, check

QUICK = ()  # no search: what serving can wait for
WIDTHS = (16, 128, 1024, 8192)  # states kept per block, pass by pass: may take minutes to prove
NEAR = 0.003  # without a search, a plan that much later than the bound is near enough
QUICK_ROUNDS, ROUNDS = 3, 12  # of better weights for the bound
QUICK_BOUND, BOUND = 2e-3, 1e-7  # relative: a bound that close to the highest one will do
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

    def names(self, blocks: Sequence[BlockTimes]) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(choices[i].name for choices, i in zip(block.members, picked, strict=True))
            for block, picked in zip(blocks, self.selection, strict=True)
        )


def plan(
    blocks: Sequence[BlockTimes],
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
    tables = tables_of(tuple(blocks), buffer_bytes, len(budgets))
    close = CLOSE * (tables.scale + abs(start.load) + abs(start.compute))
    slack, share = max(within, close), 0.0 if widths else NEAR
    problem = Problem(buffer_bytes, start, np.array(budgets, dtype=np.float64), slack, share)
    best, proved = _solve(tables, problem, widths)
    if best is None:
        raise InputError(
            f"no selection found whose loads fit into a staging buffer of {buffer_bytes:g} bytes "
            f"and whose kept bytes fit into {list(budgets)}; give more of them"
        )
    bound = proved if proved < best.end - 2 * close else best.end
    return Plan(tuple(map(tuple, best.selection.tolist())), best.timeline, bound)


def _solve(
    tables: CostTables, problem: Problem, widths: Sequence[int]
) -> tuple[SearchResult | None, float]:
    """The best selection found, and an end that no selection undercuts."""
    rounds, close = (ROUNDS, BOUND) if widths else (QUICK_ROUNDS, QUICK_BOUND)
    ascent = ascend(tables, problem, rounds, close)
    best, proved = quick_plan(tables, problem, ascent), ascent.end
    if best is None and not widths:
        widths = WIDTHS[:1]
    if widths and not problem.enough(best, proved):
        bounds = Bounds.around(tables, ascent, problem)
        for width in widths:
            best, left = search(tables, bounds, problem, width, best)
            proved = max(proved, left)
            if problem.enough(best, proved):
                break
    return best, proved
