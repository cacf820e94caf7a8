"""The planner's dynamic programming: states after each block, and which of them may be dropped.

A state is (load end, compute end, which members' full stream is live, kept bytes, the buffer). The
buffer is a list of (s, t): from time t on, at most s bytes are in it; the next load of b bytes
starts no earlier than the first t with s + b <= its size. A state contains everything that later
blocks depend on, and every later end is monotone in each of its numbers, so dominance is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from maskfx.runtime.planner.bounds import Bounds
from maskfx.runtime.planner.problem import (
    NEVER,
    CostTables,
    Floats,
    Ints,
    Problem,
    SearchResult,
)
from maskfx.runtime.planner.timeline import Start, run_streams

CHUNK = 256  # states compared with each other at a time


@dataclass(frozen=True)
class Trail:
    """Back pointers of the states after a block.

    Args:
        parent: row of the previous state.
        picked: selected choice per place.
        places: place before this block of the member at each place (twins are reordered).
    """

    parent: Ints
    picked: Ints
    places: Ints


@dataclass(frozen=True)
class States:
    """Rows of states; `held` and `freed` are the buffer's (s, t), oldest first.

    These have no columns if the buffer is unbounded.
    """

    load: Floats
    compute: Floats
    live: Ints
    kept: Floats
    held: Floats
    freed: Floats

    def least(self, bounds: Bounds, n: int) -> Floats:
        """Return lower bounds on the ends of plans in these states after n blocks:
        (weights, states).
        """
        return bounds.at(n, self.load, self.compute, self.live, self.kept)

    def take(self, rows: Ints) -> States:
        return States(*(value[rows] for value in vars(self).values()))


def first_state(start: Start, members: int, tiers: int, bounded: bool) -> States:
    held, freed = [0.0], [start.load]
    if bounded:
        staged = sorted(start.staged, key=lambda part: part[1])
        sizes = [size for size, _ in staged]
        held = [sum(sizes[i:]) for i in range(len(sizes))] + [0.0]
        freed = [start.load] + [max(start.load, when) for _, when in staged]
    width = len(held) if bounded else 0
    return States(
        load=np.array([start.load]),
        compute=np.array([start.compute]),
        live=np.full((1, members), int(start.live)),
        kept=np.zeros((1, tiers)),
        held=np.array([held])[:, :width],
        freed=np.array([freed])[:, :width],
    )


def search(
    tables: CostTables, bounds: Bounds, problem: Problem, width: int, best: SearchResult | None
) -> tuple[SearchResult | None, float]:
    """Run one pass; return the best plan and a lower bound on the end of any plan.

    Keeps up to `width` states per block: those with the least bound.
    """
    count, members = tables.fixed.shape[0], tables.load.shape[2]
    bounded = math.isfinite(problem.buffer_bytes)
    states = first_state(problem.start, members, len(problem.budgets), bounded)
    limit = (best.end if best else math.inf) - problem.slack
    lost = math.inf  # least bound of the states dropped for lack of room only
    trail: list[Trail] = []
    twins = tables.twins()
    tick = max(problem.slack * 1e-3, 1e-300)
    for n in range(count):
        parent, picked, dropped = expand(bounds, n, states, twins, limit, 16 * width)
        lost = min(lost, dropped)
        states = advance(tables, n, states.take(parent), picked, problem.buffer_bytes)
        places, states = in_order(states, twins)
        least = states.least(bounds, n + 1).max(0)
        able = (states.compute < NEVER) & (states.kept <= problem.budgets).all(1)
        rows = np.flatnonzero((least < limit) & able)
        rows, dropped = keep_least(rows, least[rows], 4 * width)
        lost = min(lost, dropped)
        rows = rows[undominated(keys_of(states.take(rows), tick))]
        rows, dropped = keep_least(rows, least[rows], width)
        lost = min(lost, dropped)
        states = states.take(rows)
        trail.append(Trail(parent[rows], picked[rows], places[rows]))
        if not len(rows):
            break
    else:
        last = int(states.compute.argmin())
        if best is None or states.compute[last] < best.end:
            selection = follow(trail, last)
            costs = tables.costs(selection, problem.start.live)
            best = SearchResult(selection, run_streams(costs, problem.buffer_bytes, problem.start))
    return best, min(lost, limit, best.end if best else math.inf)


def expand(
    bounds: Bounds, n: int, states: States, twins: Ints, limit: float, most: int
) -> tuple[Ints, Ints, float]:
    """Combine each state with each selection of block n whose bounds are below the limit.

    Of twins in the same state the later one gets no earlier choice: other orders are duplicates.
    """
    least, live = states.least(bounds, n), states.live  # (weights, states)
    parent = np.arange(len(live))
    picked = np.zeros_like(live)
    lost = math.inf
    for member, twin in enumerate(twins):
        total = bounds.more[n, member].take(live[parent, member], axis=1) + least[:, :, None]
        highest = total.max(0)
        if twin >= 0:
            alike = live[parent, member] == live[parent, twin]
            earlier = np.arange(highest.shape[1]) < picked[:, twin, None]
            highest[alike[:, None] & earlier] = math.inf
        row, choice = np.nonzero(highest < limit)
        if len(row) > most:
            some, dropped = keep_least(np.arange(len(row)), highest[row, choice], most)
            lost = min(lost, dropped)
            row, choice = row[some], choice[some]
        least, parent, picked = total[:, row, choice], parent[row], picked[row]
        picked[:, member] = choice
    return parent, picked, lost


def advance(
    tables: CostTables, n: int, states: States, picked: Ints, buffer_bytes: float
) -> States:
    """Return the states after block n."""
    each = np.arange(picked.shape[1])
    at = (states.live, each, picked)
    load = (tables.load[n][at] + tables.closed[n][at]).sum(1)
    staged = tables.staged[n][at].sum(1)
    compute = tables.compute[n][each, picked].sum(1) + tables.fixed[n]
    kept = states.kept + tables.kept[n][at].sum(1) if states.kept.shape[1] else states.kept
    begin, held, freed = states.load, states.held, states.freed
    if held.shape[1]:
        fits = held + staged[:, None] <= buffer_bytes
        first = np.where(fits, freed, math.inf).min(1)
        begin = np.where((load > 0) | (staged > 0), np.maximum(begin, first), begin)
    load_end = np.minimum(begin + load, NEVER)
    compute_end = np.maximum(load_end, states.compute) + compute
    if held.shape[1]:
        held = np.column_stack([held + staged[:, None], np.zeros(len(load))])
        freed = np.column_stack([freed, compute_end])
    live = tables.leaves[n][each, picked]
    ahead = States(load_end, compute_end, live, kept, held, freed)
    return tidy(ahead, buffer_bytes) if held.shape[1] else ahead


def tidy(states: States, buffer_bytes: float) -> States:
    """Normalize the buffers, so that equivalent ones are equal, and drop columns without effect."""
    freed = np.maximum(states.freed, states.load[:, None])  # nothing starts before the load end
    held = states.held
    last = (freed <= states.load[:, None]).sum(1) - 1  # the newest entry freed by the load end
    newest = np.take_along_axis(held, np.maximum(last, 0)[:, None], 1)
    held = np.where(np.arange(held.shape[1]) <= last[:, None], newest, held)
    first = max(0, int(last.min())) if len(last) else 0
    useless = (held > buffer_bytes).all(0)
    columns = np.flatnonzero(~useless & (np.arange(held.shape[1]) >= first))
    if not len(columns):
        columns = np.array([held.shape[1] - 1])
    return replace(states, held=held[:, columns], freed=freed[:, columns])


def keep_least(rows: Ints, least: Floats, most: int) -> tuple[Ints, float]:
    """Return the at most `most` rows of least bound, and the least bound of the others."""
    if len(rows) <= most:
        return rows, math.inf
    order = np.argpartition(least, most)
    return rows[order[:most]], float(least[order[most:]].min())


def keys_of(states: States, tick: float) -> Floats:
    """Return the columns compared by dominance, less is better.

    Times are rounded to ticks, so that dominance is transitive.
    """
    times = np.column_stack([states.load, states.compute, states.freed])
    return np.column_stack([np.round(times / tick), 1 - states.live, states.kept, states.held])


def undominated(keys: Floats) -> Ints:
    """Return the rows that no other row dominates (is no greater in every column).

    Of equal rows one is returned.
    """
    order = np.lexsort(keys.T[::-1])  # a row comes after all that dominate it
    kept = np.empty((0, keys.shape[1]))
    rows: list[NDArray[np.int64]] = []
    for begin in range(0, len(order), CHUNK):
        chunk = order[begin : begin + CHUNK]
        chunk = chunk[~_below(keys[chunk], kept).any(1)]
        own = keys[chunk]
        earlier = np.tri(len(chunk), k=-1, dtype=bool)
        chunk = chunk[~(_below(own, own) & earlier).any(1)]
        kept = np.concatenate([kept, keys[chunk]])
        rows.append(chunk)
    return np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)


def _below(keys: Floats, others: Floats) -> NDArray[np.bool_]:
    """Return [i, j]: whether others[j] is no greater than keys[i] in every column."""
    below = np.ones((len(keys), len(others)), dtype=bool)
    for column in range(keys.shape[1]):
        np.logical_and(below, others[:, column] <= keys[:, column, None], out=below)
    return below


def in_order(states: States, twins: Ints) -> tuple[Ints, States]:
    """Order twins with a live stream first, so that states equal up to their order coincide."""
    count = len(twins)
    if (twins < 0).all():
        return np.broadcast_to(np.arange(count), states.live.shape), states
    group = np.cumsum(twins < 0)
    places = np.argsort(2 * group - states.live, axis=1, kind="stable")
    return places, replace(states, live=np.take_along_axis(states.live, places, 1))


def follow(trail: list[Trail], row: int) -> Ints:
    """Return the selection that led to a row of the last states."""
    steps = []
    for made in reversed(trail):
        steps.append((made.picked[row], made.places[row]))
        row = int(made.parent[row])
    who = np.arange(len(steps[0][0]))  # the member at each place
    selection = np.empty((len(steps), len(who)), dtype=np.int64)
    for n, (picked, places) in enumerate(reversed(steps)):
        selection[n, who] = picked
        who = who[places]
    return selection
