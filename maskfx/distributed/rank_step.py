"""RankPrograms: runs one rank's part of a batch; and what joins the ranks' parts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maskfx import ops
from maskfx.compiler.fuse import fused
from maskfx.compiler.rank_twins import SplitProgram, split_program
from maskfx.config import Settings
from maskfx.distributed.late_group import ExchangeOrigins
from maskfx.distributed.layout import RankLayout
from maskfx.distributed.partition import Partition
from maskfx.ir.lru import LruCache
from maskfx.ir.program import Program
from maskfx.ir.sources import Cached
from maskfx.ops.exchange import Group, within
from maskfx.runtime.backends.eager import Runner
from maskfx.runtime.backends.graph_function import Run
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member

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
    """Runs the parts of ranks; keeps split programs, runners, layouts and frames between steps."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.layouts: LruCache[Hashable, RankLayout] = LruCache(FRAMES)
        self.frames: LruCache[Hashable, Frame] = LruCache(FRAMES)
        self.received: LruCache[Hashable, ExchangeOrigins] = LruCache(FRAMES)
        self._splits: dict[tuple[str, bool], SplitProgram | str] = {}
        self._runners: dict[tuple[str, bool, bool], Run] = {}

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

    def layout(self, whole: Layout, partition: Partition, rank: int) -> RankLayout:
        """Return where a rank's rows of a batch lie."""
        return self.layouts.find(
            (whole.sites, whole.batches, partition, rank),
            lambda: RankLayout(whole.sites, whole.batches, partition=partition, rank=rank),
        )

    def _frame(self, split: SplitProgram, layout: RankLayout, device: torch.device) -> Frame:
        key = id(split), layout.sites, layout.batches, layout.partition, layout.rank, device
        return self.frames.find(key, lambda: Frame(split.program.interface, layout, device))

    def origins(
        self, program: Program, recording: bool, whole: Layout, partition: Partition, rank: int
    ) -> ExchangeOrigins:
        """Return which member each row that a rank receives belongs to."""
        split = self.split(program, False)
        assert isinstance(split, SplitProgram), split
        layout = self.layout(whole, partition, rank)
        return self.received.find(
            (id(split), recording, id(layout)),
            lambda: ExchangeOrigins(layout, split.recorded if recording else split.exchanges),
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
        layout = self.layout(whole.layout, partition, group.rank)
        frame = self._frame(split, layout, whole.device)
        members = [
            member if partition.has_part(number, group.rank) else replace(member, cache=None)
            for number, member in enumerate(members)
        ]  # a rank may lack the rows of members that it has no part of
        key = program.code, keys_by_rank, recording
        if key not in self._runners:
            own = split.program
            module = own.recording if recording else own.module
            module = fused(module, pointwise=ops.has_kernels(frame.device))
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
    layouts: Sequence[RankLayout],
    parts: Sequence[RankPart | None],
) -> object:
    """Return what the graph of the whole batch would return, from the ranks' parts.

    Args:
        program: The whole program.
        recording: Whether the parts have what a recording keeps.
        layouts: Where the ranks' rows lie.
        parts: The ranks' parts; None for a rank without a share.
    """
    present = [(own, p) for own, p in zip(layouts, parts, strict=True) if p is not None]
    there = [own for own, _ in present]
    outputs = []
    for i, lane in enumerate(program.interface.outputs):
        assert lane is not None
        values = [part.outputs[i] for _, part in present]
        if lane.kind == "rows":
            outputs.append(join_rows(lane.segments, there, values))
        else:
            outputs.append(join_requests(lane.kind, there, values))
    if not recording:
        return tuple(outputs)
    emitted = [
        join_rows(tap.segments, there, [p.emitted[i] for _, p in present])
        for i, tap in enumerate(program.interface.taps.values())
    ]
    return tuple(outputs), tuple(emitted)


def join_rows(
    segments: tuple[str, ...], layouts: Sequence[RankLayout], values: Sequence[Tensor]
) -> Tensor:
    total = layouts[0].starts(segments)[1]
    whole = values[0].new_empty(total, *values[0].shape[1:])
    for layout, rows in zip(layouts, values, strict=True):
        whole[layout.positions(segments, layout.rank).to(rows.device)] = rows
    return whole


def join_requests(kind: str, layouts: Sequence[RankLayout], values: Sequence[Tensor]) -> Tensor:
    """Return each request's value from a rank that has a part of it."""
    if kind == "const":
        return values[0]
    ranks = {own.rank: value for own, value in zip(layouts, values, strict=True)}
    first = layouts[0]
    owners = [m for m, _ in first.owners()]
    return torch.stack([ranks[first.partition.holder(m)][n] for n, m in enumerate(owners)])
