"""GraphRuns: runs the graph of a batch: from a capture, in pieces, by Inductor's code, or eagerly.

Owns what runs each program's graph, and the loads of cached rows in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskfx import ops
from maskfx.compiler.fuse import fused
from maskfx.compiler.pieces import sink_late
from maskfx.config import Settings
from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Cached
from maskfx.runtime.backends.code_run import CodeElsewhere, CodeKey, CodeRun
from maskfx.runtime.backends.eager import PackedWeights, Runner
from maskfx.runtime.backends.graph_function import Fetch, Run
from maskfx.runtime.backends.saved_code import load_code
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.batch.packed_keys import packed_inputs, with_packed
from maskfx.runtime.cache.loader import Loader, StagedRows
from maskfx.runtime.execution.fetch_ahead import FetchAhead
from maskfx.runtime.execution.prefetch import Prefetcher, Stopwatch, TakenRows
from maskfx.runtime.execution.replays import Replays, has_known_sizes
from maskfx.runtime.execution.stretch_steps import StretchSteps
from maskfx.runtime.hardware.cpu_threads import settle
from maskfx.runtime.lora.calls import adapted
from maskfx.runtime.lora.layers import AdapterSet

# A program's code, whether it records, its late inputs, those that it reads packed, and whether it
# runs in pieces that are captured.
RunnerKey = tuple[str, bool, frozenset[str], frozenset[str], bool]

# Returns what runs a program's graph, or (if True) the one that records.
GraphSource = Callable[[Program, bool], Run]


@dataclass(frozen=True, eq=False)
class GraphBatch:
    """What a graph computes at once.

    Args:
        program: The program.
        recording: Whether its graph is the one that records.
        frame: The frame of the batch.
        members: The members, with the values of their inputs.
    """

    program: Program
    recording: bool
    frame: Frame
    members: Sequence[Member]

    @cached_property
    def late(self) -> frozenset[str]:
        """Return the inputs whose values are still being computed elsewhere."""
        return self.frame.late(self.members)

    @property
    def inside(self) -> AdapterSet | None:
        """Return the members' adapters of layers inside modules that stay whole."""
        own = self.members[0].adapters
        return None if own is None else own.inside


class GraphRuns:
    """Runs the graphs of one denoiser's programs.

    Args:
        settings: How the denoiser was compiled.
        loader: Loads cached rows while a graph computes; None picks them when the graph reads them.
        frame_of: Returns the frame of a batch of members.
    """

    def __init__(
        self,
        settings: Settings,
        loader: Loader | None,
        frame_of: Callable[[Program, Sequence[Member]], Frame],
    ) -> None:
        self.settings = settings
        self.source: GraphSource | None = None
        self.code = CodeElsewhere(lambda: self.runners.clear())
        self.packed: PackedWeights = WeakIdKeyDictionary()
        self.runners: dict[RunnerKey, Run] = {}
        self.by_stretch = StretchSteps()
        self.loads = Prefetcher(frame_of, loader)
        self.replays = Replays(settings)
        self.watch: Stopwatch | None = None
        self.waited = 0.0  # seconds that graphs waited for their inputs, mostly for loads

    def run_by(self, source: GraphSource) -> None:
        """Have all graphs run by something else, which isn't captured."""
        self.source = source
        self.replays.stop("exported graphs run them")

    def run(self, batch: GraphBatch) -> Any:
        """Run the graph of a batch and return what it returns."""
        with adapted([(1, batch.inside)]):
            return self._run(batch)

    def _run(self, batch: GraphBatch) -> object:
        if batch.frame.by_stretch:
            fetch = self._watched(self._timed(batch.frame.fetch(batch.members)))
            result = self.by_stretch.run(batch.program, batch.frame, batch.members, fetch)
            self._stop_watch()
            return result
        packed = self._packed(batch)
        replays = self._can_replay(batch, packed)
        if replays and self._all_here(batch):
            found = self._replayed(batch, packed)
            if found is not None:
                return found
        with self.loads.step(batch.program, batch.frame, batch.members) as loading:
            if replays and loading is not None:
                if loading.early:
                    taken = TakenRows(loading)
                    found = self._replayed(batch, packed, taken)
                    return self._run_graph(batch, packed, taken) if found is None else found
                self.replays.note(batch.program, batch.frame, batch.members)
            return self._run_graph(batch, packed, loading)

    def forget(self) -> None:
        """Drop what runs graphs; the programs they belong to are gone."""
        self.runners.clear()
        self.by_stretch.runners.clear()
        self.replays.forget()

    def drop(self, codes: Sequence[str]) -> None:
        """Drop what runs the graphs of these programs."""
        self.by_stretch.drop(codes)
        for code in codes:
            self.replays.drop(code)
            for key in [key for key in self.runners if key[0].startswith(code)]:
                del self.runners[key]

    def forget_packed(self) -> None:
        """Drop code that was compiled with pre-packed weights, and these weights."""
        if self.settings.prepack:
            self.runners.clear()
            self.replays.forget()
            self.packed.clear()

    def follow_packed(self) -> None:
        """Pack the weights again that were changed in place."""
        for origin, packed in self.packed.items():
            packed.follow(origin)

    def stop_replays(self) -> None:
        """Drop all captures and make no more: the weights that they read are moved about."""
        self.replays.stop("its weights are moved about, and captures would read where they were")
        self.runners = {key: run for key, run in self.runners.items() if not key[-1]}

    # From a capture.

    def _can_replay(self, batch: GraphBatch, packed: frozenset[str]) -> bool:
        """Return True if a batch may run from a capture: nothing in it waits for an input."""
        if batch.recording or packed or self.watch is not None or batch.late:
            return False
        if batch.inside is not None:
            return False
        return self.replays.replayed(batch.program, batch.frame.device)

    def _all_here(self, batch: GraphBatch) -> bool:
        """Return True if all cached rows that a batch reads are on its device, or nothing loads."""
        if self.loads.loader is None:
            return True
        book = self.replays.book(batch.program, batch.frame.device)
        if all(m.cache is None or book.of(m.cache).all_here for m in batch.members):
            return True
        return not batch.frame.loaded_bytes(batch.members, batch.program.interface.inputs)

    def _replayed(
        self, batch: GraphBatch, packed: frozenset[str], loading: StagedRows | None = None
    ) -> object:
        """Run a graph from a capture, with rows that are at hand; None if it isn't captured."""
        make = partial(self._runner, batch, packed, pieces=False)
        return self.replays.whole(batch.program, make, batch.frame, batch.members, loading)

    # Otherwise.

    def _run_graph(
        self, batch: GraphBatch, packed: frozenset[str], loading: StagedRows | None
    ) -> object:
        """Run a graph, with inputs fetched when it reads them."""
        frame, members = batch.frame, batch.members
        runner = self._runner(batch, packed)
        fetch = with_packed(frame, members, packed, frame.fetch(members, loading))
        padded = self.replays.padded(batch.program, batch.recording, frame)
        fetch = self._timed(fetch if padded is None else padded.fetch(fetch))
        if loading is None and batch.late:
            waits = partial(frame.waits, members=members)
            order = [n for n in self.loads.order(batch.program) if n not in packed]
            fetch = FetchAhead(fetch, order, waits)
        result = runner(self._watched(fetch))
        if padded is not None:
            result = padded.strip(result)
        self._stop_watch()
        return result

    def _timed(self, fetch: Fetch) -> Fetch:
        def timed(name: str) -> Tensor:
            settle()
            asked = time.perf_counter()
            value = fetch(name)
            self.waited += time.perf_counter() - asked
            return value

        return timed

    def _watched(self, fetch: Fetch) -> Fetch:
        return fetch if self.watch is None else self.watch.over(fetch)

    def _stop_watch(self) -> None:
        if self.watch is not None:
            self.watch.stop()

    def _packed(self, batch: GraphBatch) -> frozenset[str]:
        """Return the inputs that kernels read as they are stored; a loader widens what it loads."""
        compiles = self.settings.inductor or self.source is not None
        if batch.recording or compiles or self.loads.loader or batch.inside is not None:
            return frozenset()
        if not ops.has_kernels(batch.frame.device):
            return frozenset()
        return packed_inputs(batch.frame, batch.members)

    def _runner(self, batch: GraphBatch, packed: frozenset[str], pieces: bool = True) -> Run:
        """Return the callable that runs a program; recordings are rare and run eagerly.

        One made for more late inputs than there are gives the same results, so that what happens
        to arrive early compiles nothing.
        """
        if batch.inside is not None:
            return self._uncompiled(batch)
        program, recording, late = batch.program, batch.recording, batch.late
        pieces = pieces and not recording and self.replays.in_pieces(program, batch.frame.device)
        for code, records, most, reads, cut in self.runners:
            known = (code, records, reads, cut)
            if known == (program.code, recording, packed, pieces) and late <= most:
                return self.runners[code, records, most, reads, cut]
        key = (program.code, recording, late, packed, pieces)
        self.runners[key] = self._made(batch, packed, pieces)
        return self.runners[key]

    def _uncompiled(self, batch: GraphBatch) -> Run:
        """Return what runs a program operator by operator, with functions that are intercepted."""
        code, packed = f"{batch.program.code} uncompiled", frozenset[str]()
        key = (code, batch.recording, batch.late, packed, False)
        if key not in self.runners:
            module = batch.program.recording if batch.recording else batch.program.module
            self.runners[key] = Runner(sink_late(module, batch.late) if batch.late else module)
        return self.runners[key]

    def _made(self, batch: GraphBatch, packed: frozenset[str], pieces: bool) -> Run:
        program, recording, late = batch.program, batch.recording, batch.late
        module = program.recording if recording else program.module
        if late:
            module = sink_late(module, late)
        compiles = self.settings.inductor and not recording and has_known_sizes(module.graph)
        kernels = ops.has_kernels(batch.frame.device)
        elsewhere, compiles = compiles and self.code.source, compiles and not self.code.source
        # with `prepack`, Inductor packs the weights of the products that it sees
        if kernels or not (compiles and self.settings.prepack):
            module = fused(module, packed, pointwise=kernels and not compiles)
        if self.source is not None:
            return self.source(program, recording)
        if compiles:
            from maskfx.runtime.backends.inductor import compile_rows

            example, waited = batch.frame.inputs(batch.members), self._waited(program, late)
            return compile_rows(program, module, self.settings, example, waited)
        if pieces:
            from maskfx.runtime.backends.cuda_graphs import piecewise, recorder_on

            waited, recorder = self._waited(program, late), recorder_on(batch.frame.device)
            return piecewise(program.interface, module, waited, recorder)
        run = Runner(module, self.settings.prepack and not recording, self.packed)
        if not elsewhere or late:
            return run
        load = partial(load_code, self.packed)
        return CodeRun(elsewhere, CodeKey(program.code), program.module, run, load)

    def _waited(self, program: Program, late: frozenset[str]) -> frozenset[str]:
        """Return the inputs that may arrive while the graph runs."""
        if self.loads.loader is None:
            return late
        sources = program.interface.inputs.items()
        return late | {name for name, source in sources if isinstance(source, Cached)}
