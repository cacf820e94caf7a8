"""What starts on devices that are all free: the degree of each request, and which share a group.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from maskfx.scheduling.rounds.allocation import EDGE, StepTimes
from maskfx.scheduling.rounds.drafts import Draft, alone, distinct, join, scale_up, without_groups
from maskfx.scheduling.rounds.knapsack import Option, choose_options
from maskfx.scheduling.rounds.outlook import Planned, best_schedule, schedules
from maskfx.scheduling.rounds.profile_memo import ProfileMemo
from maskfx.scheduling.rounds.round_plan import RoundSettings
from maskfx.scheduling.rounds.urgency import Pending, Rank, admit, by_urgency, values

KINDS = 8  # kinds of steps at most that the length of a round is fitted to
OUTLOOK = 32  # requests at most whose decisions are compared; of more the best schedule is taken


@dataclass
class Border:
    """The start of a round on some devices.

    Args:
        devices: Number of devices, all free.
        now: The time.
        length: Greatest length of the round; a step that takes longer lengthens it.
        later: When further devices, which aren't decided about, are free of their requests,
            ascending.
        elsewhere: When further devices are expected for requests that can wait for them, by id.
    """

    memo: ProfileMemo
    settings: RoundSettings
    devices: int
    now: float
    length: float
    later: Sequence[float] = ()
    elsewhere: Mapping[str, float] = field(default_factory=dict)

    def drafts(self, pending: Sequence[Pending]) -> list[Draft]:
        """Return the best of the rounds that start from the knapsack and from schedules.

        Of many requests, the one that starts from the best schedule.
        """
        admit(pending, self.devices)
        pending = by_urgency(pending)
        reserved = self._reserve(pending)
        free = self._free(reserved)
        waiting = [p for p in without_groups(pending, reserved) if p.rank <= Rank.CROWDED]
        jobs = [p.job(p.left, p.request.home.size if p.request.home else 0) for p in waiting]
        now, devices, later = self.now, self.devices, self.later
        if len(waiting) > OUTLOOK:
            plan = best_schedule(jobs, now, free, devices, later, narrow=True) if free else []
            best = self._fill(pending, [*reserved, *self._start(waiting, plan)])
        else:
            plans = schedules(jobs, now, free, devices, later) if free else ()
            starts = [self._pack(waiting, free)]
            starts += [start for p in plans if (start := self._start(waiting, p))]
            rounds = [self._fill(pending, [*reserved, *start]) for start in distinct(starts)]
            best = self._best(pending, distinct(rounds))
        join(without_groups(pending, best), best, self.length, self.memo, self.settings)
        return best

    def _start(self, waiting: Sequence[Pending], plan: Sequence[Planned]) -> list[Draft]:
        """Return the groups with which a schedule starts."""
        starting = {id: degree for id, start, degree in plan if start <= self.now}
        by_id = {p.id: p for p in waiting if p.id in starting}
        return [
            alone(by_id[id], degree)
            for id, degree in starting.items()
            if degree in self._usable(by_id[id])
        ]

    def _best(self, pending: Sequence[Pending], rounds: Sequence[list[Draft]]) -> list[Draft]:
        """Return the round after which the most requests can be in time, at the least cost."""
        if len(rounds) == 1:
            return rounds[0]
        best, most = rounds[0], (-1, 0.0)
        for drafts in rounds:
            found = self._outlook(pending, drafts, most[0])
            if found > most:
                best, most = drafts, found
        return best

    def _outlook(
        self, pending: Sequence[Pending], drafts: Sequence[Draft], least: int
    ) -> tuple[int, float]:
        """Return the number of requests that can be in time, and what their time costs, negated.

        Those that wait for devices elsewhere are among them. If that number can't reach `least`, no
        schedule is made, and a bound of it is returned.

        The latter are the device-seconds of the round and those that the requests need after it.
        Idle devices count as well, unless the settings leave them idle.
        """
        length, now, devices = self.length, self.now, self.devices
        border = max((d.steps(length) * d.seconds for d in drafts), default=0.0)
        made = {m.id: (d.steps(border), d.seconds, d.degree) for d in drafts for m in d.members}
        in_time, need, jobs = 0, 0.0, []
        for request in pending[:OUTLOOK]:
            steps, seconds, degree = made.get(request.id, (0, 0.0, 0))
            job = request.job(request.left - min(steps, request.left), degree)
            if not request.hopeful:
                need += job.device_seconds
            elif not steps and request.id in self.elsewhere:
                in_time += 1
                need += job.device_seconds
            elif job.left:
                jobs.append(job)
            else:
                in_time += now + request.left * seconds <= request.due + EDGE
        after = now + border
        possible = sum(after + j.left * j.times.least <= j.due + EDGE for j in jobs)
        if in_time + possible < least:
            return in_time + possible, -inf
        planned = {p.id for p in best_schedule(jobs, after, devices, devices)}
        need += sum(j.device_seconds for j in jobs if j.id in planned)
        busy = sum(self.memo.footprints[d.degree] * d.steps(border) * d.seconds for d in drafts)
        used = devices * border if self.settings.scale_up else busy
        return in_time + len(planned), -need - used

    def _reserve(self, pending: Sequence[Pending]) -> list[Draft]:
        """Return a group of the cheapest degree for the request that is overdue for longest."""
        overdue = [p for p in pending if p.overdue and self._usable(p)]
        if not overdue:
            return []
        oldest = min(overdue, key=lambda p: (p.due, p.id))
        return [alone(oldest, self._usable(oldest)[0])]

    def _pack(self, hopeful: Sequence[Pending], free: int) -> list[Draft]:
        """Choose degrees by the knapsack; the others don't run yet."""
        choices = [
            p.options(self.length, self._usable(p), self.elsewhere.get(p.id, inf)) for p in hopeful
        ]
        groups = values(choices, [p.rank for p in hopeful], self.memo.footprints)
        # a request for which not to run is best, whatever the others do, needs no place in the sum
        urgent = [n for n, group in enumerate(groups) if max(group, key=_value) is not group[0]]
        chosen = choose_options([groups[n] for n in urgent], free)
        return [
            alone(hopeful[n], choices[n][option].degree)
            for n, option in zip(urgent, chosen, strict=True)
            if choices[n][option].degree
        ]

    def _fill(self, pending: Sequence[Pending], drafts: list[Draft]) -> list[Draft]:
        """Use the devices that a choice of groups leaves: for further requests, then larger groups.

        A request starts at the degree that it needs, or at the next smaller one that is free.
        """
        free = self._free(drafts)
        for request in without_groups(pending, drafts) if free else ():
            if not free:
                break
            fitting = self._degrees(request, free)
            if fitting:
                drafts.append(alone(request, fitting[-1]))
                free -= self.memo.footprints[fitting[-1]]
        if self.settings.scale_up:
            scale_up(drafts, free, self.memo)
        return drafts

    # Parts of them.

    def _usable(self, request: Pending) -> tuple[int, ...]:
        """Return the degrees at which a step ends within the round; else the fastest that fits.

        None if the request gains from no degree that is as small as these devices.
        """
        usable, footprints = request.usable(self.length), self.memo.footprints
        if footprints[usable[-1]] <= self.devices:
            return usable
        fitting = [k for k in request.times.hull if footprints[k] <= self.devices]
        return tuple(k for k in usable if k in fitting) or tuple(fitting[-1:])

    def _degrees(self, request: Pending, free: int) -> list[int]:
        """Return the usable degrees that are free, up to the one that a request needs."""
        usable = self._usable(request)
        needed = max(request.degree, usable[0]) if usable else 0
        return [k for k in usable if k <= needed and self.memo.footprints[k] <= free]

    def _free(self, drafts: Sequence[Draft]) -> int:
        return self.devices - sum(self.memo.footprints[d.degree] for d in drafts)


def round_length(steps: Mapping[StepTimes, float], granularity: int) -> float:
    """Return the length of a round: about `granularity` of the slowest step that is needed.

    The paper's rule: steps of different kinds should end near the same border. Of the lengths
    between half of that and all of it at which some step ends, the one is returned that leaves the
    least share of the round idle, in the mean over kinds and their useful degrees.

    Args:
        steps: Seconds of a step at the degree that is needed, by kind of request.
        granularity: Number of steps.
    """
    ordered = sorted(steps, key=lambda times: -steps[times])
    most = granularity * steps[ordered[0]]
    sampled = ordered[:: -(-len(ordered) // KINDS)]
    every = [times.seconds[k] for times in sampled for k in times.hull]
    fitting = np.array([s for s in every if s <= most])
    ends = np.unique([s * n for s in fitting for n in range(1, granularity + 1)] + [most])
    ends = ends[(ends > most / 2) & (ends <= most)]
    idle = (ends[:, None] / fitting + EDGE) % 1.0 * fitting  # what is left after whole steps
    return float(ends[np.argmin(idle.sum(1) / ends - EDGE * ends)])


def _value(option: Option) -> float:
    return option.value
