"""RankGroup: computes the steps of one denoiser in several processes, its ranks.

The ranks hold the denoiser over weights in shared memory, and no request's state but recordings. A
step may run on any of them, in any number. If a rank dies or doesn't answer, the step runs again
on the others; if none is left or a step can't be split, it runs in this process.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import threading
import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from maskfx.distributed.links import LinkCosts, prefers_keys_by_rank
from maskfx.distributed.messages import PartRequest, PartResult, SentCache
from maskfx.distributed.partition import Partition, by_member
from maskfx.distributed.processes import RankFailure, Ranks, Waits
from maskfx.distributed.rank_step import RankPrograms, joined
from maskfx.errors import InputError
from maskfx.ir.lru import LruCache
from maskfx.ir.program import Program
from maskfx.runtime.batch.flops import row_flops
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.step_cache import StepCache, changed
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.sendable import can_be_sent
from maskfx.runtime.steps import AnyStep, EditStep, ValidatedCall
from maskfx.runtime.tensor_transport import Unsendable
from maskfx.runtime.weights import WeightChange, Weights

log = logging.getLogger(__name__)


class RankGroup:
    """Computes batches on ranks; pass it to `CompiledDenoiser.step` as `split`.

    Args:
        denoiser: The denoiser; its weights are moved to memory that the ranks share.
        ranks: The number of processes, which start at the first step.
        threads: The number of threads of each.
        backend: What torch.distributed exchanges with: "gloo", or "nccl" on GPUs.
        waits: The time that a step, an exchange and a start may take.
        costs: What exchanges and loads cost.
    """

    def __init__(
        self,
        denoiser: CompiledDenoiser,
        ranks: int = 2,
        threads: int = 1,
        backend: str = "gloo",
        waits: Waits | None = None,
        costs: LinkCosts | None = None,
    ) -> None:
        if type(ranks) is not int or ranks < 1:
            raise InputError(f"RankGroup: ranks={ranks!r}: give 1 process or more")
        self.denoiser, self.threads, self.backend = denoiser, threads, backend
        self.wanted = ranks
        self.waits, self.costs = waits or Waits(), costs or LinkCosts()
        self.failures = 0  # steps that ran again because a rank failed
        self.computed_here = 0  # batches computed in this process instead
        self.last: list[PartResult | None] = []  # by rank, of the last batch
        self._programs = RankPrograms(denoiser.settings)
        self._costs: LruCache[Any, float] = LruCache(256)
        self._folder = tempfile.TemporaryDirectory(prefix="maskfx-ranks-")
        self._watch = Weights(denoiser.module)
        self._sendable = type(denoiser) is CompiledDenoiser and can_be_sent(denoiser.module)
        if self._sendable:
            denoiser.share_memory()
            self._watch.restart()
        self._ranks: Ranks | None = None
        # recording -> its number
        self._numbers: MutableMapping[StepCache, int] = WeakIdKeyDictionary()
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._stopped = False

    joint = False  # it computes steps of one denoiser

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

    def on(self, ranks: int | Sequence[int], partition: Partition | None = None) -> _On:
        """Return what computes a batch on some of the ranks, to pass as `split`.

        Args:
            ranks: Their number, or their numbers in the order of the partition's shares.
            partition: The shares of each member in the order of the batch; by default they follow
                from predicted costs.
        """
        return _On(self, tuple(range(ranks) if isinstance(ranks, int) else ranks), partition)

    def run(self, denoiser: CompiledDenoiser, steps: Sequence[AnyStep]) -> list[Any]:
        """Compute steps, as a `StepExecutor` does."""
        return denoiser.step(steps, split=self)

    def compute(
        self,
        program: Program,
        recording: bool,
        frame: Frame,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
        ranks: Sequence[int] | None = None,
        partition: Partition | None = None,
    ) -> Any:
        """Compute a batch; return None if it has to be computed in this process."""
        with self._lock:
            while self._divides(program, calls) and (processes := self._started()) is not None:
                alive = range(len(processes.all))
                chosen = tuple(r for r in (alive if ranks is None else ranks) if r in alive)
                chosen = chosen or tuple(alive)
                wanted = len(chosen), len(members)
                if partition is None or (partition.ranks, len(partition.shares)) != wanted:
                    partition = self.partition(program, members, len(chosen))
                try:
                    return self._asked(
                        processes, program, recording, frame, calls, members, chosen, partition
                    )
                except Unsendable as error:
                    log.info("a step of %s runs in this process: %s", self._name, error)
                    break
                except RankFailure as failure:
                    self.failures += 1
                    log.warning("a step of %s runs again: %s", self._name, failure)
                    if not processes.recover():
                        break
            self.computed_here += 1
            return None

    def partition(self, program: Program, members: Sequence[Member], ranks: int) -> Partition:
        """Return the shares of a batch's members by their predicted costs."""
        return by_member([self._cost(program, member) for member in members], ranks)

    def _cost(self, program: Program, member: Member) -> float:
        key = program.code, member.sites, member.batch
        return self._costs.find(
            key, lambda: float(sum(row_flops(program, member.sites, member.batch).values()))
        )

    @property
    def _name(self) -> str:
        return type(self.denoiser.module).__name__

    def _divides(self, program: Program, calls: Sequence[ValidatedCall]) -> bool:
        """Return True if the ranks can compute these calls of a program."""
        if any(call.written is not None for call in calls):
            return False  # the rows that the next step reads stay in this process
        if any(call.inputs.compilation.capture.single for call in calls):
            return False  # parts of calls that run sample by sample
        if any(call.adapters is not None for call in calls):
            return False  # the ranks have no adapters
        why = self._programs.refusal(program, False)
        if why:
            log.info("steps of %s can't be split: %s", self._name, why)
        return not why

    # Processes.

    def _started(self) -> Ranks | None:
        """Return the ranks, with the weights as they are now; None if none can be had."""
        change = self._watch.change()
        if change is not WeightChange.NONE:
            self._end()  # they hold the earlier weights, or values computed from them
        if change is WeightChange.TENSORS:
            self._sendable = can_be_sent(self.denoiser.module)
            if self._sendable:
                self.denoiser.share_memory()
            self._watch.restart()
        if self._stopped or not self._sendable:
            return None
        if self._ranks is None:
            self.denoiser.save_programs(Path(self._folder.name))
            settings = replace(self.denoiser.settings, programs=self._folder.name)
            held = self.denoiser.module, settings, self.denoiser.roles, self.threads
            try:
                self._ranks = Ranks(held, self.wanted, self.backend, self.waits, self._folder.name)
            except (OSError, EOFError, Unsendable, RankFailure) as error:
                log.warning("no ranks for %s: %s", self._name, error)
                self._sendable = False
        elif len(self._ranks.all) < self.wanted:
            try:
                self._ranks.refill()
            except (OSError, Unsendable) as error:
                log.warning("a rank of %s can't be replaced: %s", self._name, error)
        return self._ranks if self._ranks is not None and self._ranks.all else None

    def _asked(
        self,
        processes: Ranks,
        program: Program,
        recording: bool,
        frame: Frame,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
        ranks: tuple[int, ...],
        partition: Partition,
    ) -> Any:
        by_rank = prefers_keys_by_rank(program, frame, members, partition, self.costs)
        if by_rank and self._programs.refusal(program, True):
            by_rank = False
        if self.denoiser.save_programs(Path(self._folder.name)):
            for process in processes.all:
                process.stale = True
        requests: dict[int, PartRequest] = {}
        for place, number in enumerate(ranks):
            if not any(partition.has_part(m, place) for m in range(len(members))):
                continue
            process = processes.all[number]
            steps = [
                self._numbered(call.step, process.known, partition.has_part(m, place))
                for m, call in enumerate(calls)
            ]
            gone = tuple(n for n in process.known if n // 2 not in self._alive())
            requests[number] = PartRequest(
                steps,
                program.code,
                recording,
                partition,
                ranks,
                place,
                by_rank,
                gone,
                process.stale,
            )
        found = processes.ask(requests)
        self.last = [found.get(number) for number in ranks]
        split = self._programs.split(program, by_rank)
        assert not isinstance(split, str)
        layouts = [
            self._programs.layout(frame.layout, partition, place) for place in range(len(ranks))
        ]
        parts = [None if one is None else one.part for one in self.last]
        return joined(program, recording, layouts, parts)

    def _alive(self) -> set[int]:
        return set(self._numbers.values())

    def _numbered(self, step: AnyStep, known: set[int], whole: bool) -> AnyStep:
        """Return the step as it is sent: a recording that is there already by its number.

        A rank without a share of the member gets the recording without its rows.
        """
        if not isinstance(step, EditStep):
            return step
        cache: StepCache = step.cache
        if cache not in self._numbers:
            self._numbers[cache] = next(self._count)
        number = 2 * self._numbers[cache] + whole
        contents = None
        if number not in known:
            contents = cache if whole else changed(cache, rows={}, stats={}, sums={})
        return replace(step, cache=SentCache(number, contents))  # type: ignore[arg-type]

    def _end(self) -> None:
        if self._ranks is not None:
            self._ranks.stop()
        self._ranks = None

    def stop(self) -> None:
        """End the ranks; a step in flight and later ones run in this process."""
        self._stopped = True
        ranks = self._ranks
        if ranks is not None:
            ranks.kill()  # a waiting step ends at once
        with self._lock:
            self._end()
        weakref.finalize(self, self._folder.cleanup)()


class _On:
    """Computes batches on some ranks of a group."""

    def __init__(
        self, group: RankGroup, ranks: tuple[int, ...], partition: Partition | None
    ) -> None:
        self.group, self.ranks, self.partition = group, ranks, partition

    def __call__(
        self,
        program: Program,
        recording: bool,
        frame: Frame,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
    ) -> Any:
        return self.group.compute(
            program, recording, frame, calls, members, self.ranks, self.partition
        )
