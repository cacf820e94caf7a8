"""CompiledDenoiser: the public handle of a compiled denoiser; runs a step as one ragged batch.

A ragged batch concatenates the rows of members with different numbers of active sites.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maskfx.compiler.capture.arguments.roles import Roles
from maskfx.compiler.compile import Compilation
from maskfx.config import Settings
from maskfx.errors import MissingRequest
from maskfx.ir.geometry.level_shares import LevelShare
from maskfx.ir.programs.program import STRETCH, Program, Region
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.loader import Loader, Loading
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.copied_denoiser import compiled_anew
from maskfx.runtime.denoiser_adapters import DenoiserAdapters
from maskfx.runtime.dense_ways import DenseWays
from maskfx.runtime.editing import current_editing
from maskfx.runtime.execution.dense_batch import CallGroup, DenseBatcher
from maskfx.runtime.execution.executor import BatchExecutor, Split
from maskfx.runtime.execution.prefetch import Stopwatch
from maskfx.runtime.execution.twins import Changed
from maskfx.runtime.hardware.cpu_threads import sharing_cores
from maskfx.runtime.load_choice import LoadChoice
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.module_changes import ModuleChanges
from maskfx.runtime.planning import Planner
from maskfx.runtime.programs.program_cache import ProgramCache
from maskfx.runtime.step_batches import StepBatches
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, RecordStep, is_fixed
from maskfx.runtime.validation.check_steps import check_steps
from maskfx.runtime.validation.sample_calls import SampleCalls
from maskfx.runtime.validation.validate import check_caches, check_timesteps, expand_timesteps
from maskfx.runtime.validation.validator import Validator
from maskfx.runtime.weights import Weights


class CompiledDenoiser:
    """Runs a denoiser densely, records steps, and edits on active sites only.

    Args:
        module: The denoiser to compile.
        settings: How to compile it.
        roles: Overrides of which dimension of an argument is the batch, the picture or the text.
        example_inputs: Arguments to capture the module with now; by default it is captured at the
            first call.
        loader: Loads cached rows while the graph computes; by default rows are picked when the
            graph reads them.
        link: A loader that is used only where rows cross a link to the module's device. There
            `Settings.plans` of None is True, elsewhere False.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        roles: Mapping[str, Roles] | None = None,
        example_inputs: Mapping[str, object] | None = None,
        loader: Loader | None = None,
        link: Loader | None = None,
    ) -> None:
        self.module, self._loads = module, LoadChoice(module, settings, loader, link)
        self.compiled_with = self._loads.given
        self._weights = self._find_weights()
        self._executor = BatchExecutor(settings, loader, self._weights.recorded)
        self.code = self._executor.graphs.code
        self._known = self._find_programs(roles)
        self._samples = SampleCalls(module, self._known)
        self._batches = StepBatches(
            module, self._weights, self._known, self._samples, self._executor
        )
        self._validator = Validator(module, self._known, self._samples, self._weights)
        self.adapters = DenoiserAdapters(self._validator.adapters, self._executor)
        self._batcher, self.dense_ways = DenseBatcher(module, roles), DenseWays()
        self._lock = threading.RLock()  # forget() waits until the running step ends
        self._changes = ModuleChanges(
            module,
            self._weights,
            self._loads,
            self._known,
            self._executor,
            self._validator,
            (self._batcher, self._samples),
            self._lock,
        )
        self.validated_once = partial(self._validator.held, lock=self._lock)
        self.in_place = self._changes.in_place
        self.watch_settings = self._changes.watch_settings
        self.follow_settings = self._changes.follow_settings
        self.planner: Planner | None = None
        self.reads_apart = False  # whether other processes read what they need of stored rows
        self.level_shares: tuple[LevelShare, ...] = ()  # of its FLOPs, for predictions of costs
        if example_inputs is not None:
            self._changes.choose()
            self._validator.inputs(example_inputs)

    def _find_weights(self) -> Weights:
        return Weights(self.module)

    def _find_programs(self, roles: Mapping[str, Roles] | None) -> ProgramCache:
        return ProgramCache(
            self.module, self.settings, roles, self._executor, self._weights.fingerprint
        )

    @property
    def settings(self) -> Settings:
        """Return how the module is compiled; whether plans are made may depend on its device."""
        return self._loads.settings

    def __reduce_ex__(self, protocol: object) -> Any:
        """Return what deep copies and pickles are made from."""
        return compiled_anew, (type(self), self.module, self.compiled_with, self.roles)

    def __call__(self, *args: object, **inputs: object) -> Any:
        """Run the module densely; inside `maskfx.editing(...)`, edit or record.

        Calls with positional arguments always run the module.
        """
        active = current_editing()
        if active is None or args:
            return self.module(*args, **inputs)
        return active.run(self, inputs)

    @torch.no_grad()
    def plain(self, **inputs: object) -> Any:
        """Run the module itself, uncompiled."""
        return self.plain_step(DenseStep(inputs))

    @torch.no_grad()
    def plain_step(self, step: AnyStep) -> Any:
        """Run the module itself on the inputs of a step, with its adapters."""
        with self._lock:
            self._changes.follow()
            adapters = self._validator.adapters.of(step.adapters)
            output = self._batcher.run_alone(step.inputs, adapters)
            self._changes.settle()
            return output

    @torch.no_grad()
    def alike(
        self, calls: Sequence[Mapping[str, object]], adapters: Sequence[Updates] = ()
    ) -> list[CallGroup]:
        """Group the dense calls that the module can answer in one call, each with its adapters."""
        self._changes.follow()
        sets = [self._validator.adapters.of(own) for own in adapters]
        groups = self._batcher.groups([expand_timesteps(call, self.module) for call in calls], sets)
        self._changes.settle()
        return groups

    @torch.no_grad()
    def plain_together(self, group: CallGroup) -> list[Any]:
        """Run the module itself once for a group of `alike`, which checks for changed weights."""
        with self._lock:
            outputs = self._batcher.run(group)
            self._changes.settle()
            return outputs

    @property
    def stays_alone(self) -> list[str]:
        """Return the reasons why dense calls of some kinds don't share a call of the module."""
        return list(self._batcher.refused.values())

    def record(self, **inputs: object) -> tuple[Any, StepCache]:
        """Run a dense step and return its output and a cache for edits of this step."""
        result: tuple[object, StepCache] = self.step([RecordStep(inputs)])[0]
        return result

    def edit(self, steps: Sequence[EditStep]) -> list[Any]:
        """Run one ragged batch of edits; return one output of full shape per member."""
        return self.step(steps)

    def batch(self, inputs: Sequence[Mapping[str, object]]) -> list[Any]:
        """Compute all sites of every member in one ragged batch; sizes may differ."""
        return self.step([DenseStep(i) for i in inputs])

    @torch.no_grad()
    def step(self, steps: Sequence[AnyStep], split: Split | None = None) -> list[Any]:
        """Run any mix of edits, recordings and dense members, in one ragged batch per program.

        Args:
            steps: The members.
            split: Computes batches on several ranks, such as a `RankGroup` of maskfx.distributed.
        """
        check_steps(steps, self.settings, self.runs_by_stretch)
        with self._one_step():
            calls = self._validator.calls(steps)
            check_timesteps(calls)
            check_caches(calls)
            return self._batches.run(calls, split)

    @torch.no_grad()
    def compile_for(self, steps: Sequence[AnyStep], single: bool = False) -> None:
        """Find or make what serves these steps, so that `save_programs` writes it."""
        with self._one_step():
            for step in steps:
                self._validator.arguments(step.inputs, single)

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Let other threads run steps while a `split` waits for other processes."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def locked(self) -> AbstractContextManager[object]:
        """Keep other threads from running steps meanwhile."""
        return self._lock

    @torch.no_grad()
    def prepared(
        self, steps: Sequence[AnyStep], changed: Changed | None = None, single: bool = False
    ) -> list[tuple[Program, Frame, list[Member]]]:
        """Return batches with the values of their inputs, for a rank; see `DenoiserAdapters`."""
        with self._one_step():
            return self._batches.prepared(self._validator.calls(steps, single), changed)

    @contextmanager
    def _one_step(self) -> Iterator[None]:
        """Lock the denoiser for a step, and follow changes of its module."""
        with self._lock, sharing_cores():
            self._changes.follow()
            try:
                yield
            finally:
                self._changes.end_step()

    @torch.no_grad()
    def ahead(self, steps: Sequence[AnyStep], only: bool = False) -> list[Loading]:
        """Prefetch the rows that a later `step(steps)` will read; call it before the step between.

        Masks, caches and plans must be those of the later step; of `inputs` only the sizes count.
        Other members may join it, and some of these leave. With `only`, the step is the next one:
        prefetches of other steps are cancelled, and what it takes doesn't serve later ones.
        Without a loader nothing happens.
        """
        if self.loader is None:
            return []
        with self._lock:
            calls = self._validator.calls([step for step in steps if is_fixed(step)])
            return self._batches.ahead(calls, only)

    def pending(self, member: Member) -> set[str] | None:
        """Return the inputs of a member that aren't loaded yet; None if its loads aren't begun."""
        return self._executor.graphs.loads.pending(member)

    def batches(self, steps: Sequence[AnyStep]) -> Iterator[tuple[Program, Frame, list[Member]]]:
        """Yield the ragged batches of edits with active sites, one per program and device."""
        yield from self._batches.batches(self._validator.calls(steps))

    def members(self, steps: Sequence[AnyStep]) -> Iterator[tuple[Program, list[Member]]]:
        """Yield, per program, the calls with active sites as members; samples of a call are one."""
        for program, _, members in self.groups(steps):
            yield program, members

    def groups(self, steps: Sequence[AnyStep]) -> Iterator[tuple[Program, list[int], list[Member]]]:
        """Yield what `members` does, with the members' numbers in `steps`."""
        yield from self._batches.groups(self._validator.calls(steps))

    def mask_shape(self, inputs: Mapping[str, object]) -> tuple[int, ...]:
        """Return a mask's shape: (height, width) of the latent, frames first, or (tokens,)."""
        with self._lock:
            self._changes.choose()
            return self._validator.inputs(inputs).mask_shape

    def refresh(self) -> None:
        """Recompute what depends on weights; call it after changes through `.data`.

        Steps don't detect such changes, and pipelines only those of most numbers.
        """
        self._changes.weights_changed()
        for program in self.programs.values():
            self._executor.derived.compute(program)

    def refresh_if_overwritten(self) -> None:
        """Refresh if a few numbers of each weight show a change through `.data`."""
        if self._weights.overwritten():
            with self._lock:
                self.refresh()

    def save_programs(self, directory: Path) -> bool:
        """Write the programs so that other processes with this module capture nothing.

        Returns False if nothing is new since the last time.
        """
        with self._lock:
            return self._known.save_to(directory)

    @property
    def roles(self) -> Mapping[str, Roles] | None:
        """Return which dimension of an argument is the batch, the picture or the text, if given."""
        return self._known.roles

    def share_memory(self) -> None:
        """Move the weights to memory that other processes can share; captures stay valid."""
        with self._lock:
            self._changes.follow()
            self.module.share_memory()
            self._weights.accept()

    def fingerprint(self) -> str:
        """Return a fingerprint of the weights; recordings with another fingerprint are refused."""
        if not self.in_place.written:  # else it is known, and adapters stay where they are
            self._changes.follow()
        return self._weights.fingerprint()

    @property
    def graph(self) -> torch.fx.GraphModule:
        """Return the rewritten graph of the first capture, or raise MissingRequest."""
        if not self.programs:
            raise MissingRequest(
                "no graph: either nothing was called yet (call the denoiser once, or pass "
                "example_inputs to compile()), or all of it runs dense; explain() prints the reason"
            )
        return next(iter(self.programs.values())).module

    @property
    def compilations(self) -> list[Compilation]:
        """Return the compilations made so far."""
        return self._known.serves

    @property
    def programs(self) -> dict[str, Program]:
        """Return the programs by `Program.code`, which identifies what they compute."""
        return self._known.programs

    @property
    def watch(self) -> Stopwatch | None:
        """Return the stopwatch that times the inputs of each batch, if one is set."""
        return self._executor.graphs.watch

    @watch.setter
    def watch(self, watch: Stopwatch | None) -> None:
        self._executor.graphs.watch = watch

    @property
    def waited(self) -> float:
        """Return the seconds that graphs have waited for inputs: loads not hidden by compute."""
        return self._executor.graphs.waited

    @property
    def loader(self) -> Loader | None:
        """Return what loads cached rows while a graph computes."""
        return self._executor.graphs.loads.loader

    @property
    def regions(self) -> list[Region]:
        """Return the parts of the graph that may have other sites than the mask's.

        Regions are numbered from 1. A plan may choose the sites of a region of keys and values,
        `EditStep.wide` those of a stretch (consecutive blocks).
        """
        return list(next(iter(self.programs.values())).interface.regions) if self.programs else []

    @property
    def stretches(self) -> list[Region]:
        """Return the regions that are stretches of blocks, from the input on; the first is 1."""
        return [region for region in self.regions if region.kind == STRETCH]

    @property
    def runs_by_stretch(self) -> bool:
        """Return True if steps may choose the sites of stretches while they run."""
        return self._executor.graphs.source is None and self.settings.stretches

    @property
    def loads(self) -> str:
        """Return which rows are loaded ahead and by which plan, or why none are."""
        self._changes.choose()
        return self._loads.describe(self.loader, self.planner)

    @property
    def replays(self) -> str:
        """Return whether steps whose masks come again are replayed from CUDA graphs."""
        return self._executor.graphs.replays.describe()

    def explain(self, mask_ratio: float = 0.1) -> str:
        """Return a text that lists what each pass did, what runs where, and what it costs."""
        from maskfx.runtime.explain import explain

        return explain(self, mask_ratio)

    def forget(self) -> None:
        """Drop all captures; call it if the module now computes something else."""
        with self._lock:
            self._changes.forget()
