"""Algorithm 1 of TetriServe as printed, with what its text adds: a baseline for the rounds.

Shares no code with the scheduler of `maskfx`, but for the plain data that the simulator carries
out. Section and line numbers are those of the paper (arXiv, sections 4.2 and 5):

- least device-seconds per deadline by enumeration, at most two degrees (4.2.1);
- the group knapsack over one round, with the bound of the fastest step for all (lines 1 to 22);
- groups stay on their devices where they can, idle devices are given away (4.2.3);
- equal small requests share a group where no deadline suffers (5).

What the text leaves open is settled in the baseline's favour: a request that the knapsack doesn't
choose takes part in the distribution of idle devices; one that ends within the round survives if
that is in time, though line 11 asks for the border; a round ends when all of its groups have ended,
and begins at once where nothing runs. Equal values keep the first option, "none", as line 19 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, inf

from maskfx.scheduling.degree_costs import StepProfile
from maskfx.scheduling.load import Work
from maskfx.scheduling.rounds.placement import Devices
from maskfx.scheduling.rounds.round_plan import DeviceGroup, Round, RoundRequest

EDGE = 1e-9
BATCH = 8  # requests in a group at most, as in `RoundSettings`


@dataclass(frozen=True)
class Allocation:
    """Some of the steps of a request, on a number of devices."""

    steps: int
    degree: int


@dataclass
class Waiting:
    """A request at the start of a round, with the seconds of its step by degree."""

    request: RoundRequest
    seconds: dict[int, float]
    due: float
    plan: list[Allocation]

    @property
    def least(self) -> float:
        return min(self.seconds.values())


@dataclass
class PaperGroup:
    """Requests that step together on a number of devices."""

    members: list[Waiting]
    degree: int
    steps: int
    seconds: float  # of a step


@dataclass
class PaperScheduler:
    """Decides rounds as the paper prints it.

    Args:
        granularity: Steps in a round of the slowest request on the largest group.
        margin: Share of the time until a deadline that is kept; 0 as printed.
        drop: Whether late requests are dropped; else they get idle devices only, as printed.
        batch: Requests in a group at most.
    """

    profile: StepProfile
    devices: int
    granularity: int = 5
    margin: float = 0.0
    drop: bool = False
    batch: int = BATCH
    _times: dict[Work, dict[int, float]] = field(default_factory=dict)

    def decide(self, now: float, requests: Sequence[RoundRequest]) -> Round:
        waiting = [self._waiting(r, now) for r in requests]
        late = [w for w in waiting if now + w.request.left * w.least > w.request.due + EDGE]
        drops = late if self.drop else []
        waiting = [w for w in waiting if not any(w is d for d in drops)]
        if not waiting:
            ids = tuple(w.request.id for w in drops)
            return Round(now, (), ids, ids)
        length = self.granularity * max(w.least for w in waiting)
        groups = self._chosen(now, waiting, length)
        self._use_idle(waiting, groups, length)
        self._batch(now, waiting, groups, length)
        placed = self._placed(groups)
        return Round(
            now,
            tuple(
                DeviceGroup(
                    at,
                    {m.request.id: min(g.steps, m.request.left) for m in g.members},
                    g.steps * g.seconds,
                )
                for g, at in zip(groups, placed, strict=True)
            ),
            tuple(w.request.id for w in late),
            tuple(w.request.id for w in drops),
        )

    # 4.2.1: the least device-seconds that meet the deadline.

    def _waiting(self, request: RoundRequest, now: float) -> Waiting:
        if request.work not in self._times:
            degrees = [k for k in self.profile.degrees if k <= self.devices and k & (k - 1) == 0]
            self._times[request.work] = {k: self.profile.step(k, [request.work]) for k in degrees}
        seconds = self._times[request.work]
        slack = request.due - request.after - now
        kept = max(slack * (1 - self.margin), min(slack, request.left * min(seconds.values())))
        return Waiting(request, seconds, now + kept, cheapest(request.left, kept, seconds))

    # Algorithm 1.

    def _chosen(self, now: float, waiting: Sequence[Waiting], length: float) -> list[PaperGroup]:
        """Return the groups that the dynamic program chooses."""
        border = now + length  # line 1
        best: list[float] = [0.0] + [-inf] * self.devices  # line 13
        back: list[list[int]] = []  # per request and capacity: -1 for "none", else the allocation
        every = []
        for one in waiting:  # lines 2 to 12, and 14
            options = []
            for number in (-1, *range(len(one.plan))):
                made, width = 0, 0
                if number >= 0:
                    part = one.plan[number]
                    made = min(part.steps, floor(length / one.seconds[part.degree] + EDGE))
                    width = part.degree
                    if not made or width > self.devices:  # line 6
                        continue
                bound = (one.request.left - made) * one.least  # line 10
                survives = border + bound <= one.due + EDGE  # line 11
                if number >= 0 and made == one.request.left:
                    end = now + made * one.seconds[one.plan[number].degree]
                    survives = end <= one.due + EDGE
                options.append((number, width, float(survives), made))
            after, choice = list(best), [-1] * (self.devices + 1)  # line 15
            for capacity in range(self.devices + 1):  # lines 16 to 19
                for number, width, value, _ in options:
                    if width <= capacity and best[capacity - width] + value > after[capacity]:
                        after[capacity] = best[capacity - width] + value
                        choice[capacity] = number
            best = after
            back.append(choice)
            every.append({number: made for number, _, _, made in options})
        capacity = max(range(self.devices + 1), key=lambda c: best[c])  # line 21
        groups = []
        for one, choice, made_by in zip(
            reversed(waiting), reversed(back), reversed(every), strict=True
        ):
            number = choice[capacity]
            if number >= 0:
                degree = one.plan[number].degree
                groups.append(PaperGroup([one], degree, made_by[number], one.seconds[degree]))
                capacity -= degree
        return groups[::-1]

    # 4.2.3: idle devices, and devices that stay the same.

    def _use_idle(
        self, waiting: Sequence[Waiting], groups: list[PaperGroup], length: float
    ) -> None:
        """Start requests on idle devices, by deadline; then enlarge the groups that gain most."""
        free = self.devices - sum(g.degree for g in groups)
        running = {g.members[0].request.id for g in groups}
        for one in sorted(waiting, key=lambda w: (w.request.due, w.request.id)):
            fitting = [k for k, t in one.seconds.items() if k <= free and t <= length * (1 + EDGE)]
            if one.request.id in running or not fitting:
                continue
            wanted = max(part.degree for part in one.plan)
            degree = max((k for k in fitting if k <= wanted), default=fitting[0])
            seconds = one.seconds[degree]
            steps = min(one.request.left, floor(length / seconds + EDGE))
            groups.append(PaperGroup([one], degree, steps, seconds))
            free -= degree
        while True:
            gains = [
                (one.members[0].request.left * (one.seconds - t) / (k - one.degree), n, k)
                for n, one in enumerate(groups)
                for k, t in one.members[0].seconds.items()
                if one.degree < k <= one.degree + free and t < one.seconds
            ]
            if not gains:
                return
            _, number, degree = max(gains)
            group = groups[number]
            free -= degree - group.degree
            seconds = group.members[0].seconds[degree]
            steps = min(group.members[0].request.left, floor(length / seconds + EDGE))
            groups[number] = PaperGroup(group.members, degree, steps, seconds)

    def _placed(self, groups: Sequence[PaperGroup]) -> list[Devices]:
        """Return aligned devices for each group, the largest first: those it had if they're free.

        Sizes are powers of two, so that what is left always has a place for the next one.
        """
        free = [True] * self.devices
        found: dict[int, Devices] = {}
        homes = [group.members[0].request.home for group in groups]
        order = sorted(range(len(groups)), key=lambda n: (-groups[n].degree, homes[n] is None))
        for number in order:
            degree, home = groups[number].degree, homes[number]
            open_starts = [
                start
                for start in range(0, self.devices - degree + 1, degree)
                if all(free[start : start + degree])
            ]
            stays = [s for s in open_starts if home and Devices(s, degree).nests(home)]
            at = Devices((stays or open_starts)[0], degree)
            found[number] = at
            free[at.start : at.start + degree] = [False] * degree
        return [found[number] for number in range(len(groups))]

    # 5: selective batching.

    def _batch(
        self, now: float, waiting: Sequence[Waiting], groups: list[PaperGroup], length: float
    ) -> None:
        """Let requests without devices join a group of the same size of picture."""
        taken = {g.members[0].request.id for g in groups}
        for one in waiting:
            if one.request.id in taken:
                continue
            for group in groups:
                first = group.members[0].request.work
                if len(group.members) >= self.batch or first.whole != one.request.work.whole:
                    continue
                members = [*group.members, one]
                seconds = self.profile.step(group.degree, [m.request.work for m in members])
                steps = min(max(m.request.left for m in members), floor(length / seconds + EDGE))
                suffers = any(
                    m.request.due + EDGE >= now + m.request.left * m.least  # not late yet
                    and now + m.request.left * seconds > m.due + EDGE
                    for m in members
                )
                alone = group.seconds + one.seconds[group.degree]
                if steps and seconds < alone and not suffers:
                    group.members, group.seconds, group.steps = members, seconds, steps
                    break


def cheapest(steps: int, slack: float, seconds: dict[int, float]) -> list[Allocation]:
    """Return the allocations of least device-seconds within a time, by enumeration.

    If none ends in time, all steps at the fastest degree.
    """
    found: tuple[float, list[Allocation]] | None = None
    degrees = sorted(seconds)
    for at, below in enumerate(degrees):
        for above in degrees[at:]:
            for many in range(steps + 1) if above != below else (steps,):
                time = many * seconds[above] + (steps - many) * seconds[below]
                if time > slack + EDGE:
                    continue
                cost = many * above * seconds[above] + (steps - many) * below * seconds[below]
                if found is None or cost < found[0] - EDGE:
                    parts = [Allocation(many, above), Allocation(steps - many, below)]
                    found = cost, [part for part in parts if part.steps]
    if found:
        return found[1]
    return [Allocation(steps, min(seconds, key=lambda k: seconds[k]))]
