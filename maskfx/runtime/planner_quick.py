"""A good plan without a search, within milliseconds.

The weights of the bound suggest plans that are each best for some balance of the two streams. Woven
together (`planner_weave.py`), they make a plan that keeps both streams busy and knows the buffer;
then single members change their choice at single blocks while that helps. Algorithm 1 is tried too,
so what comes out is never later than it.
"""

from __future__ import annotations

import math

import numpy as np

from maskfx.runtime.planner_bounds import Ascent
from maskfx.runtime.planner_tables import (
    DEAD,
    LIVE,
    NEVER,
    Floats,
    Found,
    Ints,
    Problem,
    Tables,
    better,
)
from maskfx.runtime.planner_weave import weave
from maskfx.runtime.timeline import Timeline

TRIES = 3  # of the suggested plans, simulated
CHANGES = 6  # of one member at one block


def quick_plan(tables: Tables, problem: Problem, ascent: Ascent) -> Found | None:
    """The best plan that needs no search; None if none of those tried is allowed."""
    best = algorithm_1(tables, problem, _best_suggested(tables, problem, ascent))
    if problem.enough(best, ascent.end):
        return best
    if not tables.tiers:
        best = weave(tables, problem, ascent, best)
    if best is None or tables.tiers or problem.enough(best, ascent.end):
        return best
    return polish(tables, problem, ascent, best)


def _best_suggested(tables: Tables, problem: Problem, ascent: Ascent) -> Found | None:
    """The best of the suggested plans."""
    best = None
    ends = ascent.lengths.max(1)  # no later than what the simulation says
    for number in np.argsort(ends, kind="stable")[:TRIES].tolist():
        if best is not None and ends[number] >= best.end:
            break
        best = better(best, tables.tried(ascent.plans[number], problem))
    return best


def algorithm_1(tables: Tables, problem: Problem, best: Found | None) -> Found | None:
    """`best`, or everything computed, or the best of Algorithm 1's (see `planner_baselines.py`).

    It decides for the whole batch, between computing everything and the choices of one number.
    """
    everything, start = tables.computed, problem.start
    if everything is None or not start.live:
        return best
    _, long = tables.sums(everything, live=True)
    without = long.tolist()
    if best is None or start.compute + sum(without) < best.end:
        best = better(best, tables.tried(everything, problem))
    for choice, costs in enumerate(tables.alike):
        load, compute = start.load, start.compute
        cached = []
        for (seconds, short), full in zip(costs, without, strict=True):
            loaded = max(load + seconds, compute) + short
            cached.append(loaded <= compute + full)
            if cached[-1]:
                load, compute = load + seconds, loaded
            else:
                compute += full
        if best is None or compute < best.end:  # it ends no earlier than it believes
            selection = np.where(np.array(cached)[:, None], choice, everything)
            best = better(best, tables.tried(selection, problem))
    return best


def polish(tables: Tables, problem: Problem, ascent: Ascent, best: Found) -> Found:
    """Better by one change after another of what one member does at one block."""
    for _ in range(CHANGES):
        changed = _best_change(tables, best, problem)
        found = None if changed is None else tables.tried(changed, problem)
        if found is None or found.end >= best.end:
            break
        best = found
        if problem.enough(best, ascent.end):
            break
    return best


def _best_change(tables: Tables, best: Found, problem: Problem) -> Ints | None:
    """The selection with that one change after which the longest of all paths is shortest.

    Exact if the loads that wait for room go on waiting for the same blocks.
    """
    selection, timeline = best.selection, best.timeline
    load, compute, load_next = _differences(tables, selection, problem.start.live)
    both, onwards, alone, around = _longest_paths(timeline)
    end = np.maximum(both[:, None, None] + load + compute, alone[:, None, None] + compute)
    end = np.maximum(end, onwards[:, None, None] + load + load_next)
    end = np.maximum(end, around[:, None, None])
    where = int(end.argmin())
    if not end.flat[where] < best.end - problem.slack:
        return None
    block, member, choice = np.unravel_index(where, end.shape)
    changed = selection.copy()
    changed[block, member] = choice
    return changed


def _differences(tables: Tables, selection: Ints, live: bool) -> tuple[Floats, Floats, Floats]:
    """(blocks, members, choices): what each choice instead of the selected one adds to its block's
    load and compute, and to the next block's load."""
    every, each = np.ogrid[: selection.shape[0], : selection.shape[1]]
    before = tables.before(selection, live)
    loads = tables.load + tables.closed
    load = loads[every, before, each]
    compute = tables.compute
    load = load - load[every, each, selection][..., None]
    compute = compute - compute[every, each, selection][..., None]
    lost = np.zeros(selection.shape)  # what the next load costs more if the stream is gone
    dead, alive = (loads[every[1:], state, each, selection[1:]] for state in (DEAD, LIVE))
    lost[:-1] = np.where(np.isinf(dead), math.inf, dead) - np.where(np.isinf(alive), 0.0, alive)
    was = tables.leaves[every, each, selection][..., None]
    gains = np.where(tables.leaves == DEAD, lost[..., None], -lost[..., None])
    return load, compute, np.where(tables.leaves == was, 0.0, gains)


def _longest_paths(timeline: Timeline) -> tuple[Floats, Floats, Floats, Floats]:
    """Per block the longest paths to the end: through its load and its compute; its load and the
    next one; its compute only; neither, past it by a later load that waits for an earlier block."""
    costs, count = timeline.costs, len(timeline.costs)
    waiting = _waiting(timeline)
    after = [0.0] * count  # from a compute's end to the last one's
    since = [-NEVER] * (count + 1)  # from a load's begin
    around = np.full(count, -math.inf)
    for n in range(count - 1, -1, -1):
        if n + 1 < count:
            after[n] = costs[n + 1].compute + after[n + 1]
        if n in waiting:
            after[n] = max(after[n], since[waiting[n]])
        since[n] = costs[n].load + max(costs[n].compute + after[n], since[n + 1])
    for earlier, later in waiting.items():
        past = timeline.loads[later][0] + since[later]
        around[earlier + 1 : later] = np.maximum(around[earlier + 1 : later], past)
    loads = np.array([end for _, end in timeline.loads])
    before = np.array([timeline.start.compute, *(end for _, end in timeline.computes[:-1])])
    onwards = np.array([cost.compute for cost in costs]) + after
    return loads + onwards, loads + since[1:], before + onwards, around


def _waiting(timeline: Timeline) -> dict[int, int]:
    """The load that waits for room until this block's compute ends; -1: until a former step's."""
    blocks = {end: n for n, (_, end) in enumerate(timeline.computes)}
    waiting, before = {}, timeline.start.load
    for n, (begin, end) in enumerate(timeline.loads):
        if begin > before:
            waiting[blocks.get(begin, -1)] = n
        before = end
    return waiting
