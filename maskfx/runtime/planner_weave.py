"""Plans woven from suggested ones: one of a few threads per block, the buffer known.

A thread is a plan that the weights of the bound suggest: best for some balance of the streams, and
seldom balanced itself. Few unfinished weaves are kept per block, those of the least bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import compress, cycle, islice
from operator import itemgetter

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


# One block of an unfinished plan: load end, compute end, the bound of the plan so far, thread; of
# the bytes staged so far those from block `oldest` on, `held` bytes, are in the buffer; its own
# bytes; the number of the plan that it continues. A bare tuple: hundreds are made per millisecond.
_Grown = tuple[float, float, float, int, int, float, float, int]
_Weave = tuple[_Grown, list[_Grown]]  # the last block, and what was staged so far

# What a thread does at a block, by the thread before: its number, load, bytes, compute, and by ROWS
# the least that is still to come.
_Way = tuple[int, float, float, float, float, float, float]


@dataclass(frozen=True)
class _Loom:
    """ways: by block and thread before, of the threads that choose differently there. No plan ends
    before load end + early * (compute end - load end) + what is to come, whichever of the ROWS."""

    ways: list[list[list[_Way]]]
    early: list[list[float]]

    @staticmethod
    def of(tables: Tables, threads: Ints, ascent: Ascent, problem: Problem) -> _Loom:
        _, members, choices = tables.compute.shape
        alone, dead = (first + threads for first in tables.first)
        live = dead + members * choices
        gone = np.swapaxes(1.0 - tables.before(threads, problem.start.live), 0, 1)

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
        every = zip(cycle(range(len(threads))), *columns.reshape(3 + ROWS, -1).tolist())
        like = (threads[:, None] == threads).all(-1).argmax(0).T  # the first that chooses the same
        differs = like == np.arange(len(threads))
        shown = np.broadcast_to(differs[:, None], load.shape).ravel().tolist()
        ways = compress(every, shown)
        counts = differs.sum(1).tolist()
        return _Loom(
            [[list(islice(ways, count)) for _ in threads] for count in counts], early.tolist()
        )


def _bounds_by_thread(
    tables: Tables, threads: Ints, ascent: Ascent, problem: Problem
) -> tuple[Floats, Floats]:
    """After each block, by ROWS, and the second one by thread too."""
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
    """Each weave with each thread's choices for the next block whose bound is under the limit."""
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
    """When a load of that many bytes can begin, the oldest bytes then held, and how many."""
    begin, _, _, _, oldest, held, _, _ = last
    count = len(past)
    while held + size > buffer_bytes and oldest < count:
        _, freed, _, _, _, _, gone, _ = past[oldest]
        held -= gone
        oldest += 1
        begin = freed if freed > begin else begin
    if oldest == count:
        held = 0.0  # sums of floats leave dust
    if held + size > buffer_bytes:
        return NEVER, oldest, held
    return begin, oldest, held


def _promising(grown: list[_Grown], width: int) -> list[_Grown]:
    """Few of them, of the least bound; none for which another that ends with the same thread has
    both streams free earlier."""
    if len(grown) <= width:
        return grown
    grown.sort()  # by load end
    earliest: dict[int, float] = {}
    undominated = []
    for row in grown:
        if row[1] < earliest.get(row[3], math.inf):
            earliest[row[3]] = row[1]
            undominated.append(row)
    undominated.sort(key=itemgetter(2))
    return undominated[:width]
