"""How many requests can be in time at most, if all arrivals are known: a linear program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

INTERVALS = 300  # a request may use all of each that it touches, so fewer give a higher bound


def most_in_time(
    released: Sequence[float],
    due: Sequence[float],
    needs: Sequence[float],
    alone: Sequence[float],
    workers: int,
) -> float:
    """Return a number of requests that no schedule has in time more of.

    Work may be divided at will between intervals, workers and requests, and of a request done in
    part that part counts.

    Args:
        released: When each request can begin.
        due: When it must have ended.
        needs: The least seconds that it takes of the workers.
        alone: The least seconds from its beginning to its end.
        workers: How many there are.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    start, end, need = np.asarray(released), np.asarray(due), np.asarray(needs)
    pace = need / np.asarray(alone)  # of the workers' seconds, at most, that it takes per second
    edges = np.linspace(start.min(), end.max(), INTERVALS + 1)
    first = np.searchsorted(edges, start, "right") - 1
    last = np.searchsorted(edges, end, "left")
    jobs = np.repeat(np.arange(len(start)), last - first)
    slots = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
    inside = np.minimum(edges[slots + 1], end[jobs]) - np.maximum(edges[slots], start[jobs])
    most = np.maximum(0.0, inside) * pace[jobs]
    # one row per interval: what is done in it; one per request: no more than it needs
    count, parts = len(start), len(jobs)
    rows = np.concatenate([slots, INTERVALS + jobs])
    columns = np.concatenate([np.arange(parts)] * 2)
    limits = np.concatenate([np.diff(edges) * workers, need])
    found = linprog(
        -1.0 / need[jobs],
        A_ub=coo_matrix((np.ones(2 * parts), (rows, columns)), (INTERVALS + count, parts)),
        b_ub=limits,
        bounds=np.column_stack([np.zeros(parts), most]),
        method="highs",
    )
    assert found.success, found.message
    return float(-found.fun)
