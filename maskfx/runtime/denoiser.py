"""CompiledDenoiser: the public handle of a compiled denoiser; runs a step as one ragged batch.

A ragged batch concatenates the rows of members with different numbers of active sites.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maskfx.compiler.capture.roles import Roles
from maskfx.compiler.compile import Compilation
from maskfx.config import Settings
from maskfx.errors import MissingRequest
from maskfx.ir.program import STRETCH, Program, Region
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.loader import Loader, Loading
from maskfx.runtime.cache.rolling import RollingCache
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.dense_batch import CallGroup, DenseBatcher
from maskfx.runtime.dense_ways import DenseWays
from maskfx.runtime.devices import CPU
from maskfx.runtime.editing import current_editing
from maskfx.runtime.executor import BatchExecutor, Split
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.calls import adapted
from maskfx.runtime.offload import bring, whole_hook
from maskfx.runtime.planning import Planner
from maskfx.runtime.prefetch import Stopwatch
from maskfx.runtime.program_cache import ProgramCache
from maskfx.runtime.sample_calls import SampleCalls
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, RecordStep, ValidatedCall
from maskfx.runtime.unnarrowed import recorded_output, run_in_full
from maskfx.runtime.validate import (
    check_adapters,
    check_steps,
    check_timesteps,
    check_written,
    expand_timesteps,
)
from maskfx.runtime.validator import Validator
from maskfx.runtime.weights import WeightChange, Weights

COMPILES = "maskfx_compiles"  # attribute of a module that has exported graphs in place of weights


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
        example_inputs: Mapping[str, Any] | None = None,
        loader: Loader | None = None,
        link: Loader | None = None,
    ) -> None:
        self.module, self._settings, self._link = module, settings, loader or link
        self._chosen: Settings | None = None
        self._always_loads = loader is not None
        self._weights = self._find_weights()
        self._executor = BatchExecutor(settings, loader, self._weights.fingerprint)
        self._known = self._find_programs(roles)
        self._samples = SampleCalls(module, self._known)
        self._validator = Validator(module, self._known, self._samples, self._weights)
        self._batcher = DenseBatcher(module, roles)
        self.dense_ways = DenseWays()  # of mode="patch_batch"
        self._lock = threading.RLock()  # forget() waits until the running step ends
        self.planner: Planner | None = None
        if example_inputs is not None:
            self._choose()
            self._validator.inputs(example_inputs)

    # What a denoiser of exported graphs has in other forms.

    def _find_weights(self) -> Weights:
        return Weights(self.module)

    def _find_programs(self, roles: Mapping[str, Roles] | None) -> ProgramCache:
        return ProgramCache(
            self.module, self.settings, roles, self._executor, self._weights.fingerprint
        )

    # Public interface.

    @property
    def settings(self) -> Settings:
        """Return how the module is compiled; whether plans are made may depend on its device."""
        if self._chosen is not None:
            return self._chosen
        if self._settings.plans is not None:
            return self._settings
        return replace(self._settings, plans=self._crosses_link())

    def _crosses_link(self) -> bool:
        return self._link is not None and self._link.has_link(device_of(self.module))

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
        self._follow_module()
        with adapted([(1, self._validator.adapters.of(step.adapters))]):
            output = self.module(**step.inputs)
        self._weights.settle()
        return output

    @torch.no_grad()
    def alike(
        self, calls: Sequence[Mapping[str, Any]], adapters: Sequence[Updates] = ()
    ) -> list[CallGroup]:
        """Group the dense calls that the module can answer in one call, each with its adapters."""
        self._follow_module()
        sets = [self._validator.adapters.of(own) for own in adapters]
        groups = self._batcher.groups(list(map(expand_timesteps, calls)), sets)
        self._weights.settle()
        return groups

    @torch.no_grad()
    def plain_together(self, group: CallGroup) -> list[Any]:
        """Run the module itself once for all calls of a group.

        Call `alike` right before: it checks for changed weights, and this method doesn't.
        """
        outputs = self._batcher.run(group)
        self._weights.settle()
        return outputs

    def check_adapters(self, adapters: Updates) -> None:
        """Raise InputError if adapters name layers that the module lacks, or don't fit them."""
        self._validator.adapters.of(adapters)

    @property
    def stays_alone(self) -> list[str]:
        """Return the reasons why dense calls of some kinds don't share a call of the module."""
        return list(self._batcher.refused.values())

    def record(self, **inputs: object) -> tuple[Any, StepCache]:
        """Run a dense step and return its output and a cache for edits of this step."""
        result: tuple[Any, StepCache] = self.step([RecordStep(inputs)])[0]
        return result

    def edit(self, steps: Sequence[EditStep]) -> list[Any]:
        """Run one ragged batch of edits; return one output of full shape per member."""
        return self.step(steps)

    def batch(self, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Compute all sites of every member in one ragged batch; sizes may differ."""
        return self.step([DenseStep(i) for i in inputs])

    @torch.no_grad()
    def step(self, steps: Sequence[AnyStep], split: Split | None = None) -> list[Any]:
        """Run any mix of edits, recordings and dense members, in one ragged batch per program.

        Args:
            steps: The members.
            split: Computes batches on several ranks, such as a `RankGroup` of maskfx.distributed.
        """
        check_steps(steps, self.settings)
        with self._lock:
            self._follow_module()
            try:
                calls = self._validator.calls(steps)
                check_timesteps(calls)
                check_adapters(calls)
                check_written(calls)
                return self._run(calls, split)
            finally:
                self._validator.end_step()

    @torch.no_grad()
    def compile_for(self, steps: Sequence[AnyStep]) -> None:
        """Find or make what serves these steps, so that `save_programs` writes it."""
        with self._lock:
            self._follow_module()
            try:
                for step in steps:
                    self._validator.inputs(step.inputs)
            finally:
                self._validator.end_step()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Let other threads run steps while a `split` of this thread waits for other processes."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def locked(self) -> AbstractContextManager[object]:
        """Keep other threads from running steps meanwhile."""
        return self._lock

    @torch.no_grad()
    def prepared(self, steps: Sequence[AnyStep]) -> list[tuple[Program, Frame, list[Member]]]:
        """Return the batches of a step with the values of their inputs, for a rank to compute."""
        with self._lock:
            self._follow_module()
            groups: dict[str, list[ValidatedCall]] = {}
            try:
                for call in filter(has_rows, self._validator.calls(steps)):
                    groups.setdefault(call.inputs.program_code, []).append(call)
                return [
                    (program, frame, members)
                    for program, own in ((self.programs[code], own) for code, own in groups.items())
                    for frame, members in self._executor.prepared(program, own)
                ]
            finally:
                self._validator.end_step()

    def _run(self, calls: Sequence[ValidatedCall], split: Split | None) -> list[Any]:
        """Run the calls, those that consist of calls of one sample as these."""
        each = [self._samples.calls(call) for call in calls]
        results = iter(self._run_parts([part for parts in each for part in parts], split))
        return [
            self._samples.joined(call, list(islice(results, len(parts))))
            for call, parts in zip(calls, each, strict=True)
        ]

    def _run_parts(self, calls: Sequence[ValidatedCall], split: Split | None) -> list[Any]:
        """Run the calls of each program as one batch, and calls without a program one by one."""
        results: list[Any] = [None] * len(calls)
        # a split step waits unlocked, and `programs` may change meanwhile
        batches: dict[str, tuple[Program, list[int]]] = {}
        for i, call in enumerate(calls):
            program = call.inputs.compilation.program
            if call.edits_nothing and call.inputs.compilation.capture.module is not None:
                results[i] = recorded_output(call)
            elif program is None:
                results[i] = run_in_full(call, self.module, self._weights)
            else:
                batches.setdefault(program.code, (program, []))[1].append(i)
        for program, members in batches.values():
            outputs = self._executor.run(program, [calls[i] for i in members], split)
            for i, output in zip(members, outputs, strict=True):
                results[i] = output
        return results

    @torch.no_grad()
    def ahead(self, steps: Sequence[AnyStep], only: bool = False) -> list[Loading]:
        """Prefetch the rows that a later `step(steps)` will read; call it before the step between.

        Masks, caches and plans must be those of the later step; of `inputs` only the sizes count.
        Other members may join it, and some of these leave. With `only`, the step is the next one:
        prefetches of other steps are cancelled, and what it takes doesn't serve later ones.
        Without a loader nothing happens.
        """
        loads = self._executor.loads
        if loads.loader is None:
            return []
        with self._lock:
            groups = list(self.batches([step for step in steps if is_fixed(step)]))
            if only:
                loads.forget_others([member for *_, members in groups for member in members])
            return [loading for group in groups for loading in loads.ahead(*group, next_step=only)]

    def pending(self, member: Member) -> set[str] | None:
        """Return the inputs of a member that aren't loaded yet; None if its loads aren't begun."""
        return self._executor.loads.pending(member)

    def batches(self, steps: Sequence[AnyStep]) -> Iterator[tuple[Program, Frame, list[Member]]]:
        """Yield the ragged batches of edits with active sites, one per program and device."""
        calls = [call for call in self._validator.calls(steps) if has_rows(call)]
        groups: dict[str, list[ValidatedCall]] = {}
        for part in (part for call in calls for part in self._samples.calls(call)):
            groups.setdefault(part.inputs.program_code, []).append(part)
        for code, own in groups.items():
            program = self.programs[code]
            members = self._executor.members(program, own)
            for frame, chosen in self._executor.batches(program, members):
                yield program, frame, chosen

    def members(self, steps: Sequence[AnyStep]) -> Iterator[tuple[Program, list[Member]]]:
        """Yield, per program, the calls with active sites as members of a batch, in their order.

        A call that runs as one call per sample is one member, with the batch of its samples.
        """
        for program, _, members in self.groups(steps):
            yield program, members

    def groups(self, steps: Sequence[AnyStep]) -> Iterator[tuple[Program, list[int], list[Member]]]:
        """Yield what `members` does, with the members' numbers in `steps`."""
        calls = dict(enumerate(self._validator.calls(steps)))
        active = {number: call for number, call in calls.items() if has_rows(call)}
        for code in dict.fromkeys(call.inputs.program_code for call in active.values()):
            own = {n: call for n, call in active.items() if call.inputs.program_code == code}
            members = self._executor.members(self.programs[code], list(own.values()))
            yield self.programs[code], list(own), members

    def mask_shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return a mask's shape for these inputs: (height, width) of the latent, or (tokens,)."""
        with self._lock:
            self._choose()
            return self._validator.inputs(inputs).mask_shape

    def refresh(self) -> None:
        """Recompute what depends on weights; call it after changes through `.data`.

        Such changes can't be detected.
        """
        self._weights_changed()
        for program in self.programs.values():
            self._executor.derive(program)

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
            self._follow_module()
            self.module.share_memory()
            self._weights.accept()

    def fingerprint(self) -> str:
        """Return a fingerprint of the weights; recordings with another fingerprint are refused."""
        self._follow_module()
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
        return self._executor.watch

    @watch.setter
    def watch(self, watch: Stopwatch | None) -> None:
        self._executor.watch = watch

    @property
    def waited(self) -> float:
        """Return the seconds that graphs have waited for inputs: loads not hidden by compute."""
        return self._executor.waited

    @property
    def loader(self) -> Loader | None:
        """Return the loader that loads cached rows while a graph computes."""
        return self._executor.loads.loader

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
        return self._executor.graphs is None and self._settings.stretches

    @property
    def loads(self) -> str:
        """Return which rows are loaded ahead and by which plan, or why none are."""
        self._choose()
        if self.loader is None:
            if self._settings.plans is None:
                return (
                    "when they are read, without a plan: they lie in the memory that the denoiser "
                    "computes in, so there is nothing to hide"
                )
            return "when they are read: it is compiled without a loader"
        if self.planner is None or not self.settings.plans:
            return "ahead of the step that reads them, without a planner"
        return f"ahead of the step that reads them, by a plan per batch ({self.planner.describe()})"

    def explain(self, mask_ratio: float = 0.1) -> str:
        """Return a text that lists what each pass did, what runs where, and what it costs."""
        from maskfx.runtime.explain import explain

        return explain(self, mask_ratio)

    # Changes of the module's weights.

    def _follow_module(self) -> None:
        bring(self.module)
        self._choose()
        change = self._weights.change()
        if change is WeightChange.TENSORS:  # captured graphs hold the old tensors
            self.forget()
        if change is not WeightChange.NONE:
            self._weights_changed()

    def _choose(self) -> None:
        """Choose, by the device of the module, whether rows are loaded ahead and by plans."""
        if self._chosen is None:
            crosses = self._always_loads or self._crosses_link()
            self._chosen = self.settings
            self._known.settings = self._executor.settings = self._chosen
            self._executor.loads.loader = self._link if crosses or self._chosen.plans else None

    def forget(self) -> None:
        """Drop all captures; the next call captures the module again.

        Call it if the module now computes something else.
        """
        with self._lock:
            self._known.forget()
            self._executor.forget()
            self._batcher.forget()
            self._samples.forget()
            self._validator.forget()
            self._weights.restart()
            self._chosen = None
            self._choose()

    def _weights_changed(self) -> None:
        """Invalidate what was computed from weights, and code compiled with pre-packed weights."""
        self._weights.forget()
        self._validator.forget()
        self._known.doubt()
        self._executor.forget_weights()


def has_rows(call: ValidatedCall) -> bool:
    """Return True for a call that a program computes at some sites."""
    return call.inputs.program is not None and not call.edits_nothing


def is_fixed(step: AnyStep) -> bool:
    """Return True for an edit whose cached rows no earlier step replaces."""
    return isinstance(step, EditStep) and not isinstance(step.cache, RollingCache)


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module computes on."""
    hook = whole_hook(module)
    if hook is not None and hook.execution_device is not None:
        return torch.device(hook.execution_device)
    weights = next(module.parameters(), None)
    return CPU if weights is None else weights.device


def compiled(
    module: nn.Module,
    settings: Settings,
    roles: Mapping[str, Roles] | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    loader: Loader | None = None,
    link: Loader | None = None,
) -> CompiledDenoiser:
    """Compile a denoiser; one whose graphs are exported makes its own `CompiledDenoiser`."""
    made = vars(module).get(COMPILES)
    if made is not None:
        found: CompiledDenoiser = made(settings, loader)
        return found
    return CompiledDenoiser(module, settings, roles, example_inputs, loader, link)
