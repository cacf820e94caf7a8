"""BatchExecutor: runs a program over many calls at once, as one list of rows.

Owns what is kept between runs: tables of sites, frames, results computed once per request. Knows
nothing of how graphs run, of captures, and of the callers that submit requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from maskfx.config import Settings
from maskfx.ir.lru import LruCache
from maskfx.ir.programs.program import Program
from maskfx.ir.values import Equality
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member, in_batches
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.cache.rolling.rolling_cache import write_rows
from maskfx.runtime.execution.dense_fallback import recorded_output
from maskfx.runtime.execution.derived_weights import DerivedWeights
from maskfx.runtime.execution.graph_runs import GraphBatch, GraphRuns
from maskfx.runtime.execution.one_by_one import run_shared
from maskfx.runtime.execution.side_graphs import SideMemo, run_side
from maskfx.runtime.execution.step_results import StepResults
from maskfx.runtime.execution.stretch_steps import apart, choose_first
from maskfx.runtime.execution.template_rows import TemplateRows
from maskfx.runtime.execution.twins import Changed, Twins
from maskfx.runtime.lora.stacks import StackCache
from maskfx.runtime.sites.active import ActiveSitesCache
from maskfx.runtime.sites.stretch_sites import StretchSites
from maskfx.runtime.steps import EditStep, RecordStep, ValidatedCall

FRAMES = 32  # frames kept: batches whose tables may be reused

# Computes a batch on other ranks and returns what the program's graph does; None if it can't. One
# whose attribute `reads_values` is False gets members without the values of their inputs: the ranks
# compute these themselves.
Split = Callable[[Program, bool, Frame, Sequence[ValidatedCall], Sequence[Member]], Any]


class BatchExecutor:
    """Runs the batches of one denoiser.

    Args:
        settings: How the denoiser was compiled.
        loader: Loads cached rows while a graph computes; None picks them when the graph reads them.
        fingerprint: Returns the fingerprint of the weights, which is stored in recordings.
    """

    def __init__(
        self,
        settings: Settings,
        loader: Loader | None,
        fingerprint: Callable[[], str],
    ) -> None:
        self.fingerprint = fingerprint
        self.sites = ActiveSitesCache()
        self.sides = SideMemo()
        self.frames: LruCache[Hashable, Frame] = LruCache(FRAMES)
        self.equal = Equality()
        self.twins, self.stacks = Twins(settings.inductor), StackCache()
        self.graphs = GraphRuns(settings, loader, self._frame)
        self.template_rows = TemplateRows(self._prepared, self.graphs.packed)
        self.own_weights: Callable[[], bool] = lambda: True  # False: with adapters in them
        self.derived = DerivedWeights()

    def run(
        self, program: Program, calls: Sequence[ValidatedCall], split: Split | None = None
    ) -> list[object]:
        """Run calls of this program and return one result per call.

        Calls on one device form one batch. Members with equal numbers of active sites are adjacent
        in it, because they share calls of attention. `split` computes batches on several ranks.
        """
        self.derived.follow(program)
        members = self.members(program, calls)
        results: list[object] = [None] * len(calls)
        kept = choose_first(program.interface, members)
        if split is None and self.own_weights() and self.graphs.source is None:
            self.template_rows.compute(program, calls, members, self.graphs.settings.prepack)
        for number in kept:
            results[number] = recorded_output(calls[number])
        for own, group in self._adapted_batches(program, calls, members, kept, split is not None):
            run = partial(self._run, own, split=split)
            batch = [calls[n] for n in group], [members[n] for n in group]
            found = run_shared(*batch, run)
            for number, result in zip(group, found, strict=True):
                results[number] = result
        return results

    def _adapted_batches(
        self,
        program: Program,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
        left_out: Collection[int],
        splits: bool,
    ) -> Iterator[tuple[Program, list[int]]]:
        """Yield the batches of a step by the members' numbers, and the program that runs each."""
        groups = [[n for n in group if n not in left_out] for group in in_batches(members)]
        # loads ahead and ranks' shares are of rows that are known before the step
        if splits or self.graphs.loads.has_loads(members):
            groups = apart(groups, members)
        for group in filter(None, groups):
            compilations = [calls[n].inputs.compilation for n in group]
            sets = [members[n].adapters for n in group]
            for batch in self.twins.batches(program, compilations, sets):
                self._drop_runners()
                yield batch.program, [group[place] for place in batch.numbers]

    def _drop_runners(self) -> None:
        """Drop what runs the graphs of twins that no longer exist."""
        self.graphs.drop(self.twins.dropped)
        self.twins.dropped.clear()

    def _run(
        self,
        program: Program,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
        split: Split | None,
    ) -> list[object]:
        reads = split is None or getattr(split, "reads_values", True)
        if reads:
            self._give(calls, members)
        frame = self._frame(program, members)
        written = {i: m.written for i, m in enumerate(members) if m.written is not None}
        recording = bool(written) or any(m.recording for m in members)
        result = None
        if split is not None:
            result = split(program, recording, frame, calls, members)
        if result is None and not reads:
            self._give(calls, members)
        if result is None:
            result = self.graphs.run(GraphBatch(program, recording, frame, members))
        outputs, emitted = result if recording else (result, ())
        if written:
            write_rows(frame.layout, written, emitted)
        results = StepResults(
            program.interface, frame, calls, members, outputs, emitted, self.fingerprint
        )
        return [results.of(index) for index in range(len(calls))]

    def _prepared(
        self, program: Program, calls: Sequence[ValidatedCall], members: Sequence[Member]
    ) -> Frame:
        """Give members the values of their inputs, and return their frame."""
        self._give(calls, members)
        return self._frame(program, members)

    def _give(self, calls: Sequence[ValidatedCall], members: Sequence[Member]) -> None:
        """Run the side graphs and give the members the values of their inputs."""
        for call, member in zip(calls, members, strict=True):
            values, compilation = call.inputs.values, call.inputs.compilation
            capture, dense = compilation.capture, compilation.dense
            assert compilation.request is not None
            assert dense is not None
            member.given["step"] = values
            member.given["request"] = self.sides.run(
                compilation.request, capture, values, id(compilation), member.batch, call.adapters
            )
            member.given["dense"] = (
                run_side(dense, capture, values, call.adapters) if dense.lanes else ()
            )

    def prepared(
        self,
        program: Program,
        calls: Sequence[ValidatedCall],
        changed: Changed | None = None,
    ) -> Iterator[tuple[Program, Frame, list[Member]]]:
        """Yield the batches that `run` forms of these calls, with the values of their inputs.

        With `changed`, each has the program with terms on these parameters.
        """
        self.derived.follow(program)
        members = self.members(program, calls)
        twin = program if changed is None else self.twins.with_terms(program, changed)
        self._drop_runners()
        for group in in_batches(members):
            chosen = [members[n] for n in group]
            yield twin, self._prepared(twin, [calls[n] for n in group], chosen), chosen

    def members(self, program: Program, calls: Sequence[ValidatedCall]) -> list[Member]:
        """Return calls as members of a batch, without the values of their inputs."""
        return [self._member(program, call) for call in calls]

    def batches(
        self, program: Program, members: Sequence[Member]
    ) -> Iterator[tuple[Frame, list[Member]]]:
        """Yield the batches that `run` forms of these members, each with its frame."""
        for group in in_batches(members):
            chosen = [members[number] for number in group]
            yield self._frame(program, chosen), chosen

    # Cached state.

    def forget(self) -> None:
        """Drop frames, runners and side results; the programs they belong to are gone."""
        self.frames.clear()
        self.graphs.forget()
        self.template_rows.forget()
        self.sides.kept.clear()
        self.stacks.kept.clear()
        self.twins.forget()

    def drop_adapters(self, gone: Collection[int]) -> None:
        """Release all that was made of adapters' updates, given by the ids of their `Layers`."""
        for one in (self.sides, self.stacks, self.twins):
            one.drop(gone)
        for _, frame in self.frames.items():
            frame.drop_adapters(gone)

    def forget_weights(self) -> None:
        """Invalidate what was computed from weights, and code compiled with pre-packed weights."""
        self.sides.kept.clear()
        self.stacks.kept.clear()
        for _, frame in self.frames.items():
            frame.forget_given()
        self.graphs.forget_packed()
        self.template_rows.forget()

    @contextmanager
    def nothing_kept(self) -> Iterator[None]:
        """Discard the frames and side results that are created inside this context."""
        sides, frames = set(self.sides.kept), set(self.frames)
        try:
            yield
        finally:
            self.sides.kept.keep_only(sides)
            self.frames.keep_only(frames)

    # Parts of a run.

    def _member(self, program: Program, call: ValidatedCall) -> Member:
        sizes, pyramid = call.inputs.sizes, program.interface.pyramid
        device, adapters = call.inputs.latent.device, self.twins.named(program, call.adapters)
        batch, written = sizes["batch"], call.written
        if call.choice is not None and call.mask is not None:
            chosen = StretchSites(pyramid, sizes, call.mask)
            own = Member(chosen, batch, {}, written, False, written, device, adapters)
            return replace(own, choice=call.choice, regions=call.regions)
        sites = self.sites.get(program.code, pyramid, sizes, call.narrow_mask, call.regions)
        cache = call.step.cache if isinstance(call.step, EditStep) and not sites.full else None
        recording = isinstance(call.step, RecordStep)
        return Member(sites, batch, {}, cache, recording, written, device, adapters)

    def _frame(self, program: Program, members: Sequence[Member]) -> Frame:
        sites, batches = tuple(m.sites for m in members), tuple(m.batch for m in members)
        device = members[0].device
        chosen = any(member.choice is not None for member in members)

        def made() -> Frame:
            return Frame(
                program.interface,
                Layout(sites, batches),
                device,
                equal=self.equal,
                adapters=self.stacks,
                code=program.code,
                originals=self.twins.of_twin(program),
                by_stretch=chosen,
            )

        if chosen:  # its sites are those of this step alone
            return made()
        return self.frames.find((program.code, sites, batches, device), made)
