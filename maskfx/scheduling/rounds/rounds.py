"""Rounds: which requests run for how many steps on which of several devices until the next border.

The scheduler of TetriServe, for dense steps and masked edits alike. Devices form blocks of eight,
the most that a group may have. Each block has rounds of its own: one begins when the block is open,
that is when none of its groups is at work any more, and ends at its border, when all of its groups
have made their steps. On the devices of open blocks the scheduler

1. finds for each request the degrees of least device-seconds that still meet its deadline;
2. reserves devices for the request that has waited too long, if any;
3. chooses degrees by a knapsack over requests and degrees: as many requests as possible that can
   still be in time after the round, on these devices or on others when those are free, then the
   fewest device-seconds;
4. gives devices that are left to requests that don't run yet, in the order of their urgency;
5. lets requests without devices join a group, where no member becomes late and the joint step pays;
6. gives devices that are still idle to the groups that gain most;
7. places the groups so that as few as possible move.

Devices of another block that are free before its border get further steps that end by then
(`within.py`): those of requests that have arrived meanwhile, or that had no devices. Pure: no
clock, no devices; what it returns is the plain data of `round_plan.py`, which an executor obeys,
and notes in a `BlockState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from operator import attrgetter

from maskfx.errors import InputError
from maskfx.scheduling.degree_costs import StepProfile
from maskfx.scheduling.rounds.at_border import OUTLOOK, Border, round_length
from maskfx.scheduling.rounds.block_state import BlockState
from maskfx.scheduling.rounds.drafts import without_groups
from maskfx.scheduling.rounds.many_requests import pending_of
from maskfx.scheduling.rounds.placement import BLOCK, Devices, PlacedGroup, place
from maskfx.scheduling.rounds.profile_memo import ProfileMemo
from maskfx.scheduling.rounds.round_plan import (
    DeviceGroup,
    LatePolicy,
    Round,
    RoundRequest,
    RoundSettings,
)
from maskfx.scheduling.rounds.urgency import Pending, Rank
from maskfx.scheduling.rounds.within import Placed, until_border


@dataclass
class RoundScheduler:
    """Decides what free devices do from the requests that wait.

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

    def decide(
        self, now: float, requests: Sequence[RoundRequest], state: BlockState | None = None
    ) -> Round:
        """Return what free devices do from now on; no groups if there is nothing to run.

        Args:
            requests: Those that aren't in a group at work.
            state: Which devices are free; None: all.
        """
        state = state or BlockState(self.devices)
        able = [r for r in requests if self._decidable(now, r, state)]
        pending, late, drops = self._ranked(now, able)
        resting: dict[int, list[Pending]] = {}
        waiting = []
        for request in pending:
            block = _block(request.request)
            if block in state.borders:
                resting.setdefault(block, []).append(request)
            else:
                waiting.append(request)
        groups = self._at_borders(now, waiting, state) if waiting else []
        if state.partial and (resting or len(groups) < len(waiting)):
            waiting = without_groups(
                waiting, [draft for _, placed in groups for draft, _ in placed]
            )
            groups += self._within(now, waiting, resting, state)
        found = [g for border, placed in groups for g in device_groups(placed, border - now)]
        return Round(now, tuple(found), tuple(p.id for p in late), tuple(p.id for p in drops))

    def _decidable(self, now: float, request: RoundRequest, state: BlockState) -> bool:
        """Return False if a request rests on its block until the border, without time for a step.

        Also a late one, which is dropped at the border.
        """
        border = state.borders.get(_block(request))
        return border is None or self._memo.of(request.work).times.least <= border - now

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

    def _length(self, pending: Sequence[Pending]) -> float:
        """Return the greatest length of the round; a step that takes longer lengthens it."""
        if self.settings.length is not None:
            return self.settings.length
        steps = {p.times: p.times.seconds[p.degree] for p in pending}
        return round_length(steps, self.settings.granularity) if steps else 0.0

    def _at_borders(
        self, now: float, waiting: list[Pending], state: BlockState
    ) -> list[tuple[float, list[Placed]]]:
        """Return the groups that start on open blocks: of each block the border and the groups.

        Blocks that are left without a group are decided about again, for the requests that are left
        without devices: the last block may be too small for a step within the length of the round.
        """
        found: dict[int, list[Placed]] = {}
        length, blocks = self._length(waiting), self._blocks(waiting, state)
        while blocks and waiting and (begun := self._begun(now, length, waiting, blocks, state)):
            found |= begun
            blocks = [block for block in blocks if block not in begun]
            started = [draft for placed in begun.values() for draft, _ in placed]
            waiting = without_groups(waiting, started)
        return [(now + longest(groups, length), groups) for groups in found.values()]

    def _begun(
        self,
        now: float,
        length: float,
        waiting: list[Pending],
        blocks: Sequence[int],
        state: BlockState,
    ) -> dict[int, list[Placed]]:
        """Return the groups that start on some open blocks, by block."""
        devices = sum(map(state.size, blocks))
        others = len(blocks) < state.blocks and len(waiting) > 1
        later = state.later(now, BLOCK * min(OUTLOOK, len(waiting))) if others else ()
        elsewhere = _elsewhere(now, waiting, state) if others else {}
        border = Border(self._memo, self.settings, devices, now, length, later, elsewhere)
        drafts = border.drafts(waiting)
        places = {block: number for number, block in enumerate(blocks)}
        placed = place([PlacedGroup(d.degree, _moved(d.home, places)) for d in drafts], devices)
        assert placed is not None, "groups whose footprints fit can be placed"
        found: dict[int, list[Placed]] = {}
        for draft, (start, size) in zip(drafts, placed, strict=True):
            block = blocks[start // BLOCK]
            at = Devices(block * BLOCK + start % BLOCK, size)
            found.setdefault(block, []).append((draft, at))
        return found

    def _blocks(self, waiting: Sequence[Pending], state: BlockState) -> list[int]:
        """Return the open blocks that are decided about: no more than there are requests."""
        blocks = state.open
        if len(waiting) >= len(blocks):
            return blocks.copy()
        homes = {p.request.home.start // BLOCK for p in waiting if p.request.home}
        first = sorted(blocks, key=lambda block: block not in homes)
        return sorted(first[: len(waiting)])

    def _within(
        self,
        now: float,
        waiting: list[Pending],
        resting: dict[int, list[Pending]],
        state: BlockState,
    ) -> list[tuple[float, list[Placed]]]:
        """Return the groups that start before the border of their block, with that border."""
        found = []
        for block in sorted(state.partial):
            here = resting.get(block, []) + waiting
            if not here:
                continue
            length = (state.borders[block] - now) * (1 - self.settings.margin)
            free = state.free.only(block * BLOCK, state.size(block))
            placed = until_border(here, length, free, self._memo, self.settings)
            if placed:
                found.append((now + longest(placed, length), placed))
                waiting = without_groups(waiting, [draft for draft, _ in placed])
        return found


def _block(request: RoundRequest) -> int:
    """Return the block in which a request has its devices; -1 if it has none."""
    return request.home.start // BLOCK if request.home else -1


def _elsewhere(now: float, waiting: Sequence[Pending], state: BlockState) -> dict[str, float]:
    """Return when devices of other blocks are expected for requests that can wait for them, by id.

    Of the requests that have no devices so far, the n-th in the order of their latest starts waits
    for the n-th border. Otherwise requests that run would lose their devices to others that need
    not have them now.
    """
    new = [p for p in waiting if p.hopeful and p.request.home is None]
    if len(new) == len(waiting):
        return {}
    new.sort(key=attrgetter("latest_start", "id"))
    expected = zip(new, nsmallest(len(new), state.borders.values()), strict=False)
    return {p.id: max(now, border) for p, border in expected if border < p.latest_start}


def _moved(home: Devices | None, places: dict[int, int]) -> Devices | None:
    """Return a place among the blocks that are decided about, numbered from 0."""
    if home is None or home.start // BLOCK not in places:
        return None
    return Devices(places[home.start // BLOCK] * BLOCK + home.start % BLOCK, home.size)


def longest(placed: Sequence[Placed], length: float) -> float:
    """Return the seconds of the group that takes longest, of as many steps as fit into a time."""
    return max(draft.steps(length) * draft.seconds for draft, _ in placed)


def device_groups(placed: Sequence[Placed], length: float) -> list[DeviceGroup]:
    """Return the groups of a block, each with the steps that it makes within a time."""
    groups = []
    for draft, devices in placed:
        steps, members = draft.steps(length), draft.members
        made = {m.id: min(steps, m.left) for m in members}
        hopeful = any(m.hopeful for m in members)
        further = (draft.left - steps) * draft.seconds if hopeful else 0.0
        groups.append(DeviceGroup(devices, made, steps * draft.seconds, further))
    return groups
