"""Plans woven from suggested ones: one of a few threads per block, the buffer known.

A thread is a plan that the weights of the bound suggest: best for some balance of the streams, and
seldom balanced itself. Few unfinished weaves are kept per block, those of the least bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from maskfx.runtime.planner_bounds import Ascent, sweep
from maskfx.runtime.planner_tables import NEVER, Floats, Found, Ints, Problem, Tables, better

THREADS = 4
WIDE = 0.02  # a thread may be that much worse than the best mix
WEAVES = (4, 10)  # unfinished plans kept per block; the second time if the first isn't enough
ROWS = 3  # of weights: the best ones, and two that lean towards a stream by so much:
LEAN = 0.2


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
