"""Groups of a round while it is being decided: which requests share one, which are enlarged.

A *draft* is a group without devices: its members and its degree. Pure.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from maskfx.scheduling.degree_costs import BatchTotals
from maskfx.scheduling.rounds.allocation import EDGE
from maskfx.scheduling.rounds.placement import Devices, FreeDevices, PlacedGroup
from maskfx.scheduling.rounds.profile_memo import ProfileMemo
from maskfx.scheduling.rounds.round_plan import RoundSettings
from maskfx.scheduling.rounds.urgency import Pending, Rank

TRIALS = 4  # groups that a request without devices may try to join
CROWDED = Rank.CROWDED  # read in the innermost loop
MISSES = 32  # requests in a row without a group to join, after which no further one is tried


@dataclass(slots=True)
class Draft:
    """A group while it is being decided: its members, its degree and the seconds of its step.

    `totals` are those of the members' joint step; None for a request alone.
    """

    members: list[Pending]
    degree: int
    seconds: float
    totals: BatchTotals | None = None

    @property
    def left(self) -> int:
        members = self.members
        return members[0].left if len(members) == 1 else max([m.left for m in members])

    def steps(self, length: float) -> int:
        left, fitting = self.left, int(length / self.seconds + EDGE)
        return left if left < fitting else fitting or 1

    @property
    def home(self) -> Devices | None:
        members = self.members
        if len(members) == 1:
            return members[0].request.home
        homes = [m.request.home for m in members if m.request.home is not None]
        return max(homes, key=lambda home: home.size, default=None)


def alone(request: Pending, degree: int) -> Draft:
    return Draft([request], degree, request.times.seconds[degree])


def without_groups(pending: Sequence[Pending], drafts: Sequence[Draft]) -> list[Pending]:
    """Return the requests that aren't in a group yet."""
    taken = {member.id for draft in drafts for member in draft.members}
    return [p for p in pending if p.id not in taken]


def distinct(rounds: Sequence[list[Draft]]) -> list[list[Draft]]:
    """Return the rounds without those that repeat an earlier one; each request is alone."""
    found: dict[frozenset[tuple[str, int]], list[Draft]] = {}
    for drafts in rounds:
        found.setdefault(frozenset((d.members[0].id, d.degree) for d in drafts), drafts)
    return list(found.values())


def scale_up(drafts: list[Draft], free: int, memo: ProfileMemo) -> None:
    """Add idle devices to the groups of one request that save the most seconds per device."""
    queue: list[tuple[float, int, int, int]] = []  # seconds saved, negated; group, degree, added

    def offer(number: int) -> None:
        draft = drafts[number]
        times = draft.members[0].times.seconds
        for degree in memo.degrees:
            added = memo.footprints[degree] - memo.footprints[draft.degree]
            if 0 < added <= free:
                saved = draft.left * (draft.seconds - times[degree]) / added
                if saved > EDGE:
                    heapq.heappush(queue, (-saved, number, degree, added))

    if free:
        for number in range(len(drafts)):
            offer(number)
    while free and queue:
        _, number, degree, added = heapq.heappop(queue)
        draft = drafts[number]
        if added == memo.footprints[degree] - memo.footprints[draft.degree] and added <= free:
            drafts[number] = alone(draft.members[0], degree)
            free -= added
            offer(number)


def grown(
    groups: Sequence[tuple[Draft, Devices]], free: FreeDevices, memo: ProfileMemo
) -> list[tuple[Draft, Devices]]:
    """Enlarge groups of one request where devices beside them are free: the slowest steps first."""
    found = list(groups)
    for number in sorted(range(len(found)), key=lambda n: -found[n][0].seconds):
        draft, at = found[number]
        times = draft.members[0].times.seconds
        for degree in reversed(memo.degrees):
            if degree <= draft.degree or times[degree] >= draft.seconds:
                continue
            free.give(at)
            larger = free.first(PlacedGroup(degree, at))
            free.take(larger or at)
            if larger:
                found[number] = alone(draft.members[0], degree), larger
                break
    return found


def join(
    waiting: Sequence[Pending],
    drafts: list[Draft],
    length: float,
    memo: ProfileMemo,
    settings: RoundSettings,
    longest: float = inf,
) -> None:
    """Add requests without devices to groups: to the one whose joint step gains most.

    Only the `TRIALS` groups with the shortest steps are tried, and none after `MISSES` requests in
    a row that don't join, for speed. No joint step takes more than `longest` seconds.
    """
    if settings.batch == 1:
        return
    shortest = sorted((draft.seconds, number) for number, draft in enumerate(drafts))
    joint = {degree: memo.joint(degree) for degree in {draft.degree for draft in drafts}}
    worth, batch = settings.gain, settings.batch
    missed = 0
    slower: set[int] = set()  # kinds of requests whose joint steps don't pay in any of the groups
    for request in waiting:
        found: tuple[float, int, int] | None = None  # the joint step's seconds, its group and place
        pays = False
        if id(request.times) in slower:
            missed += 1
            if missed == MISSES:
                break
            continue
        own, alone_seconds = memo.of(request.request.work).totals, request.times.seconds
        least = worth
        for place, (before, number) in enumerate(shortest[:TRIALS]):
            draft = drafts[number]
            degree = draft.degree
            if draft.totals is None:
                draft.totals = memo.of(draft.members[0].request.work).totals
            seconds = joint[degree](draft.totals, own)
            gain = (before + alone_seconds[degree]) / seconds
            if gain >= worth:
                pays = True
                if (
                    gain >= least
                    and seconds <= longest
                    and not _harms(request, draft.members, seconds, length)
                ):
                    least, found = gain, (seconds, number, place)
        if found:
            seconds, number, place = found
            draft = drafts[number]
            assert draft.totals is not None, "the totals of a group that was tried"
            draft.members.append(request)
            draft.seconds, draft.totals = seconds, draft.totals.with_others(own)
            del shortest[place]
            if len(draft.members) < batch:
                insort(shortest, (seconds, number))
            slower.clear()
            missed = 0
        else:
            missed += 1
            if not pays:
                slower.add(id(request.times))
        if missed == MISSES or not shortest:
            break


def _harms(request: Pending, others: Sequence[Pending], seconds: float, length: float) -> bool:
    """Return True if a hopeful member of a joint group would have to leave it to be in time."""
    steps = int(length / seconds + EDGE) or 1
    now = request.now - EDGE
    border = now + (length if length > seconds else seconds)
    for member in (request, *others):
        left = member.left
        end = border + (left - steps) * seconds if left > steps else now + left * seconds
        if end > member.due and member.rank <= CROWDED:
            return True
    return False
