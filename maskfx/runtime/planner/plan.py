"""The plan of a step: one choice per block and member, selected to minimize the step's end.

The objective is `simulate(...).end` over all selections, under the rules of `timeline.py` with its
bounded buffer; with budgets, over the selections that keep at most that many bytes per tier. The
problem contains PARTITION (loads on one stream, compute on the other), so no method is both exact
and fast on every input. This one is dynamic programming over the blocks with two lossless pruning
rules:

- dominance: another state has no later end of either stream, no more members whose full stream
  isn't live, no more bytes kept, and a buffer that is freed no later;
- bounds (`bounds.py`): the state's best continuation ends later than a known plan.

Before the search come the lower bound and the plans that it suggests (`heuristics.py`); serving
uses only these. The search keeps few states first, and more as long as a state was dropped for
lack of room that might have led to a better plan. `Plan.bound` is the proved lower bound:
`bound == end` means optimal.

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

QUICK = ()  # no search: fast enough for serving
WIDTHS = (16, 128, 1024, 8192)  # states kept per block, by pass: a proof may take minutes
# Without a search: relative distance from the bound at which a plan is accepted. Predicted times
# are off by more, and a better plan gains less than it takes to find.
NEAR = 0.01
QUICK_ROUNDS, ROUNDS = 3, 12  # rounds of improving the bound's weights
QUICK_BOUND, BOUND = 5e-3, 1e-7  # relative tolerance to the highest bound
CLOSE = 1e-11  # relative: ends closer than this count as equal


@dataclass(frozen=True)
class Plan:
    """The selected choices, their timeline, and a lower bound on the end of any plan.

    `selection` holds the index of the choice per block and member.
    """

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
    """Return the selection that ends first, or one within `within` seconds of it.

    For several steps or a steady state, plan `repeat(blocks, steps)`, or pass the last step's
    `timeline.carry()` as `start`.

    Args:
        blocks: choices per block and member.
        buffer_bytes: size of the staging buffer; unbounded by default.
        start: state of the two streams at the start of the step.
        budgets: maximum kept bytes per tier; none by default.
        within: tolerance in seconds.
        widths: states kept per block in each pass of the search (QUICK, WIDTHS); `Plan.bound` is
            what the search has proved.
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
    """Return the best selection found, and a lower bound on the end of all selections."""
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
