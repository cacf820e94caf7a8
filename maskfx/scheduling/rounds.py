"""Rounds: which requests run for how many steps on which of several devices until the next border.

The scheduler of TetriServe, for dense steps and masked edits alike. At the start of a round it

1. finds for each request the degrees of least device-seconds that still meet its deadline;
2. reserves devices for the request that has waited too long, if any;
3. chooses degrees by a knapsack over requests and degrees: as many requests as possible that can
   still be in time after the round, then the fewest device-seconds;
4. gives devices that are left to requests that don't run yet, in the order of their urgency;
5. lets requests without devices join a group, where no member becomes late and the joint step pays;
6. gives devices that are still idle to the groups that gain most;
7. places the groups so that as few as possible move.

A round ends at its border, when all of its groups have made their steps. Devices that are free
before may get further steps that end by then (`decide_within`): those of requests that have arrived
meanwhile, or that had no devices. Pure: no clock, no devices; what it returns is the plain data of
`round_plan.py`, which an executor obeys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from maskfx.errors import InputError
from maskfx.scheduling.allocation import EDGE, StepTimes
from maskfx.scheduling.degree_costs import StepProfile
from maskfx.scheduling.drafts import (
    Draft,
    alone,
    distinct,
    grown,
    join,
    scale_up,
    without_groups,
)
from maskfx.scheduling.knapsack import Option, choose_options
from maskfx.scheduling.many_requests import pending_of
from maskfx.scheduling.outlook import Planned, best_schedule, schedules
from maskfx.scheduling.placement import Devices, FreeDevices, PlacedGroup, place
from maskfx.scheduling.profile_memo import ProfileMemo
from maskfx.scheduling.round_plan import (
    DeviceGroup,
    LatePolicy,
    Round,
    RoundRequest,
    RoundSettings,
)
from maskfx.scheduling.urgency import (
    Pending,
    Rank,
    admit,
    by_urgency,
    values,
)

KINDS = 8  # kinds of steps at most that the length of a round is fitted to
OUTLOOK = 32  # requests at most whose decisions are compared; of more the best schedule is taken


@dataclass
class RoundScheduler:
    """Decides about each round from the requests that are present at its start.

    Args:
        profile: Predicted seconds of steps by degree.
        devices: Number of devices.
    """

    profile: StepProfile
    devices: int
    settings: RoundSettings = field(default_factory=RoundSettings)

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InputError(f"devices {self.devices}: wanted at least 1")
        if unknown := set(self.settings.degrees) - set(self.profile.degrees):
            raise InputError(
                f"degrees {sorted(unknown)} have no cost in the profile, which has "
                f"{self.profile.degrees}; measure them, or leave them out of the settings"
            )
        self._memo = ProfileMemo(self.profile, self.settings.degrees, self.devices)

    def decide(self, now: float, requests: Sequence[RoundRequest]) -> Round:
        """Return the round that starts now; an empty one if there is nothing to run."""
        pending, late, drops = self._ranked(now, requests)
        length = self._length(pending)
        drafts = self._drafts(pending, length)
        return self._placed(now, drafts, length, late, drops)

    def decide_within(
        self, now: float, border: float, free: FreeDevices, requests: Sequence[RoundRequest]
    ) -> Round:
        """Return what free devices do until the round's border; a round without groups if nothing.

        Requests without a step that ends by then are left to the next round, the late ones too.

        Args:
            border: When the round is predicted to end.
            free: The devices on which no group runs.
            requests: Those that aren't in a group at work.
        """
        length = (border - now) * (1 - self.settings.margin)
        able = [r for r in requests if self._memo.of(r.work).times.least <= length]
        pending, late, drops = self._ranked(now, able)
        free = free.copy()
        admit(pending, free.count)
        groups: list[tuple[Draft, Devices]] = []
        for request in by_urgency(pending):
            if not free.count:
                break
            fitting = [k for k in request.usable(length) if request.times.seconds[k] <= length]
            wanted = [k for k in fitting if k <= max(request.degree, fitting[0])]
            for degree in reversed(wanted):
                at = free.near(PlacedGroup(degree, request.request.home))
                if at is not None:
                    free.take(at)
                    groups.append((alone(request, degree), at))
                    break
        if self.settings.scale_up:
            groups = grown(groups, free, self._memo)
        drafts = [draft for draft, _ in groups]
        join(without_groups(pending, drafts), drafts, length, self._memo, self.settings, length)
        placed = [at for _, at in groups]
        return _round(now, drafts, placed, length, late, drops)

    def _ranked(
        self, now: float, requests: Sequence[RoundRequest]
    ) -> tuple[list[Pending], list[Pending], list[Pending]]:
        """Return the requests to decide about, the late ones, and those that are dropped."""
        settings = self.settings
        pending = pending_of(
            requests, self._memo, now, patience=settings.patience, margin=settings.margin
        )
        late = [p for p in pending if p.rank is Rank.LATE]
        if settings.late is LatePolicy.LAST:
            return pending, late, []
        return [p for p in pending if p.rank is not Rank.LATE], late, late

    # The steps of a decision.

    def _length(self, pending: Sequence[Pending]) -> float:
        """Return the greatest length of the round; a step that takes longer lengthens it."""
        if self.settings.length is not None:
            return self.settings.length
        steps = {p.times: p.times.seconds[p.degree] for p in pending}
        return round_length(steps, self.settings.granularity) if steps else 0.0

    def _drafts(self, pending: list[Pending], length: float) -> list[Draft]:
        """Return the best of the rounds that start from the knapsack and from schedules.

        Of many requests, the one that starts from the best schedule.
        """
        admit(pending, self.devices)
        pending = by_urgency(pending)
        reserved = self._reserve(pending, length)
        free = self._free(reserved)
        waiting = [p for p in without_groups(pending, reserved) if p.rank <= Rank.CROWDED]
        jobs = [p.job(p.left, p.request.home.size if p.request.home else 0) for p in waiting]
        now = pending[0].now if pending else 0.0
        if len(waiting) > OUTLOOK:
            plan = best_schedule(jobs, now, free, self.devices, narrow=True) if free else []
            best = self._fill(pending, [*reserved, *self._start(waiting, plan, length)], length)
        else:
            plans = schedules(jobs, now, free, self.devices) if free else ()
            starts = [self._pack(waiting, length, free)]
            starts += [start for p in plans if (start := self._start(waiting, p, length))]
            rounds = [self._fill(pending, [*reserved, *start], length) for start in starts]
            best = self._best(pending, distinct(rounds), length, now)
        join(without_groups(pending, best), best, length, self._memo, self.settings)
        return best

    def _start(
        self, waiting: Sequence[Pending], plan: Sequence[Planned], length: float
    ) -> list[Draft]:
        """Return the groups with which a schedule starts."""
        now = waiting[0].now if waiting else 0.0
        starting = {id: degree for id, start, degree in plan if start <= now}
        by_id = {p.id: p for p in waiting if p.id in starting}
        return [
            alone(by_id[id], degree)
            for id, degree in starting.items()
            if degree in by_id[id].usable(length)
        ]

    def _best(
        self, pending: Sequence[Pending], rounds: Sequence[list[Draft]], length: float, now: float
    ) -> list[Draft]:
        """Return the round after which the most requests can be in time, at the least cost."""
        if len(rounds) == 1:
            return rounds[0]
        best, most = rounds[0], (-1, 0.0)
        for drafts in rounds:
            found = self._outlook(pending, drafts, length, now, most[0])
            if found > most:
                best, most = drafts, found
        return best

    def _outlook(
        self,
        pending: Sequence[Pending],
        drafts: Sequence[Draft],
        length: float,
        now: float,
        least: int,
    ) -> tuple[int, float]:
        """Return the number of requests that can be in time, and what their time costs, negated.

        If that number can't reach `least`, no schedule is made, and a bound of it is returned.

        The latter are the device-seconds of the round and those that the requests need after it.
        Idle devices count as well, unless the settings leave them idle.
        """
        border = max((d.steps(length) * d.seconds for d in drafts), default=0.0)
        made = {m.id: (d.steps(border), d.seconds, d.degree) for d in drafts for m in d.members}
        in_time, need, jobs = 0, 0.0, []
        for request in pending[:OUTLOOK]:
            steps, seconds, degree = made.get(request.id, (0, 0.0, 0))
            job = request.job(request.left - min(steps, request.left), degree)
            if not request.hopeful:
                need += job.device_seconds
            elif job.left:
                jobs.append(job)
            else:
                in_time += now + request.left * seconds <= request.due + EDGE
        after = now + border
        possible = sum(after + j.left * j.times.least <= j.due + EDGE for j in jobs)
        if in_time + possible < least:
            return in_time + possible, -inf
        planned = {p.id for p in best_schedule(jobs, after, self.devices, self.devices)}
        need += sum(j.device_seconds for j in jobs if j.id in planned)
        busy = sum(self._memo.footprints[d.degree] * d.steps(border) * d.seconds for d in drafts)
        used = self.devices * border if self.settings.scale_up else busy
        return in_time + len(planned), -need - used

    def _reserve(self, pending: Sequence[Pending], length: float) -> list[Draft]:
        """Return a group of the cheapest degree for the request that is overdue for longest."""
        overdue = [p for p in pending if p.overdue]
        if not overdue:
            return []
        oldest = min(overdue, key=lambda p: (p.due, p.id))
        return [alone(oldest, oldest.usable(length)[0])]

    def _pack(self, hopeful: Sequence[Pending], length: float, free: int) -> list[Draft]:
        """Choose degrees by the knapsack; the others don't run yet."""
        choices = [p.options(length) for p in hopeful]
        groups = values(choices, [p.rank for p in hopeful], self._memo.footprints)
        # a request for which not to run is best, whatever the others do, needs no place in the sum
        urgent = [n for n, group in enumerate(groups) if max(group, key=_value) is not group[0]]
        chosen = choose_options([groups[n] for n in urgent], free)
        return [
            alone(hopeful[n], choices[n][option].degree)
            for n, option in zip(urgent, chosen, strict=True)
            if choices[n][option].degree
        ]

    def _fill(self, pending: Sequence[Pending], drafts: list[Draft], length: float) -> list[Draft]:
        """Use the devices that a choice of groups leaves: for further requests, then larger groups.

        A request starts at the degree that it needs, or at the next smaller one that is free.
        """
        free = self._free(drafts)
        for request in without_groups(pending, drafts) if free else ():
            if not free:
                break
            fitting = self._degrees(request, length, free)
            if fitting:
                drafts.append(alone(request, fitting[-1]))
                free -= self._memo.footprints[fitting[-1]]
        if self.settings.scale_up:
            scale_up(drafts, free, self._memo)
        return drafts

    def _placed(
        self,
        now: float,
        drafts: Sequence[Draft],
        length: float,
        late: Sequence[Pending],
        drops: Sequence[Pending],
    ) -> Round:
        placed = place([PlacedGroup(d.degree, d.home) for d in drafts], self.devices)
        assert placed is not None, "groups whose footprints fit can be placed"
        return _round(now, drafts, placed, length, late, drops)

    # Parts of them.

    def _degrees(self, request: Pending, length: float, free: int) -> list[int]:
        """Return the usable degrees that are free, up to the one that a request needs."""
        usable = request.usable(length)
        needed = max(request.degree, usable[0])
        return [k for k in usable if k <= needed and self._memo.footprints[k] <= free]

    def _free(self, drafts: Sequence[Draft]) -> int:
        return self.devices - sum(self._memo.footprints[d.degree] for d in drafts)


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


def _round(
    now: float,
    drafts: Sequence[Draft],
    placed: Sequence[Devices],
    length: float,
    late: Sequence[Pending],
    drops: Sequence[Pending],
) -> Round:
    """Return the decision; its length is that of the longest group."""
    border = max([d.steps(length) * d.seconds for d in drafts], default=0.0)
    groups = []
    for draft, devices in zip(drafts, placed, strict=True):
        steps, members = draft.steps(border), draft.members
        if len(members) == 1:
            made = {members[0].id: steps}
        else:
            made = {m.id: min(steps, m.left) for m in members}
        groups.append(DeviceGroup(devices, made, steps * draft.seconds))
    return Round(now, border, tuple(groups), tuple(p.id for p in late), tuple(p.id for p in drops))


def _value(option: Option) -> float:
    return option.value
