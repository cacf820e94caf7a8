"""How far decisions of rounds are from the optimum, on a few requests that wait at the same time.

The optimum isn't known exactly. It lies between

- `bound`: an integer program (HiGHS) in which steps can be divided and requests change their degree
  at any time. Between two deadlines only the seconds of each request at each degree count;
- `best_list`: the best of all orders and degrees by which requests start as soon as enough devices
  are free and keep their degree, by trying them all. For at most `TRIED` requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

EDGE = 1e-6
TRIED = 4


@dataclass(frozen=True)
class Job:
    """A request that waits: its steps, their seconds by degree, and its deadline."""

    left: int
    seconds: Mapping[int, float]
    due: float


def bound(jobs: Sequence[Job], devices: int) -> int:
    """Return the number of requests that no schedule can exceed."""
    ends = sorted({job.due for job in jobs})
    lengths = np.diff([0.0, *ends])
    degrees = [k for k in jobs[0].seconds if k <= devices]
    count, spans, sizes = len(jobs), len(ends), len(degrees)
    times = count * spans * sizes  # seconds of each request, in each span, at each degree
    column = np.arange(times).reshape(count, spans, sizes)
    rows, lower, upper = [], [], []

    def add(entries: Mapping[int, float], least: float, most: float) -> None:
        row = np.zeros(times + count)
        row[list(entries)] = list(entries.values())
        rows.append(row)
        lower.append(least)
        upper.append(most)

    for span in range(spans):
        used = {
            int(column[i, span, n]): float(degrees[n]) for i in range(count) for n in range(sizes)
        }
        add(used, 0.0, devices * lengths[span])
        for i in range(count):
            add({int(c): 1.0 for c in column[i, span]}, 0.0, lengths[span])
    for i, job in enumerate(jobs):
        made = {
            int(column[i, span, n]): 1 / job.seconds[degrees[n]]
            for span in range(ends.index(job.due) + 1)
            for n in range(sizes)
        }
        add(made | {times + i: -float(job.left)}, -EDGE, np.inf)
    found = milp(
        np.concatenate([np.zeros(times), -np.ones(count)]),
        constraints=LinearConstraint(np.array(rows), lower, upper),
        integrality=np.concatenate([np.zeros(times), np.ones(count)]),
        bounds=Bounds(0, np.concatenate([np.full(times, np.inf), np.ones(count)])),
    )
    assert found.success, found.message
    return int(-found.fun + 0.5)


def best_list(jobs: Sequence[Job], devices: int) -> int:
    """Return the most requests in time of all list schedules."""
    best = 0
    degrees = [k for k in jobs[0].seconds if k <= devices]
    for order in permutations(jobs):
        for sizes in product(degrees, repeat=len(jobs)):
            since, in_time = [0.0] * devices, 0
            for job, size in zip(order, sizes, strict=True):
                end = since[size - 1] + job.left * job.seconds[size]
                if end <= job.due + EDGE:  # one that would be late is left out
                    in_time += 1
                    since = sorted([*since[size:], *[end] * size])
            best = max(best, in_time)
            if best == len(jobs):
                return best
    return best
