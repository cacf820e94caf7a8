"""Heuristics: a good plan without the full search, within milliseconds.

The weights of the bound suggest plans that are each best for some balance of the two streams, and
are rarely balanced. A few of them, called threads, are combined by `weave`: a beam search that
follows one thread per block, respects the buffer and keeps the partial plans of least bound. Then
single members change their choice at single blocks while that improves the plan. Algorithm 1 is
tried too, so the result never ends later than Algorithm 1's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import numpy as np

from maskfx.runtime.planner.bounds import Ascent, sweep
from maskfx.runtime.planner.problem import (
    DEAD,
    LIVE,
    NEVER,
    CostTables,
    Floats,
    Ints,
    Problem,
    SearchResult,
    better,
)
from maskfx.runtime.planner.timeline import Timeline

THREADS = 4
WIDE = 0.02  # relative: a thread may be that much worse than the best mix
WIDTH = 8  # partial plans kept per block: 4 and then 10 took a quarter longer and gained 1 %
ROWS = 3  # rows of weights: the best ones, and two shifted towards one stream each by LEAN
LEAN = 0.2


def _threads(ascent: Ascent, best: SearchResult | None) -> Ints:
    """Return up to THREADS plans: the best one so far, those of the best mix, then the ones
    shifted most towards either stream without being much worse."""
    lean = ascent.lengths[:, 0] - ascent.lengths[:, -1]
    worse = ascent.lengths @ ascent.weights > ascent.end + WIDE * abs(ascent.end)
    order = [
        *np.argsort(-ascent.shares, kind="stable")[: np.count_nonzero(ascent.shares)].tolist(),
        int(np.where(worse, -math.inf, lean).argmax()),
        int(np.where(worse, math.inf, lean).argmin()),
    ]
    known = {} if best is None else {best.selection.tobytes(): best.selection}
    for number in order:
        if len(known) < THREADS:
            known.setdefault(ascent.plans[number].tobytes(), ascent.plans[number])
    return np.array(list(known.values()))


# One block of a partial plan: load end, compute end, bound of the plan so far, thread; index
# `oldest` of the first block whose staged bytes are still in the buffer, and the bytes in it; bytes
# of this block; index of the plan that it continues. A tuple: hundreds are made per millisecond.
_Grown = tuple[float, float, float, int, int, float, float, int]
_Weave = tuple[_Grown, list[_Grown]]  # the last block, and all blocks staged so far

# A thread's costs at a block, by the previous block's thread: its index, load, bytes, compute, and
# the least remaining time by ROWS.
_Way = tuple[int, float, float, float, float, float, float]


@dataclass(frozen=True)
class _Loom:
    """Costs and bounds for combining threads.

    `ways` holds, by block and previous thread, the threads with distinct choices there. No plan
    ends before load end + early * (compute end - load end) + remaining time, for each of the ROWS.
    """

    ways: list[list[list[_Way]]]
    early: list[list[float]]

    @staticmethod
    def of(tables: CostTables, threads: Ints, ascent: Ascent, problem: Problem) -> _Loom:
        _, members, choices = tables.compute.shape
        alone, dead = (first + threads for first in tables.first)
        live = dead + members * choices
        before = tables.before(threads, problem.start.live)
        gone = np.swapaxes(1.0 - before, 0, 1)

        def by_thread(values: Floats) -> Floats:
            with_stream, without = values.take(live), values.take(dead)
            total: Floats = gone @ np.moveaxis(without - with_stream, 0, 2)
            total += with_stream.sum(-1).T[:, None]
            return total

        early, rest = _bounds_by_thread(tables, threads, ascent, problem)
        load = by_thread(tables.load + np.minimum(tables.closed, NEVER))
        columns = np.empty((3 + ROWS, *load.shape))  # block, thread before, thread
        columns[0], columns[1] = load, by_thread(tables.staged)
        columns[2] = (tables.compute.take(alone).sum(-1) + tables.fixed).T[:, None]
        columns[3:] = rest[:, :, None]
        own, past = first_alike(threads), first_alike(before)
        every = np.arange(len(threads))
        shown = (past == every)[:, :, None] & (own == every)[:, None]
        ways = zip(shown.nonzero()[2].tolist(), *columns[:, shown].tolist(), strict=True)
        by_block = []
        for firsts, count in zip(past.tolist(), (own == every).sum(1).tolist(), strict=True):
            known = {first: list(islice(ways, count)) for first in dict.fromkeys(firsts)}
            by_block.append([known[first] for first in firsts])
        return _Loom(by_block, early.tolist())


def first_alike(values: Ints) -> Ints:
    """Return, by block and thread, the first thread with equal values of all members there."""
    found: Ints = (values[:, None] == values).all(-1).argmax(0).T
    return found


def _bounds_by_thread(
    tables: CostTables, threads: Ints, ascent: Ascent, problem: Problem
) -> tuple[Floats, Floats]:
    """Return `early` after each block, by ROWS, and the least remaining time also by thread."""
    weights = np.tile(ascent.weights, (ROWS, 1))
    weights[1:] *= 1 - LEAN
    weights[1, 0] += LEAN
    weights[2, -1] += LEAN
    swept = sweep(tables, weights, np.tile(ascent.prices, (ROWS, 1)), problem)
    early = weights.cumsum(1)[:, 1:].T
    every, each = np.ogrid[: threads.shape[1], : threads.shape[2]]
    after = tables.leaves[every, each, threads]
    rest = swept.rest[every + 1, after, tables.kinds[1]].sum(2)  # thread, block, row
    rest[:, :-1] += (early * tables.fixed[:, None])[:0:-1].cumsum(0)[::-1]
    return early, rest.transpose(2, 1, 0)


def weave(
    tables: CostTables, problem: Problem, ascent: Ascent, best: SearchResult | None
) -> SearchResult | None:
    """Return `best`, or a faster plan that follows one of the threads at each block."""
    threads = _threads(ascent, best)
    loom = _Loom.of(tables, threads, ascent, problem)
    picked = _woven(loom, problem, WIDTH, best.end if best else NEVER)
    if picked is None:
        return best
    selection = threads[picked, np.arange(len(picked))]
    return better(best, tables.tried(selection, problem))


def _woven(loom: _Loom, problem: Problem, width: int, limit: float) -> list[int] | None:
    """Return a thread per block, or None if all plans found end after the limit."""
    start = problem.start
    staged = sorted(start.staged, key=itemgetter(1))
    held = sum(size for size, _ in staged)
    past = [(start.load, freed, 0.0, 0, 0, 0.0, size, 0) for size, freed in staged]
    weaves: list[_Weave] = [((start.load, start.compute, 0.0, 0, 0, held, 0.0, 0), past)]
    for ways, early in zip(loom.ways, loom.early, strict=True):
        grown = _grow(ways, early, weaves, problem.buffer_bytes, limit)
        weaves = [(row, [*weaves[row[-1]][1], row]) for row in _promising(grown, width)]
        if not weaves:
            return None
    _, blocks = min(weaves, key=lambda weave: weave[0][1])
    return [thread for _, _, _, thread, *_ in blocks[len(staged) :]]


def _grow(
    ways: list[list[_Way]],
    early: list[float],
    weaves: list[_Weave],
    buffer_bytes: float,
    limit: float,
) -> list[_Grown]:
    """Extend each partial plan by each thread's choices for the next block, below the limit."""
    own, one, two = early
    grown = []
    for parent, (last, past) in enumerate(weaves):
        loaded, computed, _, before, oldest_before, held_before, _, _ = last
        for thread, seconds, size, more, rest, rest_0, rest_1 in ways[before]:
            begin, oldest, held = loaded, oldest_before, held_before
            if size and held + size > buffer_bytes:
                begin, oldest, held = _make_room(last, past, size, buffer_bytes)
            load = begin + seconds
            compute = (load if load > computed else computed) + more
            ahead = compute - load
            end = load + own * ahead + rest
            other = load + one * ahead + rest_0
            end = other if other > end else end
            other = load + two * ahead + rest_1
            end = other if other > end else end
            if end < limit:
                grown.append((load, compute, end, thread, oldest, held + size, size, parent))
    return grown


def _make_room(
    last: _Grown, past: list[_Grown], size: float, buffer_bytes: float
) -> tuple[float, int, float]:
    """Free staged bytes until `size` bytes fit.

    Return when the load can begin, the oldest block still staged, and the bytes in the buffer.
    """
    begin, _, _, _, oldest, held, _, _ = last
    count = len(past)
    while held + size > buffer_bytes and oldest < count:
        _, freed, _, _, _, _, gone, _ = past[oldest]
        held -= gone
        oldest += 1
        begin = freed if freed > begin else begin
    if oldest == count:
        held = 0.0  # discard rounding errors of the sum
    if held + size > buffer_bytes:
        return NEVER, oldest, held
    return begin, oldest, held


def _promising(grown: list[_Grown], width: int) -> list[_Grown]:
    """Return the `width` partial plans of least bound, without dominated ones.

    A plan is dominated if another one with the same last thread has both streams free no later;
    that one's bound is no higher, so it comes first.
    """
    if len(grown) <= width:
        return grown
    grown.sort(key=itemgetter(2, 0, 1))
    chosen: list[_Grown] = []
    for row in grown:
        load, compute, _, thread, *_ = row
        for other in chosen:
            if other[3] == thread and other[0] <= load and other[1] <= compute:
                break
        else:
            chosen.append(row)
            if len(chosen) == width:
                break
    return chosen


TRIES = 3  # number of suggested plans that are simulated
CHANGES = 6  # maximum number of changes of one member at one block


def quick_plan(tables: CostTables, problem: Problem, ascent: Ascent) -> SearchResult | None:
    """Return the best plan found by heuristics; None if all plans tried violate a constraint."""
    best = algorithm_1(tables, problem, _best_suggested(tables, problem, ascent))
    if problem.enough(best, ascent.end):
        return best
    if not tables.tiers:
        best = weave(tables, problem, ascent, best)
    if best is None or tables.tiers or problem.enough(best, ascent.end):
        return best
    return polish(tables, problem, ascent, best)


def _best_suggested(tables: CostTables, problem: Problem, ascent: Ascent) -> SearchResult | None:
    """Simulate the most promising suggested plans and return the best."""
    best = None
    ends = ascent.lengths.max(1)  # no later than the simulated ends
    for number in np.argsort(ends, kind="stable")[:TRIES].tolist():
        if best is not None and ends[number] >= best.end:
            break
        best = better(best, tables.tried(ascent.plans[number], problem))
    return best


def algorithm_1(
    tables: CostTables, problem: Problem, best: SearchResult | None
) -> SearchResult | None:
    """Return the fastest of `best`, computing everything, and Algorithm 1 (see `baselines.py`).

    Algorithm 1 decides for the whole batch, between computing everything and the choices of one
    index; it is tried for each index.
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
            if best is not None and compute >= best.end:
                break
            loaded = max(load + seconds, compute) + short
            cached.append(loaded <= compute + full)
            if cached[-1]:
                load, compute = load + seconds, loaded
            else:
                compute += full
        if best is None or compute < best.end:  # the simulated end is no earlier than `compute`
            selection = np.where(np.array(cached)[:, None], choice, everything)
            best = better(best, tables.tried(selection, problem))
    return best


def polish(
    tables: CostTables, problem: Problem, ascent: Ascent, best: SearchResult
) -> SearchResult:
    """Improve a plan by successive changes of one member's choice at one block."""
    for _ in range(CHANGES):
        changed = _best_change(tables, best, problem)
        found = None if changed is None else tables.tried(changed, problem)
        if found is None or found.end >= best.end:
            break
        best = found
        if problem.enough(best, ascent.end):
            break
    return best


def _best_change(tables: CostTables, best: SearchResult, problem: Problem) -> Ints | None:
    """Return the selection with the single change that minimizes the longest path, or None.

    Exact if the loads that wait for room in the buffer still wait for the same blocks.
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


def _differences(tables: CostTables, selection: Ints, live: bool) -> tuple[Floats, Floats, Floats]:
    """Return (blocks, members, choices): what replacing the selected choice adds to the block's
    load and compute, and to the next block's load."""
    every, each = np.ogrid[: selection.shape[0], : selection.shape[1]]
    before = tables.before(selection, live)
    loads = tables.load + tables.closed
    load = loads[every, before, each]
    compute = tables.compute
    load = load - load[every, each, selection][..., None]
    compute = compute - compute[every, each, selection][..., None]
    lost = np.zeros(selection.shape)  # extra cost of the next load if the stream isn't live
    dead, alive = (loads[every[1:], state, each, selection[1:]] for state in (DEAD, LIVE))
    lost[:-1] = np.where(np.isinf(dead), math.inf, dead) - np.where(np.isinf(alive), 0.0, alive)
    was = tables.leaves[every, each, selection][..., None]
    gains = np.where(tables.leaves == DEAD, lost[..., None], -lost[..., None])
    return load, compute, np.where(tables.leaves == was, 0.0, gains)


def _longest_paths(timeline: Timeline) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the longest paths to the end per block: through its load and its compute; its load
    and the next load; its compute only; neither, by a later load that waits for an earlier block.
    """
    costs, count = timeline.costs, len(timeline.costs)
    waiting = _waiting(timeline)
    after = [0.0] * count  # longest path from the end of a compute to the end of the last one
    since = [-NEVER] * (count + 1)  # longest path from the start of a load
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
    """Map a block to the load that waits for room until its compute ends; -1: an earlier step."""
    blocks = {end: n for n, (_, end) in enumerate(timeline.computes)}
    waiting, before = {}, timeline.start.load
    for n, (begin, end) in enumerate(timeline.loads):
        if begin > before:
            waiting[blocks.get(begin, -1)] = n
        before = end
    return waiting
