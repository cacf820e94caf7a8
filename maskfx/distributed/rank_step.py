"""RankPrograms: runs one rank's part of a batch; and what joins the ranks' parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from maskfx import ops
from maskfx.compiler.fused import fused
from maskfx.compiler.split import SplitProgram, split_program
from maskfx.config import Settings
from maskfx.distributed.frame import RankFrame
from maskfx.distributed.partition import Partition
from maskfx.ir.lru import LruCache
from maskfx.ir.program import Cached, Program
from maskfx.ops.exchange import Group, within
from maskfx.runtime.backends.eager import Fetch, Runner
from maskfx.runtime.batch.frame import Frame, Member

FRAMES = 32  # frames kept: batches whose tables may be reused


@dataclass(frozen=True)
class RankPart:
    """What one rank computed of a batch.

    Args:
        outputs: The program's outputs: the rank's rows, or a value per request.
        emitted: The rank's rows of what a recording keeps.
        loaded: The bytes of cached rows that it read.
    """

    outputs: tuple[Tensor, ...]
    emitted: tuple[Tensor, ...] = ()
    loaded: int = 0


class RankPrograms:
    """Runs the parts of ranks; keeps split programs, runners and frames between steps."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.frames: LruCache[Hashable, RankFrame] = LruCache(FRAMES)
        self._splits: dict[tuple[str, bool], SplitProgram | str] = {}
        self._runners: dict[tuple[str, bool, bool], Callable[[Fetch], Any]] = {}

    def split(self, program: Program, keys_by_rank: bool) -> SplitProgram | str:
        """Return a program's graphs for a rank, or why they can't be split."""
        key = program.code, keys_by_rank
        if key not in self._splits:
            self._splits[key] = split_program(program, keys_by_rank)
        return self._splits[key]

    def refusal(self, program: Program, keys_by_rank: bool) -> str:
        """Return why a program can't be split; "" if it can."""
        found = self.split(program, keys_by_rank)
        return found if isinstance(found, str) else ""

    def frame(
        self, split: SplitProgram, whole: Frame, partition: Partition, rank: int
    ) -> RankFrame:
        """Return a rank's frame of a batch."""
        interface = split.program.interface
        key = id(split), whole.sites, whole.batches, whole.device, partition, rank
        return self.frames.find(
            key,
            lambda: RankFrame(
                interface,
                whole.sites,
                whole.batches,
                whole.device,
                partition=partition,
                rank=rank,
            ),
        )

    @torch.no_grad()
    def run(
        self,
        program: Program,
        recording: bool,
        whole: Frame,
        members: Sequence[Member],
        partition: Partition,
        group: Group,
        keys_by_rank: bool = False,
    ) -> RankPart:
        """Compute a rank's part of a batch.

        Args:
            program: The whole program.
            recording: Whether to emit what a recording keeps.
            whole: The frame of the batch.
            members: The members, with the values of their inputs.
            partition: The ranks' shares.
            group: The ranks, as this one sees them.
            keys_by_rank: See `split_program`.
        """
        split = self.split(program, keys_by_rank)
        assert isinstance(split, SplitProgram), split
        frame = self.frame(split, whole, partition, group.rank)
        members = [
            member if partition.has_part(number, group.rank) else replace(member, cache=None)
            for number, member in enumerate(members)
        ]  # a rank may lack the rows of members that it has no part of
        key = program.code, keys_by_rank, recording
        if key not in self._runners:
            own = split.program
            module = own.recording if recording else own.module
            if ops.has_kernels(frame.device):
                module = fused(module)
            self._runners[key] = Runner(module, self.settings.prepack and not recording)
        with within(group):
            result = self._runners[key](frame.fetch(members))
        outputs, emitted = result if recording else (result, ())
        names = [n for n, s in split.program.interface.inputs.items() if isinstance(s, Cached)]
        loaded = sum(frame.loaded_bytes(members, names).values())
        return RankPart(tuple(outputs), tuple(emitted), loaded)


def joined(
    program: Program,
    recording: bool,
    frames: Sequence[RankFrame],
    parts: Sequence[RankPart | None],
) -> Any:
    """Return what the graph of the whole batch would return, from the ranks' parts.

    Args:
        program: The whole program.
        recording: Whether the parts have what a recording keeps.
        frames: The ranks' frames.
        parts: The ranks' parts; None for a rank without a share.
    """
    present = [(f, p) for f, p in zip(frames, parts, strict=True) if p is not None]
    outputs = []
    for i, lane in enumerate(program.interface.outputs):
        assert lane is not None
        values = [part.outputs[i] for _, part in present]
        if lane.kind == "rows":
            outputs.append(join_rows(lane.segments, [f for f, _ in present], values))
        else:
            outputs.append(join_requests(lane.kind, present[0][0], [f for f, _ in present], values))
    if not recording:
        return tuple(outputs)
    emitted = [
        join_rows(tap.segments, [f for f, _ in present], [p.emitted[i] for _, p in present])
        for i, tap in enumerate(program.interface.taps.values())
    ]
    return tuple(outputs), tuple(emitted)


def join_rows(
    segments: tuple[str, ...], frames: Sequence[RankFrame], values: Sequence[Tensor]
) -> Tensor:
    total = frames[0].starts(segments)[1]
    whole = values[0].new_empty(total, *values[0].shape[1:])
    for frame, rows in zip(frames, values, strict=True):
        whole[frame.positions(segments, frame.rank).to(rows.device)] = rows
    return whole


def join_requests(
    kind: str, first: RankFrame, frames: Sequence[RankFrame], values: Sequence[Tensor]
) -> Tensor:
    """Return each request's value from a rank that has a part of it."""
    if kind == "const":
        return values[0]
    ranks = {frame.rank: value for frame, value in zip(frames, values, strict=True)}
    owners = [m for m, _ in first.owners()]
    return torch.stack([ranks[first.partition.holder(m)][n] for n, m in enumerate(owners)])
