"""Step planner: plans what the edits of a denoiser's steps load, step after step.

The plan of a step is made while the step before it runs, from where that one leaves the loads, the
compute and the staging buffer, so that its loads can begin then. The choices of every member and
block go to the planner, whose selection is stored as `EditStep.plan`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from maskfx.errors import InputError
from maskfx.ir.lru import LruCache
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.planner.blocks import find_blocks
from maskfx.runtime.planner.calibration import one_batch
from maskfx.runtime.planner.choices import INPUT, WHOLE, Choices, choices_of_member, input_of
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.planner.known_costs import KnownCosts
from maskfx.runtime.planner.member_facts import facts_of, speed_of
from maskfx.runtime.planner.plan import QUICK, Plan, plan
from maskfx.runtime.planner.timeline import NOW, BlockTimes, Start, Timeline, simulate
from maskfx.runtime.planner.wanted_rows import wanted_taps
from maskfx.runtime.planning import LoadTrade
from maskfx.runtime.steps import AnyStep, EditStep, is_fixed

log = logging.getLogger(__name__)

CHOICES = 256  # kept: members whose choices are known
BATCHES = 32  # kept: batches whose blocks, and the latest plan of whose steps, are known
SURE = 0.05  # of a step's time: the gain from which projecting again is chosen; predictions err
NEAR = 0.02  # of a step's time: a plan is used again if its step starts no more differently

Selection = tuple[int, ...]  # of one member: the index of its choice in each block


@dataclass(frozen=True)
class PlannedBatch:
    """Edits with their plans set, the plan of the batch, and the blocks it was made for."""

    steps: list[EditStep]
    plan: Plan
    blocks: tuple[BlockTimes, ...]

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        return self.plan.names(self.blocks)


@dataclass(frozen=True)
class BegunEdit:
    """An edit whose loads were begun under a plan; it holds the objects that identify it."""

    step: EditStep
    planned: EditStep
    selection: Selection
    choices: Choices


@dataclass
class KnownBatch:
    """The blocks of a batch, and its latest plan with the state that it was made for.

    Batches are known by the ids of their members' choices, which are held here.
    """

    each: Sequence[Choices]
    blocks: tuple[BlockTimes, ...]
    latest: tuple[Start, Plan] | None = None

    def plan(self, room: float, start: Start, widths: Sequence[int]) -> Plan:
        """Return a plan: the latest one, if it was made for about the same start."""
        if self.latest is not None and alike(*self.latest, start):
            found = self.latest[1]
            timeline = simulate(self.blocks, found.selection, room, start)
            return dataclasses.replace(found, timeline=timeline)
        found = plan_surely(self.blocks, room, start, widths)
        self.latest = start, found
        return found


@dataclass
class StepPlanner:
    """Plans the edits of one denoiser.

    Args:
        denoiser: the denoiser whose edits are planned.
        costs: costs of its blocks and loads; by default they are read from disk, or calibrated at
            the first edit.
        buffer_bytes: size of the staging buffer; by default the loader's.
        widths: how much to search (see `plan`); no search by default.
    """

    denoiser: CompiledDenoiser
    costs: Costs | None = None
    buffer_bytes: float | None = None
    widths: Sequence[int] = QUICK
    latest: Timeline | None = None  # of the step that was planned last
    again: tuple[int, int] = (0, 0)  # of the latest plan: projected again, of all that may be
    whole: tuple[int, int] = (0, 0)  # blocks computed whole, of all that may be
    store: ReadSpeed | None = None  # of the store that rows were read from by a plan
    _choices: LruCache[tuple[Any, ...], Choices] = field(default_factory=lambda: LruCache(CHOICES))
    _batches: LruCache[tuple[int, ...], KnownBatch] = field(
        default_factory=lambda: LruCache(BATCHES)
    )
    _begun: dict[tuple[int, int], BegunEdit] = field(default_factory=dict)
    _plans: dict[str, tuple[Choices, Selection]] = field(default_factory=dict)  # by program

    def __post_init__(self) -> None:
        self.known = KnownCosts(self.denoiser, self.costs)

    # Public interface.

    def plan(self, steps: Sequence[EditStep], start: Start = NOW) -> PlannedBatch:
        """Return the plan under which this batch ends first; a plan never changes an image."""
        program, members = one_batch(self.denoiser, steps)
        costs = self._costs(program, members, steps)
        if costs is None:
            raise InputError(f"plan(): {self.known.describe()}")
        each = [self._choices_of(program, member, costs) for member in members]
        blocks = self._batch_of(each, costs).blocks
        found = plan(blocks, self._room(members), start, widths=self.widths)
        planned = [
            own.planned(step, picked)
            for step, own, picked in zip(steps, each, by_member(found), strict=True)
        ]
        return PlannedBatch(planned, found, blocks)

    def plan_step(self, steps: Sequence[AnyStep]) -> list[AnyStep]:
        """Return the members of the step that runs next; edits have plans.

        Edits whose loads were begun keep their plans. Others are planned beside these, and beside
        the recordings and dense members of the step.
        """
        begun = [self._begun.get(key_of(step)) for step in steps]
        return self._planned(steps, begun, NOW)

    def plan_ahead(self, steps: Sequence[EditStep]) -> list[EditStep]:
        """Return edits of the step after that one with plans, so that their loads can begin."""
        start = NOW if self.latest is None else self.latest.carry()
        self._begun = {}
        found = self._planned(steps, [None] * len(steps), start)
        return [step for step in found if isinstance(step, EditStep)]

    def wanted(self, cache: StepCache) -> Sequence[str]:
        """Return the taps that plans like the latest one read of a recording, in graph order."""
        program = self.denoiser.programs.get(cache.program)
        return [] if program is None else wanted_taps(program, self._plans.get(program.code))

    def trade(self) -> LoadTrade | None:
        """Return what an edit may load or compute, as measured; None before its first plan."""
        for (*_, costs), own in reversed(self._choices.items()):
            found: LoadTrade | None = own.trade(costs)
            if found is not None:
                return found
        return None

    def describe(self) -> str:
        """Return a line about the costs that plans are based on, and the latest plan."""
        if self.latest is None:
            return self.known.describe()
        waits = sum(stop - begin for begin, stop in self.latest.bubbles)
        costs = self.known.describe()
        if self.store is not None:
            costs += f", rows on disk read at {self.store.describe()}"
        return (
            f"{costs}; latest step: {self.again[0]} of {self.again[1]} keys and "
            f"values projected again, {self.whole[0]} of {self.whole[1]} blocks computed whole, "
            f"{1e3 * self.latest.end:.1f} ms predicted, of which "
            f"{1e3 * waits:.1f} ms wait for loads"
        )

    # One step.

    def _planned(
        self, steps: Sequence[AnyStep], begun: Sequence[BegunEdit | None], start: Start
    ) -> list[AnyStep]:
        """Return the steps with plans; those that can't be planned are returned unchanged.

        Steps whose sites are chosen while they run form batches of their own, which have no plan.
        """
        planned = list(steps)
        known = [n for n, step in enumerate(steps) if not chooses(step)]
        plain = [without_plan(steps[n]) for n in known]
        for program, places, members in self.denoiser.groups(plain):
            own, numbers = [plain[n] for n in places], [known[n] for n in places]
            costs = self._costs(program, members, own)
            if costs is None or not any(map(is_fixed, own)):
                continue
            found = self._plan_group(
                program, members, own, [begun[n] for n in numbers], costs, start
            )
            if found is None:
                continue
            for number, step in zip(numbers, found, strict=True):
                planned[number] = step
            assert self.latest is not None, "a group was planned"
            start = self.latest.carry()
        return planned

    def _plan_group(
        self,
        program: Program,
        members: Sequence[Member],
        steps: Sequence[AnyStep],
        begun: Sequence[BegunEdit | None],
        costs: Costs,
        start: Start,
    ) -> list[AnyStep] | None:
        free = [self._choices_of(program, member, costs) for member in members]
        kept = [b if b and b.choices is own else None for b, own in zip(begun, free, strict=True)]
        room = self._room(members)
        try:
            if any(kept):
                made = self._beside_begun(steps, free, kept, costs, room, start)
            else:
                made = self._batch_of(free, costs).plan(room, start, self.widths)
        except InputError as error:  # a block's load may exceed the staging buffer
            log.debug("a step isn't planned: %s", error)
            return None
        self.latest = later(made.timeline, costs.around)
        selections = [
            edit.selection if edit else picked
            for edit, picked in zip(kept, by_member(made), strict=True)
        ]
        self._count(free, selections)
        self._plans[program.code] = free[0], selections[0]
        found: list[AnyStep] = []
        for step, own, edit, selection in zip(steps, free, kept, selections, strict=True):
            if isinstance(step, EditStep) and is_fixed(step):
                planned = own.planned(step, selection) if edit is None else with_begun(step, edit)
                self._begun[key_of(step)] = BegunEdit(step, planned, selection, own)
                found.append(planned)
            else:
                found.append(step)
        return found

    def _beside_begun(
        self,
        steps: Sequence[AnyStep],
        free: Sequence[Choices],
        kept: Sequence[BegunEdit | None],
        costs: Costs,
        room: float,
        start: Start,
    ) -> Plan:
        """Plan a step of which some loads are begun: these edits have no choice left."""
        planned = [
            step if edit is None or not isinstance(step, EditStep) else with_begun(step, edit)
            for step, edit in zip(steps, kept, strict=True)
        ]
        [(_, _, members)] = self.denoiser.groups(planned)
        left = []
        for own, edit, member in zip(free, kept, members, strict=True):
            if edit is not None:
                pending = self.denoiser.pending(member)  # None: its loads were cancelled
                own = own.fixed(edit.selection, own.names if pending is None else pending, costs)
            left.append(own)
        blocks = blocks_of(left, costs)
        if not all(kept):
            return plan_surely(blocks, room, start, self.widths)
        picked = ((0,) * len(left),) * len(blocks)
        timeline = simulate(blocks, picked, room, start)
        return Plan(picked, timeline, timeline.end)

    # What plans are made of.

    def _costs(
        self, program: Program, members: Sequence[Member], steps: Sequence[AnyStep]
    ) -> Costs | None:
        edits = [step for step in steps if isinstance(step, EditStep) and is_fixed(step)]
        if not edits:
            return None
        return self.known.of(program, edits[0], len(find_blocks(program, members[0].sites)))

    def _choices_of(self, program: Program, member: Member, costs: Costs) -> Choices:
        """Return one member's choices in every block, cached: equal for all steps of a request."""
        key = (program.code, member.sites, member.batch, *facts_of(member), costs)
        blocks = find_blocks(program, member.sites)
        self.store = speed_of(member) or self.store
        loader = self.denoiser.loader
        copies = loader is None or loader.takes_all(member.device)
        return self._choices.find(
            key, lambda: choices_of_member(program, blocks, member, costs, copies)
        )

    def _batch_of(self, each: Sequence[Choices], costs: Costs) -> KnownBatch:
        key = tuple(map(id, each))
        return self._batches.find(key, lambda: KnownBatch(list(each), blocks_of(each, costs)))

    def _room(self, members: Sequence[Member]) -> float:
        if self.buffer_bytes is not None:
            return self.buffer_bytes
        loader = self.denoiser.loader
        return float("inf") if loader is None else loader.room(members[0].device)

    def _count(self, each: Sequence[Choices], selections: Sequence[Selection]) -> None:
        names = [
            name
            for own, selection in zip(each, selections, strict=True)
            for name in own.names_of(selection)
        ]
        menus = [menu for own in each for menu in own.menus]
        self.again = names.count(INPUT), sum(input_of(menu) is not None for menu in menus)
        self.whole = names.count(WHOLE), sum(menu[-1].name == WHOLE for menu in menus)


def plan_surely(
    blocks: Sequence[BlockTimes], room: float, start: Start, widths: Sequence[int]
) -> Plan:
    """Return a plan that projects keys and values again only if that is predicted to gain `SURE`.

    Raises InputError if a block's load exceeds the staging buffer.
    """
    found = plan(blocks, room, start, widths=widths)
    first = tuple((0,) * len(block.members) for block in blocks)
    if found.selection == first:
        return found
    try:
        timeline = simulate(blocks, first, room, start)
    except InputError:  # a load that only this selection has exceeds the buffer
        return found
    if timeline.end > found.end * (1 + SURE):
        return found
    return Plan(first, timeline, found.bound)


def key_of(step: AnyStep) -> tuple[int, int]:
    return (id(step.cache), id(step.mask)) if isinstance(step, EditStep) else (0, 0)


def without_plan(step: AnyStep) -> AnyStep:
    if isinstance(step, EditStep) and step.plan:
        return dataclasses.replace(step, plan={})
    return step


def chooses(step: AnyStep) -> bool:
    """Return True for a step whose sites are chosen while it runs."""
    return isinstance(step, EditStep) and step.choice is not None


def with_begun(step: EditStep, begun: BegunEdit) -> EditStep:
    """Return an edit with the plan that its loads were begun under."""
    return dataclasses.replace(step, plan=begun.planned.plan, cache=begun.planned.cache)


def by_member(found: Plan) -> Iterable[Selection]:
    return zip(*found.selection, strict=True)


def later(timeline: Timeline, around: float) -> Timeline:
    """Return the timeline of a step after which compute pauses, while loads may go on."""
    begin, end = timeline.computes[-1]
    last = (begin, end + around)
    return dataclasses.replace(timeline, computes=(*timeline.computes[:-1], last))


def blocks_of(each: Sequence[Choices], costs: Costs) -> tuple[BlockTimes, ...]:
    """Return the blocks of a batch with its members' choices."""
    menus = zip(*(own.menus for own in each), strict=True)
    return tuple(
        BlockTimes(of_block, fixed) for of_block, fixed in zip(menus, costs.fixed, strict=True)
    )


def alike(before: Start, made: Plan, now: Start) -> bool:
    """Return True if a plan was made for about this state of the two streams."""
    near = NEAR * made.end
    ahead = [start.compute - start.load for start in (before, now)]
    held, staged = (sum(nbytes for nbytes, _ in start.staged) for start in (before, now))
    same = abs(held - staged) <= NEAR * max(held, staged)
    return before.live == now.live and abs(ahead[0] - ahead[1]) <= near and same
