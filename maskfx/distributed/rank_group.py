"""RankGroup: computes the steps of one denoiser in several processes, its ranks.

The ranks hold the denoiser, over weights in shared memory or with a copy on a device, recordings
and adapters, and read rows that steps replace where this process writes them. A step may run on any
of them, in any number, and steps on disjoint sets of ranks run at the same time. If a rank dies or
doesn't answer, the step runs again on the others; if none is left or a step can't be split, it runs
in this process. With `inductor=True` a process beside the ranks compiles their graphs
(`code_compiler.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from maskfx.compiler.rank_twins import SplitProgram
from maskfx.distributed.batch import RankBatch
from maskfx.distributed.divider import Divider
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.late_runs import Division, LateRuns, Members, cut_evenly
from maskfx.distributed.messages import PartRequest, PartResult, WholeResult
from maskfx.distributed.processes import RankFailure, RankProcesses
from maskfx.distributed.rank_pool import Lease, NoRanks, RankPool
from maskfx.distributed.rank_step import RankPrograms, joined
from maskfx.distributed.ranks import Ranks
from maskfx.distributed.ranks_in_place import NotWritten, RanksInPlace
from maskfx.distributed.requests import note_code, part_requests
from maskfx.distributed.restarts import Restarts
from maskfx.distributed.step_runs import ATTEMPTS, StepRuns
from maskfx.distributed.unsupported import why_unsupported
from maskfx.errors import InputError
from maskfx.ir.programs.head_sources import AttentionWays
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.execution.executor import Split
from maskfx.runtime.hardware.cpu_threads import computing_with
from maskfx.runtime.step_executor import SharedAdapters
from maskfx.runtime.steps import AnyStep, ValidatedCall, late_exchange
from maskfx.runtime.transport.tensor_transport import Unsendable

log = logging.getLogger(__name__)

LATE_BYTES = 1 << 30
ADAPTER_BYTES = 1 << 30


class RankGroup:
    """Computes batches on ranks; pass it to `CompiledDenoiser.step` as `split`.

    Args:
        denoiser: The denoiser; weights on a CPU are moved to memory that the ranks share.
        ranks: The number of processes, which start at the first step; `Ranks` also has their
            devices and what they exchange with.
        threads: The number of threads of each.
        waits: The time that a step, an exchange and a start may take.
        costs: What exchanges and loads cost; by default the ranks measure it when they start.
        late_bytes: The bytes of others' rows that each rank may hold between the steps of requests
            with late exchanges. The steps of a request without room wait.
        restarts: Limits how many processes are started in place of failed ones; by default 8 in an
            hour.
        adapter_bytes: The bytes of adapters that each rank may keep between steps. A rank gets the
            adapters of the members that it has a part of, once, and drops those used least
            recently.
    """

    def __init__(
        self,
        denoiser: CompiledDenoiser,
        ranks: int | Ranks = 2,
        threads: int = 1,
        waits: Waits | None = None,
        costs: LinkCosts | None = None,
        late_bytes: int = LATE_BYTES,
        restarts: Restarts | None = None,
        adapter_bytes: int = ADAPTER_BYTES,
    ) -> None:
        ranks = Ranks.of(ranks)
        if (why := why_unsupported(denoiser)) is not None:
            raise InputError(f"RankGroup: {type(denoiser.module).__name__} {why}")
        self.denoiser, self.given_costs = denoiser, costs
        denoiser.reads_apart = True
        waits, restarts = waits or Waits(), restarts or Restarts()
        self.pool = RankPool(denoiser, ranks, threads, waits, restarts, adapter_bytes)
        self.failures = 0  # steps that ran again because a rank failed
        self.computed_here = 0  # batches computed in this process instead
        self.last: list[PartResult | WholeResult | None] = []  # by rank, of the last batch
        self.joined = True  # border rows travel with moments, unless members are late
        self.late, self.late_bytes = LateRuns(self.free_ended), late_bytes
        self._programs = RankPrograms(denoiser.settings)
        self.divider = Divider(self._programs)
        self._runs = StepRuns(self)
        self._choices: dict[tuple[int, ...], RanksInPlace] = {}
        self._sets: dict[tuple[int, ...], RankSet] = {}  # one each, so that their steps keep order
        self._here = threading.Lock()  # one step is computed in this process at a time

    joint = False  # it computes steps of one denoiser
    reads_values = False  # the ranks compute what steps make of their arguments

    # What computes a batch.

    def __call__(
        self,
        program: Program,
        recording: bool,
        frame: Frame,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
    ) -> Any:
        """Compute a batch on all ranks."""
        return self.compute(program, recording, frame, calls, members)

    def on(
        self,
        ranks: int | Sequence[int],
        partition: Partition | None = None,
        attention: AttentionWays | None = None,
    ) -> RankSet:
        """Return what computes a batch on some of the ranks, to pass as `split`.

        Args:
            ranks: Their number, or their numbers in the order of the partition's shares.
            partition: The shares of each member in the order of the batch; by default they follow
                from predicted costs.
            attention: How the ranks attend, see `split_program`; by default this follows too.
        """
        chosen = tuple(range(ranks) if isinstance(ranks, int) else ranks)
        if partition is not None or attention is not None:
            return RankSet(self, chosen, partition, attention)
        return self._sets.setdefault(chosen, RankSet(self, chosen))

    def run(
        self,
        denoiser: CompiledDenoiser,
        steps: Sequence[AnyStep],
        shared: SharedAdapters | None = None,
    ) -> list[Any]:
        """Compute steps on all ranks, as a `StepExecutor` does: whole members first."""
        # what this thread computes leaves the cores to the ranks
        with computing_with(1), self.in_place(None).step(len(steps), shared):
            return self._runs.run(steps, None, self._dividing)

    def run_on(
        self, own: RankSet, steps: Sequence[AnyStep], shared: SharedAdapters | None
    ) -> list[Any]:
        """Compute steps on some of the ranks."""
        with computing_with(1), self.in_place(own.ranks).step(len(steps), shared):
            if own.divides:
                return self.denoiser.step(steps, split=own)
            if own.ranks is not None and len(own.ranks) == 1:
                return self._runs.on_one(steps, own.ranks, lambda: own)
            return self._runs.run(steps, own.ranks, partial(self._dividing, ranks=own.ranks))

    def _dividing(self, partition: Partition | None, ranks: tuple[int, ...] | None = None) -> Split:
        """Return what divides a batch by these shares."""
        if ranks is None and partition is None:
            return self
        if ranks is None:
            return RankSet(self, None, partition)
        return self.on(ranks, partition)

    def here(self) -> AbstractContextManager[object]:
        """Let one step at a time be computed in this process."""
        return self._here

    def in_place(self, ranks: Sequence[int] | None) -> RanksInPlace:
        """Return what decides which adapters a set of ranks has in its weights."""
        key = () if ranks is None else tuple(ranks)
        name = f"the ranks {', '.join(map(str, key))}" if key else "all ranks"
        return self._choices.setdefault(key, RanksInPlace(self.denoiser, name))

    def compute(
        self,
        program: Program,
        recording: bool,
        frame: Frame,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
        ranks: Sequence[int] | None = None,
        partition: Partition | None = None,
        attention: AttentionWays | None = None,
    ) -> object:
        """Compute a batch, within a step of the denoiser; None if it can't be computed on ranks."""
        given = self.denoiser, program, recording, frame, calls, members
        own = self.in_place(ranks)
        for _ in range(ATTEMPTS):
            batch = RankBatch.of(*given, bool(own.written))
            if not self._divides(batch):
                break
            try:
                return self._on_ranks(batch, ranks, partition, attention, own)
            except NotWritten as why:
                own.refuse(str(why))
            except (NoRanks, RankFailure, Unsendable) as why:
                if not self.repeats(why):
                    break
            finally:
                with self.denoiser.unlocked():
                    self.free_ended()
        self.computed_here += 1
        return None

    def repeats(self, why: Exception) -> bool:
        """Note why ranks didn't compute a step; return True if it may succeed on others."""
        if isinstance(why, RankFailure):
            self.failures += 1
            self.late.forget()
            log.warning("a step of %s runs again: %s", self._name, why)
            return True
        log.info("a step of %s runs in this process: %s", self._name, why)
        return False

    def partition(self, program: Program, members: Sequence[Member], ranks: int) -> Partition:
        """Return the shares of a batch's members for which the predicted step is the quickest.

        Where exchanges would cost more than they save, members stay whole, on one rank each.
        """
        return self.divider.predicted(program, members, ranks, self.costs)

    @property
    def costs(self) -> LinkCosts:
        """What exchanges and loads cost: as given, else as measured when the ranks started."""
        if self.given_costs is not None:
            return self.given_costs
        ranks = self.pool.ranks
        return (None if ranks is None else ranks.costs) or LinkCosts()

    @property
    def _name(self) -> str:
        return type(self.denoiser.module).__name__

    def _divides(self, batch: RankBatch) -> bool:
        """Return True if the ranks can compute a batch."""
        why = self._programs.refusal(batch.program)
        if why:
            log.info("steps of %s can't be split: %s", self._name, why)
        return not why

    # Requests to the ranks. The denoiser is unlocked while this thread waits for others.

    def _on_ranks(
        self,
        batch: RankBatch,
        ranks: Sequence[int] | None,
        partition: Partition | None,
        attention: AttentionWays | None,
        own: RanksInPlace,
    ) -> Any:
        with self.denoiser.unlocked(), self.pool.lease(ranks) as lease:
            written = own.write(lease, self.pool)
            with self.denoiser.locked():
                partition = self._partition(batch, len(lease.ranks), partition)
                late, divisions = self._late(batch, lease, partition)
                way = "gathered" if any(late) else attention or self._attention(batch, partition)
                code, changed = batch.program.code, batch.changed
                part = PartRequest(
                    [],
                    code,
                    changed,
                    batch.single,
                    batch.recording,
                    batch.emits,
                    partition,
                    lease.ranks,
                    0,
                    way,
                    self.joined and not any(late),
                    late,
                    self.late_bytes,
                    written=written,
                )
                requests = part_requests(self.pool, lease, part, batch.steps, self.late.alive)
            found = lease.processes.ask(requests)
            note_code(self.pool, found.values(), batch.steps, batch.single)
            self.late.note(batch.steps, late, divisions, list(found.values()))
        chosen = next(result.part.choices for result in found.values())
        if chosen is not None:
            chosen.repeat(batch.program.interface, batch.members)
        self.last = [found.get(number) for number in lease.ranks]
        seconds = [0.0 if one is None else one.seconds for one in self.last]
        self.divider.note(batch.plain, batch.members, partition, seconds, not any(late))
        layouts = [
            self._programs.layout(batch.frame.layout, partition, place)
            for place in range(len(lease.ranks))
        ]
        parts = [found[number].part if number in found else None for number in lease.ranks]
        return joined(batch.program, batch.recording, layouts, parts)

    def _partition(self, batch: RankBatch, ranks: int, given: Partition | None) -> Partition:
        """Return the shares of a batch's members: as given, if that is for this number of ranks."""
        if given is not None and (given.ranks, len(given.shares)) == (ranks, len(batch.members)):
            return given
        # with given costs a step's division doesn't depend on earlier steps
        find = self.divider.chosen if self.given_costs is None else self.divider.predicted
        found = find(batch.plain, batch.expected[1], ranks, self.costs)
        return cut_evenly(found, list(map(late_exchange, batch.steps)))

    def _late(
        self, batch: RankBatch, lease: Lease, partition: Partition
    ) -> tuple[Members, list[Division]]:
        """Return how the exchanges of each member are late, and how the members are divided."""
        split = self._programs.split(batch.program, joined=False)
        assert isinstance(split, SplitProgram), split
        sent = batch.program.code, split.recorded if batch.recording else split.exchanges
        ranks = [lease.processes.all[number] for number in lease.ranks]
        return self.late.choose(batch.steps, batch.members, partition, ranks, sent)

    def _attention(self, batch: RankBatch, partition: Partition) -> AttentionWays:
        """Return the way of each attention for which the predicted step is the quickest."""
        given = batch.plain, *batch.expected, partition, self.costs
        return self.divider.attention_ways(*given)

    def free_ended(self) -> None:
        """Let ranks that are free now free the rows of requests that have ended.

        The others do so before their next step.
        """
        with self.pool.lease_now(lambda ranks: list(self._ended(ranks, ranks.alive))) as lease:
            if lease is not None:
                try:
                    lease.processes.end_runs(self._ended(lease.processes, lease.ranks))
                except (RankFailure, Unsendable) as why:
                    self.late.forget()
                    log.warning("ranks of %s: %s", self._name, why)

    def _ended(self, ranks: RankProcesses, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return, by rank, the requests that have ended and whose rows it may hold."""
        alive = self.late.alive
        runs = {number: tuple(ranks.all[number].runs - alive) for number in numbers}
        return {number: own for number, own in runs.items() if own}

    def stop(self) -> None:
        """End the ranks; a step in flight and later ones run in this process."""
        self.pool.stop()


class RankSet:
    """Computes batches, or whole steps, on some ranks of a group, or on all (None)."""

    def __init__(
        self,
        group: RankGroup,
        ranks: tuple[int, ...] | None,
        partition: Partition | None = None,
        attention: AttentionWays | None = None,
    ) -> None:
        self.group, self.ranks = group, ranks
        self.partition, self.attention = partition, attention

    joint = False
    reads_values = False

    @property
    def divides(self) -> bool:
        """Whether it was given how to divide a batch."""
        return self.partition is not None or self.attention is not None

    def run(
        self,
        denoiser: CompiledDenoiser,
        steps: Sequence[AnyStep],
        shared: SharedAdapters | None = None,
    ) -> list[Any]:
        """Compute steps, as a `StepExecutor` does: on one rank as a whole, on several divided."""
        return self.group.run_on(self, steps, shared)

    def __call__(
        self,
        program: Program,
        recording: bool,
        frame: Frame,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
    ) -> Any:
        given = self.ranks, self.partition, self.attention
        return self.group.compute(program, recording, frame, calls, members, *given)
