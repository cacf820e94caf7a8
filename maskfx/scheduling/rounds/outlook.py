"""How many requests can be in time from a moment on: what decisions of a round are compared by.

Schedules are built in which nothing further arrives and each request keeps its degree to its end;
the best of them counts. None is the best that exists, but each can be carried out, which the sum of
the requests' device-seconds does not promise. Pure.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from maskfx.scheduling.rounds.allocation import EDGE, StepTimes
from maskfx.scheduling.rounds.placement import footprint


class RemainingRequest(NamedTuple):
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

    def fastest(self, free: int, devices: int) -> int | None:
        """Return the fastest degree for which enough devices are free; None if there is none."""
        fastest = self.times.fastest
        if fastest != 3 and fastest <= free:
            return fastest
        fitting = [k for k in self.times.hull if footprint(k, devices) <= free]
        return fitting[-1] if fitting else None


class Planned(NamedTuple):
    """A request in a schedule: when it starts and at which degree."""

    id: str
    start: float
    degree: int


def schedules(
    jobs: Iterable[RemainingRequest],
    start: float,
    free: int,
    devices: int,
    later: Sequence[float] = (),
    *,
    narrow: bool = False,
) -> Iterator[list[Planned]]:
    """Yield several schedules on the free devices, each with the requests that are in time.

    Each is the best one for some loads: one request after the other, each on as many devices as it
    can use; many beside each other by deadline; by work, where not all can be in time; and those
    that run already before the others. The first one comes last if `narrow`.
    """
    by_due = sorted((j for j in jobs if j.left), key=lambda j: (j.due, j.id))
    if not by_due:
        return
    if not narrow:
        yield fastest_first(by_due, start, free, devices, later)
    yield narrow_first(by_due, start, free, devices, later)
    yield narrow_first(sorted(by_due, key=lambda j: j.device_seconds), start, free, devices, later)
    yield narrow_first(sorted(by_due, key=lambda j: not j.degree), start, free, devices, later)
    if narrow:
        yield fastest_first(by_due, start, free, devices, later)


def best_schedule(
    jobs: Sequence[RemainingRequest],
    start: float,
    free: int,
    devices: int,
    later: Sequence[float] = (),
    *,
    narrow: bool = False,
) -> list[Planned]:
    """Return the schedule with the most requests in time; all of `jobs` have steps left.

    Args:
        narrow: Whether, of equals, one with the cheapest degrees is returned, else with the widest.
    """
    best: list[Planned] = []
    for plan in schedules(jobs, start, free, devices, later, narrow=narrow):
        if len(plan) > len(best):
            best = plan
        if len(best) == len(jobs):  # no other one has more
            break
    return best


def fastest_first(
    jobs: Sequence[RemainingRequest],
    start: float,
    free: int,
    devices: int,
    later: Sequence[float] = (),
) -> list[Planned]:
    """Run requests at their fastest degree one after the other, in the order of their deadlines.

    Moore's and Hodgson's rule: where a request would be late, the longest one before it is left
    out, which gives the most requests in time on a single group of devices. Several groups are
    filled in turn.
    """
    since = [start] * free + list(later)
    if not since:
        return []
    degrees = [job.fastest(len(since), devices) for job in jobs]
    size = max((footprint(k, devices) for k in degrees if k), default=1)
    # a lane begins when the last of its devices is free
    lanes = [DeviceQueue(since[n - 1]) for n in range(size, len(since) + 1, size)]
    ends = [(lane.end, number) for number, lane in enumerate(lanes)]  # a heap
    for job, degree in zip(jobs, degrees, strict=True):
        if degree:
            number = heapq.heappop(ends)[1]
            lanes[number].add(job, degree)
            heapq.heappush(ends, (lanes[number].end, number))
    return [planned for lane in lanes for planned in lane.planned()]


class DeviceQueue:
    """Requests one after the other on a group of devices."""

    def __init__(self, start: float) -> None:
        self.start = self.end = start
        self._jobs: dict[str, tuple[int, float]] = {}  # degree and seconds, in order
        self._longest: list[tuple[float, str]] = []

    def add(self, job: RemainingRequest, degree: int) -> None:
        """Add a request; if it would be late, leave out the longest one."""
        seconds = job.left * job.times.seconds[degree]
        self._jobs[job.id] = degree, seconds
        heapq.heappush(self._longest, (-seconds, job.id))
        self.end += seconds
        if self.end > job.due + EDGE:
            largest, left_out = heapq.heappop(self._longest)
            self.end += largest
            del self._jobs[left_out]

    def planned(self) -> Iterator[Planned]:
        at = self.start
        for id, (degree, seconds) in self._jobs.items():
            yield Planned(id, at, degree)
            at += seconds


def narrow_first(
    jobs: Sequence[RemainingRequest],
    start: float,
    free: int,
    devices: int,
    later: Sequence[float] = (),
) -> list[Planned]:
    """Run each request, in the given order, at the cheapest degree that is in time.

    A request that runs keeps its degree if that is in time.
    """
    since = [start] * free + list(later)  # when each device is free, in ascending order
    total = len(since)
    if not total:
        return []
    found = []
    of_three = footprint(3, devices)
    for due, left, times, id, running in jobs:
        latest = due + EDGE
        if since[0] + left * times.least > latest:
            continue  # at no degree
        hull, seconds = times.hull, times.seconds
        for degree in (running, *hull) if running in hull else hull:
            size = degree if degree != 3 else of_three
            if size > total:
                continue
            begin = since[size - 1]
            end = begin + left * seconds[degree]
            if end <= latest:
                found.append(Planned(id, begin, degree))
                del since[:size]
                at = bisect_right(since, end)
                since[at:at] = [end] * size
                break
    return found
