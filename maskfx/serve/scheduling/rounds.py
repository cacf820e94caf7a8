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

Requests join and change their degree at the borders of rounds only. A round ends when all of its
groups have made their steps. Pure: no clock, no devices; what it returns is the plain data of
`round_plan.py`, which an executor obeys.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor

import numpy as np

from maskfx.errors import InputError
from maskfx.serve.scheduling.allocation import EDGE, StepTimes
from maskfx.serve.scheduling.degree_costs import StepProfile
from maskfx.serve.scheduling.knapsack import choose_options
from maskfx.serve.scheduling.outlook import best_schedule, schedules
from maskfx.serve.scheduling.placement import Devices, PlacedGroup, footprint, place
from maskfx.serve.scheduling.round_plan import (
    DeviceGroup,
    LatePolicy,
    Round,
    RoundRequest,
    RoundSettings,
)
from maskfx.serve.scheduling.urgency import (
    Pending,
    ProfileMemo,
    Rank,
    admit,
    values,
)

KINDS = 8  # kinds of steps at most that the length of a round is fitted to
OUTLOOK = 64  # requests that decisions are compared by, the most urgent ones
TRIALS = 4  # groups that a request without devices may try to join


@dataclass
class Draft:
    """A group while it is being decided: its members, its degree and the seconds of its step."""

    members: list[Pending]
    degree: int
    seconds: float

    @property
    def left(self) -> int:
        return max(member.left for member in self.members)

    def steps(self, length: float) -> int:
        return min(self.left, max(1, floor(length / self.seconds + EDGE)))

    @property
    def home(self) -> Devices | None:
        homes = [m.request.home for m in self.members if m.request.home is not None]
        return max(homes, key=lambda home: home.size, default=None)


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
        pending = [self._pending(r, now) for r in requests]
        late = [p for p in pending if p.rank is Rank.LATE]
        drops = [p for p in late if self._drops(p)]
        pending = [p for p in pending if not self._drops(p)]
        length = self._length(pending)
        drafts = self._drafts(pending, length)
        return self._placed(now, drafts, length, late, drops)

    # The steps of a decision.

    def _length(self, pending: Sequence[Pending]) -> float:
        """Return the greatest length of the round; a step that takes longer lengthens it."""
        if self.settings.length is not None:
            return self.settings.length
        steps = {p.times: p.times.seconds[p.degree] for p in pending}
        return round_length(steps, self.settings.granularity) if steps else 0.0

    def _drafts(self, pending: list[Pending], length: float) -> list[Draft]:
        """Return the best of the rounds that start from the knapsack and from the outlook."""
        admit(pending, self.devices)
        now = pending[0].now if pending else 0.0
        reserved = self._reserve(pending, length)
        others = _others(pending, reserved)
        rounds = [self._pack(others, length, self._free(reserved))]
        rounds += self._schedules(others, now, length, self._free(reserved))
        filled = [self._fill(pending, [*reserved, *drafts], length) for drafts in rounds]
        best = max(filled, key=lambda drafts: self._outlook(pending, drafts, length, now))
        self._join(_others(pending, best), best, length)
        return best

    def _schedules(
        self, pending: Sequence[Pending], now: float, length: float, free: int
    ) -> list[list[Draft]]:
        """Return the groups with which the schedules of the outlook start."""
        hopeful = sorted((p for p in pending if p.hopeful), key=_order)[:OUTLOOK]
        by_id = {p.id: p for p in hopeful}
        jobs = [p.job(p.left, p.request.home.size if p.request.home else 0) for p in hopeful]
        starts = [
            [
                self._alone(by_id[p.id], p.degree)
                for p in plan
                if p.start <= now and p.degree in by_id[p.id].usable(length)
            ]
            for plan in (schedules(jobs, now, free, self.devices) if free else ())
        ]
        return [drafts for drafts in starts if drafts]

    def _outlook(
        self, pending: Sequence[Pending], drafts: Sequence[Draft], length: float, now: float
    ) -> tuple[int, float]:
        """Return the number of requests that can be in time, and what their time costs, negated.

        The latter are the device-seconds of the round and those that the requests need after it.
        Idle devices count as well, unless the settings leave them idle.
        """
        border = max((d.steps(length) * d.seconds for d in drafts), default=0.0)
        made = {m.id: (d.steps(border), d.seconds, d.degree) for d in drafts for m in d.members}
        in_time, need, jobs = 0, 0.0, []
        for request in sorted(pending, key=_order)[:OUTLOOK]:
            steps, seconds, degree = made.get(request.id, (0, 0.0, 0))
            job = request.job(request.left - min(steps, request.left), degree)
            if not request.hopeful:
                need += job.device_seconds
            elif job.left:
                jobs.append(job)
            else:
                in_time += now + request.left * seconds <= request.due + EDGE
        planned = {p.id for p in best_schedule(jobs, now + border, self.devices)}
        need += sum(j.device_seconds for j in jobs if j.id in planned)
        busy = sum(self._footprint(d.degree) * d.steps(border) * d.seconds for d in drafts)
        used = self.devices * border if self.settings.scale_up else busy
        return in_time + len(planned), -need - used

    def _reserve(self, pending: Sequence[Pending], length: float) -> list[Draft]:
        """Return a group of the cheapest degree for the request that is overdue for longest."""
        overdue = [p for p in pending if p.overdue]
        if not overdue:
            return []
        oldest = min(overdue, key=lambda p: (p.due, p.id))
        return [self._alone(oldest, oldest.usable(length)[0])]

    def _pack(self, pending: Sequence[Pending], length: float, free: int) -> list[Draft]:
        """Choose degrees by the knapsack; the others don't run yet."""
        hopeful = [p for p in pending if p.hopeful]
        choices = [p.options(length) for p in hopeful]
        groups = values(choices, [p.rank for p in hopeful], self.devices)
        # a request for which not to run is best, whatever the others do, needs no place in the sum
        urgent = [n for n, group in enumerate(groups) if max(group, key=_value) is not group[0]]
        chosen = choose_options([groups[n] for n in urgent], free)
        return [
            self._alone(hopeful[n], choices[n][option].degree)
            for n, option in zip(urgent, chosen, strict=True)
            if choices[n][option].degree
        ]

    def _fill(self, pending: Sequence[Pending], drafts: list[Draft], length: float) -> list[Draft]:
        """Use the devices that a choice of groups leaves: for further requests, then larger groups.

        A request starts at the degree that it needs, or at the next smaller one that is free.
        """
        free = self._free(drafts)
        for request in sorted(_others(pending, drafts), key=_order):
            if not free:
                break
            fitting = self._degrees(request, length, free)
            if fitting:
                drafts.append(self._alone(request, fitting[-1]))
                free -= self._footprint(fitting[-1])
        if self.settings.scale_up:
            self._scale_up(drafts, free)
        return drafts

    def _join(self, waiting: Sequence[Pending], drafts: list[Draft], length: float) -> None:
        """Add requests without devices to groups: to the one whose joint step gains most.

        Only the `TRIALS` groups with the shortest steps are tried, for speed.
        """
        for request in sorted(waiting, key=_order):
            open_groups = [n for n, d in enumerate(drafts) if len(d.members) < self.settings.batch]
            found: tuple[float, int, Draft] | None = None
            for number in heapq.nsmallest(TRIALS, open_groups, key=lambda n: drafts[n].seconds):
                draft = drafts[number]
                trial = self._draft([*draft.members, request], draft.degree)
                apart = draft.seconds + request.times.seconds[draft.degree]
                gain = apart / trial.seconds
                if gain >= max(self.settings.gain, found[0] if found else 0.0) and not _harms(
                    trial, length
                ):
                    found = gain, number, trial
            if found:
                drafts[found[1]] = found[2]

    def _scale_up(self, drafts: list[Draft], free: int) -> None:
        """Add idle devices to the groups that save the most seconds per device."""
        while free:
            best: tuple[float, int, Draft] | None = None
            for number, draft in enumerate(drafts):
                for degree in self._memo.degrees:
                    added = self._footprint(degree) - self._footprint(draft.degree)
                    if not 0 < added <= free:
                        continue
                    larger = self._draft(draft.members, degree)
                    saved = draft.left * (draft.seconds - larger.seconds) / added
                    if saved > EDGE and (best is None or saved > best[0]):
                        best = saved, number, larger
            if best is None:
                break
            _, number, larger = best
            free -= self._footprint(larger.degree) - self._footprint(drafts[number].degree)
            drafts[number] = larger

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
        border = max((d.steps(length) * d.seconds for d in drafts), default=0.0)
        groups = []
        for draft, devices in zip(drafts, placed, strict=True):
            steps = draft.steps(border)
            made = {m.id: min(steps, m.left) for m in draft.members}
            groups.append(DeviceGroup(devices, made, steps * draft.seconds))
        return Round(
            now, border, tuple(groups), tuple(p.id for p in late), tuple(p.id for p in drops)
        )

    # Parts of them.

    def _footprint(self, degree: int) -> int:
        return footprint(degree, self.devices)

    def _degrees(self, request: Pending, length: float, free: int) -> list[int]:
        """Return the usable degrees that are free, up to the one that a request needs."""
        usable = request.usable(length)
        needed = max(request.degree, usable[0])
        return [k for k in usable if k <= needed and self._footprint(k) <= free]

    def _pending(self, request: RoundRequest, now: float) -> Pending:
        settings = self.settings
        times = self._memo.times(request.work)
        return Pending(request, times, now, patience=settings.patience, margin=settings.margin)

    def _drops(self, request: Pending) -> bool:
        return request.rank is Rank.LATE and self.settings.late is LatePolicy.DROP

    def _free(self, drafts: Sequence[Draft]) -> int:
        return self.devices - sum(self._footprint(d.degree) for d in drafts)

    def _alone(self, request: Pending, degree: int) -> Draft:
        return Draft([request], degree, request.times.seconds[degree])

    def _draft(self, members: list[Pending], degree: int) -> Draft:
        if len(members) == 1:
            return self._alone(members[0], degree)
        works = [m.request.work for m in members]
        return Draft(members, degree, self.profile.step(degree, works))


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


def _others(pending: Sequence[Pending], drafts: Sequence[Draft]) -> list[Pending]:
    """Return the requests that aren't in a group yet."""
    taken = {member.id for draft in drafts for member in draft.members}
    return [p for p in pending if p.id not in taken]


def _order(request: Pending) -> tuple[Rank, float, str]:
    """Sort by rank; then by the latest start, or by the least need where not all can be served."""
    crowded = request.rank is Rank.CROWDED
    return request.rank, request.need if crowded else request.latest_start, request.id


def _value(option: tuple[int, float]) -> float:
    return option[1]


def _harms(after: Draft, length: float) -> bool:
    """Return True if a hopeful member of a joint group would have to leave it to be in time."""
    for member in after.members:
        made = min(member.left, after.steps(length))
        left = member.left - made
        start = member.now + (max(length, after.seconds) if left else made * after.seconds)
        end = start + left * after.seconds
        if member.hopeful and end > member.due + EDGE:
            return True
    return False
