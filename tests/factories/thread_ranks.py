"""ThreadRanks: ranks that are threads of this process, over one copy of everything.

They compute what processes compute, with the same exchanges, and have no process to start: for
tests, and to find out what a split exchanges and loads.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from torch import Tensor

from maskfx.config import Settings
from maskfx.distributed.division.layout import RankLayout
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.exchanges.late_group import HeldRows, LateGroup
from maskfx.distributed.late_runs import LateRuns
from maskfx.distributed.messages import PartResult
from maskfx.distributed.rank_step import RankPart, RankPrograms, joined
from maskfx.ir.programs.head_sources import AttentionWays
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.sites.stretch_sites import StretchSites


class Boxes:
    """The messages in flight, by sender, reader and number of the exchange."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], queue.Queue[Tensor]] = {}
        self._lock = threading.Lock()

    def of(self, sender: int, reader: int, number: int) -> queue.Queue[Tensor]:
        with self._lock:
            return self._boxes.setdefault((sender, reader, number), queue.Queue())


class ThreadGroup:
    """One rank's view of the threads; counts the bytes that it sends."""

    def __init__(self, rank: int, boxes: Boxes, seconds: float) -> None:
        self.rank, self.sent = rank, 0
        self._boxes, self._seconds = boxes, seconds

    def exchange(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> None:
        self.start(outgoing, incoming, number).wait()

    def start(
        self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], number: int
    ) -> Receipt:
        for other, value in outgoing.items():
            self.sent += value.nbytes
            self._boxes.of(self.rank, other, number).put(value)
        boxes = {other: self._boxes.of(other, self.rank, number) for other in incoming}
        return Receipt(number, boxes, dict(incoming), self._seconds)


class Receipt:
    """An exchange that was begun."""

    def __init__(
        self,
        number: int,
        boxes: dict[int, queue.Queue[Tensor]],
        incoming: dict[int, Tensor],
        seconds: float,
    ) -> None:
        self._number, self._boxes = number, boxes
        self._incoming, self._seconds = incoming, seconds

    def wait(self) -> None:
        for other, value in self._incoming.items():
            try:
                value.copy_(self._boxes[other].get(timeout=self._seconds))
            except queue.Empty:
                text = f"rank {other} sent nothing in exchange {self._number}"
                raise TimeoutError(text) from None
        self._incoming.clear()


def for_members(partition: Partition, count: int) -> Partition:
    """Return the shares in turn; a step with a list of samples has more members than one."""
    own = cycle(zip(partition.shares, partition.texts, strict=True))
    return Partition(*zip(*islice(own, count), strict=True))


def copied(frame: Frame, members: Sequence[Member]) -> tuple[Frame, list[Member]]:
    """Return a batch whose stretches a rank chooses for itself."""
    choices = {id(m.choice): pickle.loads(pickle.dumps(m.choice)) for m in members}
    found = []
    for member in members:
        sites = member.sites
        assert sites.mask is not None
        own = StretchSites(sites.pyramid, sites.sizes, sites.mask)
        found.append(replace(member, sites=own, choice=choices[id(member.choice)]))
    layout = Layout(tuple(m.sites for m in found), tuple(m.batch for m in found))
    whole = Frame(frame.interface, layout, frame.device, code=frame.code, by_stretch=True)
    return whole, found


class ThreadRanks:
    """Splits batches over threads; pass it to `CompiledDenoiser.step` as `split`.

    Args:
        settings: How the denoiser is compiled.
        partition: The ranks' shares of each member of the batches that follow.
        attention: See `maskfx.compiler.rank_twins.split_program`.
        seconds: The time that an exchange may take.
    """

    def __init__(
        self,
        settings: Settings,
        partition: Partition,
        attention: AttentionWays = "gathered",
        seconds: float = 20,
    ) -> None:
        self.partition, self.attention, self.seconds = partition, attention, seconds
        self.programs = RankPrograms(settings)
        self.sent: list[int] = []  # bytes by rank, of the last batch
        self.loaded: list[int] = []
        self.layouts: list[RankLayout] = []
        self.batches = 0  # batches that were split
        self.late = LateRuns(lambda: None)
        self.ranks: tuple[object, ...] = ()  # what stands for the processes
        self.held: dict[int, HeldRows] = {}  # by rank
        self.late_bytes = 1 << 30

    def __call__(
        self,
        program: Program,
        recording: bool,
        frame: Frame,
        calls: Sequence[Any],
        members: Sequence[Member],
    ) -> Any:
        """Compute a batch; return None if its program can't be split."""
        split = self.programs.split(program, joined=False)
        if isinstance(split, str):
            return None
        partition = for_members(self.partition, len(members))
        steps = [call.step for call in calls]
        sent = program.code, split.recorded if recording else split.exchanges
        late, divisions = self.late.choose(steps, members, partition, self.ranks, sent)
        attention: AttentionWays = "gathered" if any(late) else self.attention
        boxes = Boxes()
        for other in range(partition.ranks):
            self.programs.layout(frame.layout, partition, other)
        groups = [ThreadGroup(rank, boxes, self.seconds) for rank in range(partition.ranks)]
        around: list[Any] = list(groups)
        for rank, group in enumerate(groups):
            held = self.held.setdefault(rank, HeldRows(self.late_bytes))
            held.drop(set(held.runs) - self.late.alive)
            if any(late):
                origins = self.programs.origins(program, recording, frame, partition, rank)
                around[rank] = LateGroup(group, late, origins, held)

        def part(rank: int) -> RankPart | None:
            if not any(partition.has_part(m, rank) for m in range(len(members))):
                return None
            whole, own = copied(frame, members) if frame.by_stretch else (frame, members)
            given = program, recording, whole, own, partition, around[rank], attention
            return self.programs.run(*given, not any(late))

        with ThreadPoolExecutor(partition.ranks) as pool:
            running = [pool.submit(part, rank) for rank in range(partition.ranks)]
        errors = [error for one in running if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, TimeoutError)):
            raise error  # what made the others wait in vain first
        parts = [one.result() for one in running]
        self.batches += 1
        chosen = next(found.choices for found in parts if found is not None)
        if chosen is not None:
            chosen.repeat(program.interface, members)
        if any(late):
            present = [one for one, found in zip(around, parts, strict=True) if found is not None]
            kept = [PartResult(parts[one.rank], 0, 0.0, one.kept()) for one in present]
            for one in present:
                one.finish()
            self.late.note(steps, late, divisions, kept)
        self.sent = [group.sent for group in groups]
        self.loaded = [0 if found is None else found.loaded for found in parts]
        self.layouts = [
            self.programs.layout(frame.layout, partition, rank) for rank in range(partition.ranks)
        ]
        return joined(program, recording, self.layouts, parts)
