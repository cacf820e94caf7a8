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
LEAN = 0.3
WEAVES = 8  # unfinished plans kept per block
CHANGES = 12  # of one member at one block
WIDE = 0.02  # a thread may be that much worse than the best mix


def quick_plan(tables: Tables, problem: Problem, ascent: Ascent) -> Found | None:
    """The best plan that needs no search; None if none of those tried is allowed."""
    best = algorithm_1(tables, problem, _best_suggested(tables, problem, ascent))
    if problem.enough(best, ascent.end):
        return best
    if not tables.tiers:
        threads = _threads(ascent, best)
        woven = weave(tables, problem, ascent, threads, best.end if best else NEVER)
        if woven is not None:
            best = better(best, tables.tried(woven, problem))
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
    """A plan of the first blocks. `history`: bytes staged and when they are freed; those from
    `oldest` on, `held` bytes, are in the buffer."""

    load: float
    compute: float
    thread: int
    oldest: int
    held: float
    history: list[tuple[float, float]]
    picked: list[int]


# A weave with one more block: compute end less load end, bound, load end, compute end, thread,
# oldest, held, its bytes, number of the weave. A bare tuple: hundreds are made per millisecond.
_Grown = tuple[float, float, float, float, int, int, float, float, int]
# early, late and rest by thread: no plan ends before early * compute end + late * load end + rest
_Bound = tuple[float, float, list[float]]


@dataclass(frozen=True)
class _Loom:
    """Costs and bounds as lists: load, staged by [block][thread before][thread]; compute by
    [block][thread]; bounds by [block]; distinct: the threads that differ, by [block]."""

    load: list[list[list[float]]]
    staged: list[list[list[float]]]
    compute: list[list[float]]
    bounds: list[tuple[_Bound, _Bound, _Bound]]
    distinct: list[list[int]]

    @staticmethod
    def of(tables: Tables, threads: Ints, ascent: Ascent, problem: Problem) -> _Loom:
        live = problem.start.live
        every, each, before = tables.places(threads, live)
        _, compute = tables.sums(threads, live)
        after = tables.leaves[every, each, threads]
        like = (threads[:, None] == threads).all(-1).argmax(0)  # thread, block
        alone = np.arange(len(threads)) == like.T
        closed = np.minimum(tables.closed, NEVER)
        return _Loom(
            load=_sums_by_thread(tables.load + closed, threads, before).tolist(),
            staged=_sums_by_thread(tables.staged, threads, before).tolist(),
            compute=compute.T.tolist(),
            bounds=_bounds_by_thread(tables, ascent, problem, after),
            distinct=[np.flatnonzero(row).tolist() for row in alone],
        )


def _bounds_by_thread(
    tables: Tables, ascent: Ascent, problem: Problem, after: Ints
) -> list[tuple[_Bound, _Bound, _Bound]]:
    """After each block: by the best weights, and by those that lean towards either stream."""
    weights = np.tile(ascent.weights, (3, 1))
    weights[1:] *= 1 - LEAN
    weights[1, 0] += LEAN
    weights[2, -1] += LEAN
    swept = sweep(tables, weights, np.tile(ascent.prices, (3, 1)), problem)
    early = weights.cumsum(1)[:, 1:].T
    late = 1.0 - early
    later = (early * tables.fixed[:, None])[::-1].cumsum(0)[::-1]
    every, each = np.ogrid[1 : len(early) + 1, : after.shape[2]]
    rest = swept.rest[every, after, tables.kinds[1][each]].sum(2)  # threads, blocks, rows
    rest[:, :-1] += later[1:]
    rows = [early.tolist(), late.tolist(), rest.transpose(1, 2, 0).tolist()]
    return [tuple(zip(*row, strict=True)) for row in zip(*rows, strict=True)]


def _sums_by_thread(values: Floats, threads: Ints, before: Ints) -> Floats:
    """(blocks, threads before, threads): sums over members of what depends on the stream."""
    every, each = np.ogrid[: threads.shape[1], : threads.shape[2]]
    dead, live = values[every, DEAD, each, threads], values[every, LIVE, each, threads]
    gone = np.swapaxes(1.0 - before, 0, 1)  # blocks, threads before, members
    total: Floats = gone @ np.moveaxis(dead - live, 0, 2) + live.sum(-1).T[:, None]
    return total


def weave(
    tables: Tables, problem: Problem, ascent: Ascent, threads: Ints, limit: float
) -> Ints | None:
    """The earliest plan met that takes each block from one of the threads, if it could be earlier
    than the limit."""
    start = problem.start
    loom = _Loom.of(tables, threads, ascent, problem)
    staged = sorted(start.staged, key=itemgetter(1))
    held = sum(size for size, _ in staged)
    weaves = [_Weave(start.load, start.compute, 0, 0, held, staged, [])]
    for n in range(len(loom.compute)):
        grown = _promising(_grow(loom, n, weaves, problem.buffer_bytes, limit))
        weaves = [
            _Weave(
                load,
                compute,
                thread,
                oldest,
                held,
                [*weaves[parent].history, (size, compute)],
                [*weaves[parent].picked, thread],
            )
            for _, _, load, compute, thread, oldest, held, size, parent in grown
        ]
        if not weaves:
            return None
    best = min(weaves, key=lambda weave: weave.compute)
    return threads[best.picked, np.arange(len(best.picked))]


def _grow(
    loom: _Loom, n: int, weaves: list[_Weave], buffer_bytes: float, limit: float
) -> list[_Grown]:
    """Each weave with each thread's choices for block n whose bound is under the limit."""
    (early, late, rest), (early_0, late_0, rest_0), (early_1, late_1, rest_1) = loom.bounds[n]
    computes = loom.compute[n]
    grown = []
    for parent, weave in enumerate(weaves):
        loads, sizes = loom.load[n][weave.thread], loom.staged[n][weave.thread]
        for thread in loom.distinct[n]:
            size = sizes[thread]
            begin, oldest, held = weave.load, weave.oldest, weave.held
            if size and held + size > buffer_bytes:
                begin, oldest, held = _make_room(weave, size, buffer_bytes)
            load = begin + loads[thread]
            compute = (load if load > weave.compute else weave.compute) + computes[thread]
            end = early * compute + late * load + rest[thread]
            other = early_0 * compute + late_0 * load + rest_0[thread]
            end = other if other > end else end
            other = early_1 * compute + late_1 * load + rest_1[thread]
            end = other if other > end else end
            if end < limit:
                held += size
                grown.append(
                    (compute - load, end, load, compute, thread, oldest, held, size, parent)
                )
    return grown


def _make_room(weave: _Weave, size: float, buffer_bytes: float) -> tuple[float, int, float]:
    """When a load of that many bytes can begin, the oldest bytes then held, and how many."""
    begin, oldest, held = weave.load, weave.oldest, weave.held
    while held + size > buffer_bytes and oldest < len(weave.history):
        freed_bytes, freed = weave.history[oldest]
        begin, oldest, held = max(begin, freed), oldest + 1, held - freed_bytes
    if oldest == len(weave.history):
        held = 0.0  # sums of floats leave dust
    return (begin if held + size <= buffer_bytes else NEVER), oldest, held


def _promising(grown: list[_Grown]) -> list[_Grown]:
    """Few of them: for each of several leads of a stream the one of the least bound."""
    if len(grown) <= WEAVES:
        return grown
    grown.sort()
    cuts = [i * len(grown) // WEAVES for i in range(WEAVES + 1)]
    return [min(grown[a:b], key=itemgetter(1)) for a, b in zip(cuts, cuts[1:], strict=False)]


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
