"""Divider: chooses how a batch is divided over ranks, by predicted and by measured seconds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from maskfx.compiler.rank_twins import SplitProgram
from maskfx.distributed.division.attention_ways import (
    Attention,
    attentions_of,
    quickest_ways,
)
from maskfx.distributed.division.links import LinkCosts, shared_texts
from maskfx.distributed.division.measured_steps import WHOLE, MeasuredSteps
from maskfx.distributed.division.partition import Partition, divisions
from maskfx.distributed.division.step_costs import Exchanges, exchanges_of, step_seconds
from maskfx.distributed.division.work import RankWork
from maskfx.distributed.rank_step import RankPrograms
from maskfx.ir.lru import LruCache
from maskfx.ir.programs.head_sources import WAYS, AttentionWay, AttentionWays
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.batch.rows import picked_bytes
from maskfx.runtime.cache.rows import stored_parts

Ways = dict[int, tuple[Partition, float]]
KEPT = 64  # batches whose predictions are kept
UNKNOWN = 1e-9  # seconds of a byte of a store that wasn't measured


class Divider:
    """Knows the work of members, the exchanges of programs, and what steps took.

    Args:
        programs: The split programs.
    """

    def __init__(self, programs: RankPrograms) -> None:
        self.work, self.measured = RankWork(), MeasuredSteps()
        self._programs = programs
        # by the code of a program
        self._exchanges: dict[tuple[str, AttentionWay], Exchanges] = {}
        self._attentions: dict[str, list[Attention]] = {}
        self._predicted: LruCache[Hashable, Ways] = LruCache(KEPT)
        self._chosen: LruCache[Hashable, tuple[AttentionWays, float]] = LruCache(KEPT)
        self._frames: LruCache[Hashable, Frame] = LruCache(KEPT)

    def exchanges(
        self, program: Program, member: Member, way: AttentionWay = "gathered"
    ) -> Exchanges:
        key = program.code, way
        if key not in self._exchanges:
            widths = self.work.widths(program, member)
            self._exchanges[key] = exchanges_of(self._splits(program)[way], widths)
        return self._exchanges[key]

    def refusal(self, program: Program) -> str:
        """Return why a program can't be split; "" if it can."""
        return self._programs.refusal(program)

    def exchange_counts(self, program: Program) -> dict[AttentionWay, int]:
        """Return the number of exchanges of a step by the way in which ranks attend."""
        return {way: len(split.exchanges) for way, split in self._splits(program).items()}

    def ways(
        self, program: Program, members: Sequence[Member], ranks: int, costs: LinkCosts
    ) -> Ways:
        """Return, by degree, the shares of a batch's members and the predicted seconds."""
        key = batch_of(program, members), ranks, costs, self.work.flop(costs.flop)
        return self._predicted.find(key, lambda: self._ways(program, members, ranks, costs))

    def _ways(
        self, program: Program, members: Sequence[Member], ranks: int, costs: LinkCosts
    ) -> Ways:
        work = [self.work.of(program, member) for member in members]
        gathered, exchanges = self._splits(program)["gathered"], self.exchanges(program, members[0])
        found: Ways = {}
        flop = self.work.flop(costs.flop)
        for shares in divisions([one.total for one in work], ranks):
            texts = shared_texts(gathered, members, work, shares, costs, flop)
            way = replace(shares, texts=texts)
            seconds = step_seconds(exchanges, members, work, way, costs, flop)
            seconds -= self._quickest(program, None, members, way, costs)[1]
            found.setdefault(degree_of(way), (way, seconds))
        return found

    def predicted(
        self, program: Program, members: Sequence[Member], ranks: int, costs: LinkCosts
    ) -> Partition:
        """Return the shares for which the predicted step is the quickest."""
        ways = self.ways(program, members, ranks, costs).values()
        return min(ways, key=lambda way: way[1])[0]

    def chosen(
        self, program: Program, members: Sequence[Member], ranks: int, costs: LinkCosts
    ) -> Partition:
        """Return the shares for which the step is the quickest, as far as steps were measured."""
        ways = self.ways(program, members, ranks, costs)
        seconds = {degree: predicted for degree, (_, predicted) in ways.items()}
        kind, flops = self._kind(program, members, ranks)
        return ways[self.measured.best(kind, flops, seconds)][0]

    def attention_ways(
        self,
        program: Program,
        frame: Frame,
        members: Sequence[Member],
        partition: Partition,
        costs: LinkCosts,
    ) -> AttentionWays:
        """Return the way of each attention for which a batch is predicted to be the quickest."""
        return self._quickest(program, frame, members, partition, costs)[0]

    def _quickest(
        self,
        program: Program,
        frame: Frame | None,
        members: Sequence[Member],
        partition: Partition,
        costs: LinkCosts,
    ) -> tuple[AttentionWays, float]:
        """Return the ways of attentions, and the seconds that they save against gathered keys."""
        splits = self._splits(program)
        if not any(partition.cut) or len(splits) == 1:
            return "gathered", 0.0
        if program.code not in self._attentions:
            widths = self.work.widths(program, members[0])
            self._attentions[program.code] = attentions_of(splits, widths)
        flop, batch = self.work.flop(costs.flop), batch_of(program, members)
        found = self._attentions[program.code]
        whole = frame or self._frames.find(batch, lambda: frame_of(program, members))
        loads = [load_seconds(whole, members, one.cached, costs) for one in found]

        def quickest() -> tuple[AttentionWays, float]:
            work = [self.work.of(program, member) for member in members]
            return quickest_ways(found, loads, members, work, partition, costs, flop)

        return self._chosen.find((batch, partition, costs, flop, tuple(loads)), quickest)

    def note(
        self,
        program: Program,
        members: Sequence[Member],
        partition: Partition,
        seconds: Sequence[float],
        waited: bool,
    ) -> None:
        """Note the seconds that each rank took; 0 for a rank without a share.

        Args:
            program: The program.
            members: The members of the batch.
            partition: The ranks' shares of them.
            seconds: What each rank took.
            waited: Whether the ranks waited for each other in all exchanges.
        """
        work = [self.work.of(program, member) for member in members]
        self.work.note(work, partition, seconds)
        if waited:
            kind, flops = self._kind(program, members, partition.ranks)
            self.measured.note(kind, flops, degree_of(partition), max(seconds))

    def _kind(
        self, program: Program, members: Sequence[Member], ranks: int
    ) -> tuple[Hashable, float]:
        flops = sum(self.work.of(program, member).total for member in members)
        return (program.code, len(members), ranks), flops

    def _splits(self, program: Program) -> dict[AttentionWay, SplitProgram]:
        """Return the split programs of the ways that differ from gathered keys, and of these."""
        found: dict[AttentionWay, SplitProgram] = {}
        for way in WAYS:
            split = self._programs.split(program, way)
            if isinstance(split, SplitProgram) and (way == "gathered" or split.attends(way)):
                found[way] = split
        assert "gathered" in found, self._programs.refusal(program)
        return found


def batch_of(program: Program, members: Sequence[Member]) -> Hashable:
    """Return what the predicted costs of a batch follow from."""
    return program.code, tuple((member.sites, member.batch) for member in members)


def frame_of(program: Program, members: Sequence[Member]) -> Frame:
    """Return the frame of a batch of which only the sites count."""
    layout = Layout(tuple(m.sites for m in members), tuple(m.batch for m in members))
    return Frame(program.interface, layout, members[0].device, code=program.code)


def load_seconds(
    frame: Frame, members: Sequence[Member], names: Sequence[str], costs: LinkCosts
) -> tuple[float, float]:
    """Return the seconds in which cached rows of some inputs are read: from memory, from stores."""
    memory, stores = costs.load * sum(frame.loaded_bytes(members, names).values()), 0.0
    for name in names:
        for rows, index in frame.stored(name, members):
            parts = stored_parts(rows)
            if parts:
                line = parts[0].speed.line
                stores += picked_bytes(rows, index) * (UNKNOWN if line is None else line[1])
    return memory, stores


def degree_of(partition: Partition) -> int:
    """Return the number of ranks with a share, or `WHOLE` if no member is cut."""
    if not any(partition.cut):
        return WHOLE
    return sum(any(own[rank] for own in partition.shares) for rank in range(partition.ranks))
