"""Divider: chooses how a batch is divided over ranks, by predicted and by measured seconds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from maskfx.compiler.rank_twins import SplitProgram
from maskfx.distributed.links import LinkCosts, shared_texts
from maskfx.distributed.measured_steps import WHOLE, MeasuredSteps
from maskfx.distributed.partition import Partition, divisions
from maskfx.distributed.rank_step import RankPrograms
from maskfx.distributed.step_costs import Exchanges, exchanges_of, step_seconds
from maskfx.distributed.work import RankWork
from maskfx.ir.program import Program
from maskfx.runtime.batch.member import Member

Ways = dict[int, tuple[Partition, float]]


class Divider:
    """Knows the work of members, the exchanges of programs, and what steps took.

    Args:
        programs: The split programs.
    """

    def __init__(self, programs: RankPrograms) -> None:
        self.work, self.measured = RankWork(), MeasuredSteps()
        self._programs = programs
        self._exchanges: dict[str, Exchanges] = {}  # by the code of a program

    def exchanges(self, program: Program, member: Member) -> Exchanges:
        if program.code not in self._exchanges:
            widths = self.work.widths(program, member)
            self._exchanges[program.code] = exchanges_of(self._split(program), widths)
        return self._exchanges[program.code]

    def ways(
        self, program: Program, members: Sequence[Member], ranks: int, costs: LinkCosts
    ) -> Ways:
        """Return, by degree, the shares of a batch's members and the predicted seconds."""
        work = [self.work.of(program, member) for member in members]
        split, exchanges = self._split(program), self.exchanges(program, members[0])
        found: Ways = {}
        flop = self.work.flop(costs.flop)
        for shares in divisions([one.total for one in work], ranks):
            texts = shared_texts(split, members, work, shares, costs, flop)
            way = replace(shares, texts=texts)
            seconds = step_seconds(exchanges, members, work, way, costs, flop)
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

    def _split(self, program: Program) -> SplitProgram:
        split = self._programs.split(program, False)
        assert isinstance(split, SplitProgram), split
        return split


def degree_of(partition: Partition) -> int:
    """Return the number of ranks with a share, or `WHOLE` if no member is cut."""
    if not any(partition.cut):
        return WHOLE
    return sum(any(own[rank] for own in partition.shares) for rank in range(partition.ranks))
