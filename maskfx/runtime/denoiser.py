"""CompiledDenoiser: the public handle of a compiled denoiser; runs a step as one ragged batch.

A ragged batch concatenates the rows of members with different numbers of active sites.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx.compiler.capture import roles as roles_
from maskfx.compiler.compile import Compilation
from maskfx.config import Settings
from maskfx.errors import InputError, MissingRequest
from maskfx.ir.program import STRETCH, Program, Region
from maskfx.ir.values import copy_of
from maskfx.runtime.batch.frame import Frame, Member
from maskfx.runtime.cache.loader import Loader, Loading
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.dense_batch import CallGroup, DenseBatcher
from maskfx.runtime.devices import copied, moved
from maskfx.runtime.editing import current_editing
from maskfx.runtime.executor import BatchExecutor
from maskfx.runtime.offload import bring
from maskfx.runtime.prefetch import Stopwatch
from maskfx.runtime.program_cache import ProgramCache
from maskfx.runtime.steps import (
    AnyStep,
    CheckedCall,
    DenseStep,
    EditStep,
    RecordStep,
    constants_of,
    device_of,
    dtype_of,
    masked,
    steps_of,
    unflatten,
)
from maskfx.runtime.unnarrowed import edit_in_full
from maskfx.runtime.validate import (
    check_arguments,
    check_edit,
    check_regions,
    check_steps,
    check_timesteps,
    dense_code,
    signature_of,
)
from maskfx.runtime.validate_once import ValidatedInputs, ValidationCache
from maskfx.runtime.weights import WeightChange, Weights

log = logging.getLogger(__name__)


class Planner(Protocol):
    """Chooses what each edit of a batch loads and what it projects again (`StepPlanner`)."""

    def plan_edits(self, steps: Sequence[EditStep]) -> list[EditStep]: ...


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
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        roles: Mapping[str, roles_.Roles] | None = None,
        example_inputs: Mapping[str, Any] | None = None,
        loader: Loader | None = None,
    ) -> None:
        self.module, self.settings = module, settings
        self._watch = Weights(module)
        self._executor = BatchExecutor(settings, loader, lambda: self._watch.fingerprint())
        self._known = ProgramCache(
            module, settings, roles, self._executor, lambda: self._watch.fingerprint()
        )
        self._batcher = DenseBatcher(module, roles)
        self._signature = signature_of(module)
        self._checked = ValidationCache()
        self._lock = threading.RLock()  # forget() waits until the running step ends
        self.planner: Planner | None = None
        if example_inputs is not None:
            self._call(DenseStep(example_inputs))

    # Public interface.

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run the module densely; inside `maskfx.editing(...)`, edit or record.

        Calls with positional arguments always run the module.
        """
        active = current_editing()
        if active is None or args:
            return self.module(*args, **inputs)
        return active.run(self, inputs)

    @torch.no_grad()
    def plain(self, **inputs: Any) -> Any:
        """Run the module itself, uncompiled."""
        self._follow_module()
        output = self.module(**inputs)
        self._watch.settle()
        return output

    @torch.no_grad()
    def alike(self, calls: Sequence[Mapping[str, Any]]) -> list[CallGroup]:
        """Group the dense calls that the module can answer in one call."""
        self._follow_module()
        groups = self._batcher.groups(list(map(normalised, calls)))
        self._watch.settle()
        return groups

    @torch.no_grad()
    def plain_together(self, group: CallGroup) -> list[Any]:
        """Run the module itself once for all calls of a group.

        Call `alike` right before: it checks for changed weights, and this method doesn't.
        """
        outputs = self._batcher.run(group)
        self._watch.settle()
        return outputs

    @property
    def stays_alone(self) -> list[str]:
        """Return the reasons why dense calls of some kinds don't share a call of the module."""
        return list(self._batcher.refused.values())

    def record(self, **inputs: Any) -> tuple[Any, StepCache]:
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
    def step(self, steps: Sequence[AnyStep]) -> list[Any]:
        """Run any mix of edits, recordings and dense members, in one ragged batch per program."""
        if not steps:
            raise MissingRequest("step() got an empty list; pass at least one member")
        check_steps(steps, self.settings)
        with self._lock:
            try:
                return self._step(steps)
            finally:
                self._checked.let_go()

    def _step(self, steps: Sequence[AnyStep]) -> list[Any]:
        self._follow_module()
        calls = [self._call(s) for s in steps]
        check_timesteps(calls)
        results: list[Any] = [None] * len(calls)
        groups: dict[str | None, list[int]] = {}
        for i, call in enumerate(calls):
            if (
                isinstance(call.step, EditStep)
                and call.mask is not None
                and not bool(call.mask.any())
                and call.compilation.capture.module is not None
            ):
                device = device_of(call)
                kept = [
                    copied(t, device) if isinstance(t, Tensor) else t
                    for t in call.step.cache.output
                ]
                results[i] = unflatten(call, kept)
                continue
            program = call.compilation.program
            groups.setdefault(program.code if program else None, []).append(i)
        for code, members in groups.items():
            outputs = (
                [self._dense(calls[i]) for i in members]
                if code is None
                else self._executor.run(self.programs[code], [calls[i] for i in members])
            )
            for i, output in zip(members, outputs, strict=True):
                results[i] = output
        return results

    @torch.no_grad()
    def ahead(self, steps: Sequence[EditStep], only: bool = False) -> list[Loading]:
        """Prefetch the rows that a later `step(steps)` will read; call it before the step between.

        Masks, caches and plans must be those of the later step; of `inputs` only the sizes count.
        With `only`, prefetches of other steps are cancelled. Without a loader nothing happens.
        """
        loads = self._executor.loads
        if loads.loader is None:
            return []
        with self._lock:
            groups = list(self.batches(steps))
            if only:
                loads.forget_others(groups)
            return [loads.ahead(*group) for group in groups]

    def batches(self, steps: Sequence[EditStep]) -> Iterator[tuple[Program, Frame, list[Member]]]:
        """Yield the ragged batches of edits with active sites, one per program and device."""
        for program, members in self.members(steps):
            for frame, chosen in self._executor.batches(program, members):
                yield program, frame, chosen

    def members(self, steps: Sequence[EditStep]) -> Iterator[tuple[Program, list[Member]]]:
        """Yield, per program, the edits with active sites as members of a batch, in their order."""
        groups: dict[str, list[CheckedCall]] = {}
        for step in steps:
            call = self._call(step)
            program = call.compilation.program
            if program is not None and call.mask is not None and bool(call.mask.any()):
                groups.setdefault(program.code, []).append(call)
        for code, calls in groups.items():
            yield self.programs[code], self._executor.members(self.programs[code], calls)

    def mask_shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return a mask's shape for these inputs: (height, width) of the latent, or (tokens,)."""
        with self._lock:
            sizes = self._call(DenseStep(inputs)).sizes
        return (sizes["y"], sizes["x"]) if "y" in sizes else (sizes.get("tokens", 0),)

    def refresh(self) -> None:
        """Recompute what depends on weights; call it after changes through `.data`.

        Such changes can't be detected.
        """
        self._weights_changed()
        for program in self.programs.values():
            self._executor.derive(program)

    def fingerprint(self) -> str:
        """Return a fingerprint of the weights; recordings with another fingerprint are refused."""
        self._follow_module()
        return self._watch.fingerprint()

    @property
    def graph(self) -> torch.fx.GraphModule:
        """Return the rewritten graph of the first capture, or raise MissingRequest."""
        if not self.programs:
            raise MissingRequest(
                "no graph: either nothing was called yet (call the denoiser once, or pass "
                "example_inputs to compile()), or all of it runs dense; explain() says why"
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

    def explain(self, mask_ratio: float = 0.1) -> str:
        """Return a text that lists what each pass did, what runs where, and what it costs."""
        from maskfx.runtime.explain import explain

        return explain(self, mask_ratio)

    # Changes of the module's weights.

    def _follow_module(self) -> None:
        bring(self.module)
        change = self._watch.change()
        if change is WeightChange.TENSORS:  # captured graphs hold the old tensors
            self.forget()
        if change is not WeightChange.NONE:
            self._weights_changed()

    def forget(self) -> None:
        """Drop all captures; the next call captures the module again.

        Call it if the module now computes something else.
        """
        with self._lock:
            self._known.forget()
            self._executor.forget()
            self._batcher.forget()
            self._checked.forget()
            self._watch = Weights(self.module)

    def _weights_changed(self) -> None:
        """Invalidate what was computed from weights, and code compiled with pre-packed weights."""
        self._watch.forget()
        self._checked.forget()
        self._known.doubt()
        self._executor.forget_weights()

    # A single call.

    def _call(self, step: AnyStep) -> CheckedCall:
        """Validate a member of a step, except for its timestep."""
        entered = self._checked.inputs(step.inputs, self._entered)
        compilation = entered.compilation
        call = CheckedCall(step, entered.values, entered.spec, entered.sizes, compilation)
        if isinstance(step, EditStep):
            weights, code = self._watch.fingerprint(), getattr(compilation.program, "code", None)
            types = tuple(getattr(value, "dtype", None) for value in entered.values)
            constants = constants_of(compilation.capture, call.values)
            facts = (id(compilation), code, entered.sizes, types, weights, constants)
            self._checked.edit(
                call,
                facts,
                lambda: check_edit(step, call, weights, self._checked.on_host),
                lambda: check_regions(step, call),
            )
        return call

    def _entered(self, given: Mapping[str, Any]) -> ValidatedInputs:
        inputs = normalised(given)
        check_arguments(self.module, self._signature, inputs)
        _, values, spec = roles_.flatten(inputs)
        compilation = self._known.serving(inputs, values, spec)
        self._watch.settle()
        sizes = roles_.observed_sizes(compilation.capture.leaves, values)
        return ValidatedInputs(values, spec, sizes, compilation)

    def _dense(self, call: CheckedCall) -> Any:
        """Run a call that has no program; an edit keeps the recording outside the mask.

        Runs the module itself, or, for an edit whose capture has a graph, that graph in full, so
        that the result is that of a program.
        """
        graph = call.compilation.marked
        if isinstance(call.step, EditStep) and graph is not None and call.step.cache.given:
            assert call.mask is not None
            cache = call.step.cache
            there = device_of(call)
            given = [moved(v, there) if isinstance(v, Tensor) else v for v in cache.given]
            flat = edit_in_full(graph, call.values, given, call.mask, cache.output)
            pairs = zip(flat, cache.output, strict=True)
            return unflatten(call, [masked(new, old, call.mask) for new, old in pairs])
        output = self.module(**pytree.tree_unflatten(call.values, call.spec))
        self._watch.settle()
        flat, call.output_spec = pytree.tree_flatten(output)
        if isinstance(call.step, RecordStep):
            cache = StepCache(
                dense_code(call),
                dict(call.sizes),
                dtype_of(call),
                [copy_of(t) for t in flat],
                steps_of(call),
                self._watch.fingerprint(),
                constants_of(call.compilation.capture, call.values),
                given=[] if graph is None else list(map(copy_of, call.values)),
            )
            return output, cache
        if isinstance(call.step, EditStep):
            assert call.mask is not None
            kept = [
                masked(new, old, call.mask)
                for new, old in zip(flat, call.step.cache.output, strict=True)
            ]
            return unflatten(call, kept)
        return output


def normalised(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Expand timesteps to one number per request: requests at different steps share a graph."""
    if not isinstance(inputs, Mapping):
        raise InputError(f"inputs must be a mapping of argument names, got {type(inputs).__name__}")
    known = next((v for v in inputs.values() if isinstance(v, Tensor) and v.dim() >= 3), None)
    if known is None:
        return dict(inputs)
    batch = known.shape[0]
    out = dict(inputs)
    for name, value in inputs.items():
        if not any(w in f"_{name}_" for w in roles_.STEP_WORDS) or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)) and "timestep" in name:
            dtype = torch.float32 if isinstance(value, float) else torch.long
            out[name] = torch.full((batch,), value, dtype=dtype, device=known.device)
            continue
        single = isinstance(value, Tensor) and value.numel() == 1 and value.dim() <= 1
        if single and value.shape != (batch,):
            out[name] = value.reshape(1).expand(batch).contiguous()
    return out
