"""A good plan without a search, within milliseconds.

The weights of the bound suggest plans that are each best for some balance of the two streams. Woven
together, one of them per block, they make a plan that keeps both streams busy and knows the buffer;
then single members change their choice at single blocks while that helps. Algorithm 1 is tried too,
so what comes out is never later than it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from maskfx.runtime.planner_bounds import Ascent, sweep
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
from maskfx.runtime.timeline import Timeline

TRIES = 3  # of the suggested plans, simulated
THREADS = 4  # suggested plans that are woven
ROWS = 3  # of weights: the best ones, and two that lean towards a stream by so much:
LEAN = 0.2
WEAVES = (4, 10)  # unfinished plans kept per block; the second time if the first isn't enough
CHANGES = 6  # of one member at one block
WIDE = 0.02  # a thread may be that much worse than the best mix


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


def _threads(ascent: Ascent, best: Found | None) -> Ints:
    """Few suggested plans, and the best one in hand: what the best mix has, then what leans most
    towards either stream without being much worse."""
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


# Weaving


class _Weave(NamedTuple):
    """A plan of the first blocks. Of the bytes staged so far (`sizes`, freed at `freed`) those from
    `oldest` on, `held` bytes, are in the buffer."""

    load: float
    compute: float
    thread: int
    oldest: int
    held: float
    sizes: list[float]
    freed: list[float]
    picked: list[int]


# A weave with one more block: thread, load end, compute end, bound, oldest, held, its bytes, number
# of the weave. A bare tuple: hundreds are made per millisecond.
_Grown = tuple[int, float, float, float, int, float, float, int]


@dataclass(frozen=True)
class _Loom:
    """Costs and bounds by thread, as flat lists: few objects, so that no garbage is collected.

    load, staged: by block, thread before and thread; compute, like (the first thread that chooses
    the same): by block and thread. No plan ends before early * compute end + late * load end + rest
    (by block, row and thread), whichever of the ROWS of weights.
    """

    threads: int
    load: list[float]
    staged: list[float]
    compute: list[float]
    like: list[int]
    early: list[float]
    late: list[float]
    rest: list[float]

    @staticmethod
    def of(tables: Tables, threads: Ints, ascent: Ascent, problem: Problem) -> _Loom:
        every, each, before = tables.places(threads, problem.start.live)
        _, members, choices = tables.compute.shape
        compute = tables.compute.take((every * members + each) * choices + threads).sum(-1)
        dead = (every * 2 * members + each) * choices + threads
        live = dead + members * choices
        gone = np.swapaxes(1.0 - before, 0, 1)  # block, thread before, member

        def by_thread(values: Floats) -> list[float]:
            with_stream, without = values.take(live), values.take(dead)
            total = gone @ np.moveaxis(without - with_stream, 0, 2)
            total += with_stream.sum(-1).T[:, None]
            flat: list[float] = total.ravel().tolist()
            return flat

        early, late, rest = _bounds_by_thread(tables, threads, ascent, problem)
        return _Loom(
            threads=len(threads),
            load=by_thread(tables.load + np.minimum(tables.closed, NEVER)),
            staged=by_thread(tables.staged),
            compute=(compute + tables.fixed).T.ravel().tolist(),
            like=(threads[:, None] == threads).all(-1).argmax(0).T.ravel().tolist(),
            early=early.ravel().tolist(),
            late=late.ravel().tolist(),
            rest=rest.ravel().tolist(),
        )


def _bounds_by_thread(
    tables: Tables, threads: Ints, ascent: Ascent, problem: Problem
) -> tuple[Floats, Floats, Floats]:
    """After each block: by the best weights, and by those that lean towards either stream."""
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
    return early, 1.0 - early, rest.transpose(1, 2, 0)


def weave(tables: Tables, problem: Problem, ascent: Ascent, best: Found | None) -> Found | None:
    """`best`, or an earlier plan met that takes each block from one of the threads."""
    threads = _threads(ascent, best)
    loom = _Loom.of(tables, threads, ascent, problem)
    for width in WEAVES:
        if problem.enough(best, ascent.end):
            break
        picked = _woven(loom, problem, width, best.end if best else NEVER)
        if picked is not None:
            selection = threads[picked, np.arange(len(picked))]
            best = better(best, tables.tried(selection, problem))
    return best


def _woven(loom: _Loom, problem: Problem, width: int, limit: float) -> list[int] | None:
    """Per block a thread; None if all that are met end after the limit."""
    start = problem.start
    staged = sorted(start.staged, key=itemgetter(1))
    sizes, freed = [size for size, _ in staged], [end for _, end in staged]
    weaves = [_Weave(start.load, start.compute, 0, 0, sum(sizes), sizes, freed, [])]
    for n in range(len(loom.compute) // loom.threads):
        grown = _grow(loom, n, weaves, problem.buffer_bytes, limit)
        weaves = [_longer(weaves[row[-1]], row) for row in _promising(grown, width)]
        if not weaves:
            return None
    return min(weaves, key=lambda weave: weave.compute).picked


def _longer(weave: _Weave, grown: _Grown) -> _Weave:
    thread, load, compute, _, oldest, held, size, _ = grown
    sizes, freed = [*weave.sizes, size], [*weave.freed, compute]
    return _Weave(load, compute, thread, oldest, held, sizes, freed, [*weave.picked, thread])


def _grow(
    loom: _Loom, n: int, weaves: list[_Weave], buffer_bytes: float, limit: float
) -> list[_Grown]:
    """Each weave with each thread's choices for block n whose bound is under the limit."""
    threads = loom.threads
    early, early_0, early_1 = loom.early[ROWS * n : ROWS * (n + 1)]
    late, late_0, late_1 = loom.late[ROWS * n : ROWS * (n + 1)]
    first = n * threads
    rest = loom.rest[ROWS * first : ROWS * (first + threads)]
    like, computes = loom.like[first : first + threads], loom.compute[first : first + threads]
    distinct = [thread for thread in range(threads) if like[thread] == thread]
    grown = []
    for parent, weave in enumerate(weaves):
        before, computed, at = weave.load, weave.compute, (first + weave.thread) * threads
        for thread in distinct:
            size = loom.staged[at + thread]
            begin, oldest, held = before, weave.oldest, weave.held
            if size and held + size > buffer_bytes:
                begin, oldest, held = _make_room(weave, size, buffer_bytes)
            load = begin + loom.load[at + thread]
            compute = (load if load > computed else computed) + computes[thread]
            end = early * compute + late * load + rest[thread]
            other = early_0 * compute + late_0 * load + rest[threads + thread]
            end = other if other > end else end
            other = early_1 * compute + late_1 * load + rest[2 * threads + thread]
            end = other if other > end else end
            if end < limit:
                grown.append((thread, load, compute, end, oldest, held + size, size, parent))
    return grown


def _make_room(weave: _Weave, size: float, buffer_bytes: float) -> tuple[float, int, float]:
    """When a load of that many bytes can begin, the oldest bytes then held, and how many."""
    _, _, _, oldest, held, sizes, freed, _ = weave
    count = len(sizes)
    while held + size > buffer_bytes and oldest < count:
        held -= sizes[oldest]
        oldest += 1
    if oldest == count:
        held = 0.0  # sums of floats leave dust
    if held + size > buffer_bytes:
        return NEVER, oldest, held
    return max(weave.load, freed[oldest - 1]), oldest, held


def _promising(grown: list[_Grown], width: int) -> list[_Grown]:
    """Few of them, of the least bound; none for which another that ends with the same thread has
    both streams free earlier."""
    if len(grown) <= width:
        return grown
    grown.sort()
    thread, earliest, undominated = -1, math.inf, []
    for row in grown:
        if row[0] != thread or row[2] < earliest:
            thread, earliest = row[0], row[2]
            undominated.append(row)
    undominated.sort(key=itemgetter(3))
    return undominated[:width]


# Polishing


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
    every, each, before = tables.places(selection, live)
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
