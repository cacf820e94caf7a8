"""How many requests can be in time from a moment on: what decisions of a round are compared by.

Schedules are built in which nothing further arrives and each request keeps its degree to its end;
the best of them counts. None is the best that exists, but each can be carried out, which the sum of
the requests' device-seconds does not promise. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maskfx.serve.scheduling.allocation import EDGE, StepTimes
from maskfx.serve.scheduling.placement import footprint


class Job(NamedTuple):
    """What remains of a request; `degree` is that of the round before, 0 if it didn't run."""

    due: float
    left: int
    times: StepTimes
    id: str
    degree: int = 0

    @property
    def device_seconds(self) -> float:
        """The least that its remaining steps take."""
        degree = self.times.hull[0]
        return self.left * degree * self.times.seconds[degree]


class Planned(NamedTuple):
    """A request in a schedule: when it starts and at which degree."""

    id: str
    start: float
    degree: int


def schedules(jobs: Iterable[Job], start: float, devices: int) -> list[list[Planned]]:
    """Return several schedules, each with the requests that are in time in it.

    Each is the best one for some loads: one request after the other, each on as many devices as it
    can use; many beside each other by deadline; by work, where not all can be in time; and those
    that run already before the others.
    """
    by_due = sorted((j for j in jobs if j.left), key=lambda j: (j.due, j.id))
    if not by_due:
        return []
    by_work = sorted(by_due, key=lambda j: j.device_seconds)
    running_first = sorted(by_due, key=lambda j: not j.degree)
    wide = fastest_first(by_due, start, devices)
    return [wide, *(narrow_first(o, start, devices) for o in (by_due, by_work, running_first))]


def best_schedule(jobs: Iterable[Job], start: float, devices: int) -> list[Planned]:
    """Return the schedule with the most requests in time."""
    return max(schedules(jobs, start, devices), key=len, default=[])


def fastest_first(jobs: Sequence[Job], start: float, devices: int) -> list[Planned]:
    """Run requests at their fastest degree one after the other, in the order of their deadlines.

    Moore's and Hodgson's rule: where a request would be late, the longest one before it is left
    out, which gives the most requests in time on a single group of devices. Several groups are
    filled in turn.
    """
    size = max(footprint(job.times.fastest) for job in jobs)
    lanes: list[list[Job]] = [[] for _ in range(max(1, devices // size))]
    ends = [(start, lane) for lane in range(len(lanes))]
    heapq.heapify(ends)
    longest: list[list[tuple[float, int]]] = [[] for _ in lanes]
    left_out: set[str] = set()
    for number, job in enumerate(jobs):
        end, lane = heapq.heappop(ends)
        seconds = job.left * job.times.least
        lanes[lane].append(job)
        heapq.heappush(longest[lane], (-seconds, number))
        end += seconds
        if end > job.due + EDGE:
            largest, at = heapq.heappop(longest[lane])
            end += largest
            left_out.add(jobs[at].id)
        heapq.heappush(ends, (end, lane))
    found = []
    for lane_jobs in lanes:
        at_time = start
        for job in lane_jobs:
            if job.id not in left_out:
                found.append(Planned(job.id, at_time, job.times.fastest))
                at_time += job.left * job.times.least
    return found


def narrow_first(jobs: Sequence[Job], start: float, devices: int) -> list[Planned]:
    """Run each request, in the given order, at the cheapest degree that is in time.

    A request that runs keeps its degree if that is in time.
    """
    free = [start] * devices  # when each device is free, in ascending order
    found = []
    for job in jobs:
        kept = (job.degree,) if job.degree in job.times.hull else ()
        for degree in (*kept, *job.times.hull):
            begin = free[footprint(degree) - 1]
            end = begin + job.left * job.times.seconds[degree]
            if end <= job.due + EDGE:
                found.append(Planned(job.id, begin, degree))
                free = sorted([*free[footprint(degree) :], *[end] * footprint(degree)])
                break
    return found
