"""RankPrograms: runs one rank's part of a batch; and what joins the ranks' parts."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskfx import ops
from maskfx.compiler.fuse import fused
from maskfx.compiler.rank_twins import SplitProgram, split_program
from maskfx.config import Settings
from maskfx.distributed.division.layout import RankLayout
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.exchanges.late_group import ExchangeOrigins
from maskfx.distributed.read_ahead import ReadAhead, ReadBatch
from maskfx.distributed.stretch_sums import StretchChoices, StretchSums
from maskfx.ir.lru import LruCache
from maskfx.ir.programs.head_sources import AttentionWays
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Cached
from maskfx.ops.exchange import Group, within
from maskfx.runtime.backends.code_run import CodeKey, CodeRun, CodeSource
from maskfx.runtime.backends.eager import PackedWeights, Runner
from maskfx.runtime.backends.graph_function import Run
from maskfx.runtime.backends.saved_code import load_code
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.execution.replays import has_known_sizes
from maskfx.runtime.execution.stretch_steps import StretchSteps, choose_first
from maskfx.runtime.lora.calls import adapted
from maskfx.runtime.lora.stacks import StackCache
from maskfx.runtime.sites.stretch_sites import StretchSites

FRAMES = 32  # frames kept: batches whose tables may be reused
NOTHING: Mapping[int, StepCache] = {}
PROGRAMS = 32  # split programs and runners kept; adapters of other layers have other programs


@dataclass(frozen=True)
class RankPart:
    """What one rank computed of a batch.

    Args:
        outputs: The program's outputs: the rank's rows, or a value per request.
        emitted: The rank's rows of what a recording keeps; None for a tap that no member keeps.
        loaded: The bytes of cached rows that it read.
        choices: The sites of stretches, if they were chosen in the step.
    """

    outputs: tuple[Tensor, ...]
    emitted: tuple[Tensor | None, ...] = ()
    loaded: int = 0
    choices: StretchChoices | None = None


class RankPrograms:
    """Runs the parts of ranks; keeps split programs, runners, layouts and frames between steps.

    Args:
        settings: How the denoiser is compiled.
        code: Knows the code that another process compiles; None: all graphs run by operators.
    """

    def __init__(self, settings: Settings, code: CodeSource | None = None) -> None:
        self.settings, self._code = settings, code
        self.layouts: LruCache[Hashable, RankLayout] = LruCache(FRAMES)
        self.frames: LruCache[Hashable, Frame] = LruCache(FRAMES)
        self.received: LruCache[Hashable, ExchangeOrigins] = LruCache(FRAMES)
        self._splits: LruCache[Hashable, SplitProgram | str] = LruCache(PROGRAMS)
        self._runners: LruCache[Hashable, Run] = LruCache(PROGRAMS)
        self._by_stretch: LruCache[Hashable, StretchSteps] = LruCache(PROGRAMS)  # by way
        self._stacks = StackCache()
        self._packed: PackedWeights = WeakIdKeyDictionary()
        self.reads = ReadAhead()

    def split(
        self, program: Program, attention: AttentionWays = "gathered", joined: bool = True
    ) -> SplitProgram | str:
        """Return a program's graphs for a rank, or why they can't be split."""
        key = program.code, attention, joined
        return self._splits.find(key, lambda: split_program(program, attention, joined))

    def refusal(self, program: Program) -> str:
        """Return why a program can't be split; "" if it can."""
        found = self.split(program)
        return found if isinstance(found, str) else ""

    def layout(self, whole: Layout, partition: Partition, rank: int) -> RankLayout:
        """Return where a rank's rows of a batch lie."""

        def made() -> RankLayout:
            return RankLayout(whole.sites, whole.batches, partition=partition, rank=rank)

        if any(isinstance(sites, StretchSites) for sites in whole.sites):
            return made()  # its sites are those of this step alone
        return self.layouts.find((whole.sites, whole.batches, partition, rank), made)

    def _frame(self, split: SplitProgram, way: Hashable, layout: RankLayout, whole: Frame) -> Frame:
        def made() -> Frame:
            program = split.program
            return Frame(
                program.interface,
                layout,
                whole.device,
                adapters=self._stacks,
                code=program.code,
                originals=whole.originals,
                by_stretch=whole.by_stretch,
            )

        if whole.by_stretch:
            return made()
        rows = layout.sites, layout.batches, layout.partition, layout.rank
        return self.frames.find((split.program.code, way, *rows, whole.device), made)

    def drop_adapters(self, gone: Collection[int]) -> None:
        """Release the stacks with updates of these ids (of their `Layers`)."""
        self._stacks.drop(gone)
        for _, frame in self.frames.items():
            frame.drop_adapters(gone)

    def follow_weights(self) -> None:
        """Pack the weights again that were changed in place."""
        for origin, packed in self._packed.items():
            packed.follow(origin)

    def origins(
        self, program: Program, recording: bool, frame: Frame, partition: Partition, rank: int
    ) -> ExchangeOrigins:
        """Return which member each row that a rank receives belongs to."""
        split = self.split(program, joined=False)
        assert isinstance(split, SplitProgram), split
        whole, device = frame.layout, frame.device
        layout = self.layout(whole, partition, rank)
        sent = split.recorded if recording else split.exchanges
        return self.received.find(
            (program.code, recording, whole.sites, whole.batches, partition, rank, device),
            lambda: ExchangeOrigins(layout, sent, device),
        )

    def example(
        self,
        program: Program,
        whole: Frame,
        members: Sequence[Member],
        attention: AttentionWays,
        joined: bool,
    ) -> tuple[Program, list[Tensor]]:
        """Return a rank's program, and its inputs of a batch that two ranks share."""
        split = self.split(program, attention, joined)
        assert isinstance(split, SplitProgram), split
        halves = Partition(((1.0, 1.0),) * len(members))
        layout = self.layout(whole.layout, halves, 0)
        frame = self._frame(split, (attention, joined), layout, whole)
        return split.program, frame.inputs(members)

    @torch.no_grad()
    def run(
        self,
        program: Program,
        recording: bool,
        whole: Frame,
        members: Sequence[Member],
        partition: Partition,
        group: Group,
        attention: AttentionWays = "gathered",
        joined: bool = True,
        then: Mapping[int, StepCache] = NOTHING,
    ) -> RankPart:
        """Compute a rank's part of a batch.

        Args:
            program: The whole program.
            recording: Whether to emit what a recording keeps.
            whole: The frame of the batch.
            members: The members, with the values of their inputs.
            partition: The ranks' shares.
            group: The ranks, as this one sees them.
            attention, joined: See `split_program`.
            then: What is read ahead of the next step, see `ReadAhead`.

        Of members whose stretches are chosen in the step, nothing may be chosen yet.
        """
        split, way = self.split(program, attention, joined), (attention, joined)
        assert isinstance(split, SplitProgram), split
        layout = self.layout(whole.layout, partition, group.rank)
        frame = self._frame(split, way, layout, whole)
        inside = next((m.adapters.inside for m in members if m.adapters is not None), None)
        given = members
        members = [
            member
            if partition.has_part(number, group.rank)
            else replace(member, cache=None, adapters=None)
            for number, member in enumerate(members)
        ]  # a rank may lack the rows and adapters of members that it has no part of
        result: Any
        choices = None
        names = [n for n, s in split.program.interface.inputs.items() if isinstance(s, Cached)]
        self.reads.begin([ReadBatch(split.program, frame, members)], then)
        with within(group), adapted([(1, inside)]):
            if frame.by_stretch:
                sums = StretchSums.of(group, partition)
                choose_first(program.interface, given)
                steps = self._by_stretch.find(way, StretchSteps)
                # the rows of all requests are mapped
                result = steps.run(split.program, frame, given, frame.fetch(members), sums)
                choices = StretchChoices.of(program.interface, given, sums.found)
            else:
                run = self._runner(split.program, way, recording, frame, inside is not None)
                result = run(frame.fetch(members))
        outputs, emitted = result if recording else (result, ())
        loaded = sum(frame.loaded_bytes(members, names).values())
        return RankPart(tuple(outputs), tuple(emitted), loaded, choices)

    def _runner(
        self,
        own: Program,
        way: tuple[AttentionWays, bool],
        recording: bool,
        frame: Frame,
        intercepted: bool,
    ) -> Run:
        """Return what runs a graph; if its functions are intercepted, operator by operator."""

        def made() -> Run:
            module = own.recording if recording else own.module
            if intercepted:
                return Runner(module)
            module = fused(module, pointwise=ops.has_kernels(frame.device))
            run = Runner(module, self.settings.prepack and not recording, self._packed)
            if self._code is None or recording or not has_known_sizes(module.graph):
                return run
            load = partial(load_code, self._packed)
            return CodeRun(self._code, CodeKey(own.code, *way), own.module, run, load)

        return self._runners.find((own.code, way, recording, intercepted), made)


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
    emitted = []
    for i, tap in enumerate(program.interface.taps.values()):
        rows = [found for _, part in present if (found := part.emitted[i]) is not None]
        emitted.append(join_rows(tap.segments, there, rows) if rows else torch.empty(0))
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
