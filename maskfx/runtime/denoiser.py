"""CompiledDenoiser: what users hold. One ragged batch per step, whatever its members ask for."""

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
    """Says what each edit of a batch loads and what it projects again (`StepPlanner`)."""

    def plan_edits(self, steps: Sequence[EditStep]) -> list[EditStep]: ...


class CompiledDenoiser:
    """A denoiser that computes dense, records, and edits on active sites only."""

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
        self._known = ProgramCache(module, settings, roles, self._executor)
        self._batcher = DenseBatcher(module, roles)
        self._signature = signature_of(module)
        self._checked = ValidationCache()
        self._lock = threading.RLock()  # nothing is forgotten while a step runs
        self.planner: Planner | None = None
        if example_inputs is not None:
            self._call(DenseStep(example_inputs))

    # What users call.

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Dense, as the module; under `maskfx.editing(...)` an edit or a recording."""
        active = current_editing()
        if active is None or args:
            return self.module(*args, **inputs)
        return active.run(self, inputs)

    @torch.no_grad()
    def plain(self, **inputs: Any) -> Any:
        """The module itself."""
        self._follow_module()
        output = self.module(**inputs)
        self._watch.settle()
        return output

    @torch.no_grad()
    def alike(self, calls: Sequence[Mapping[str, Any]]) -> list[CallGroup]:
        """Which of these dense calls the module can answer together."""
        self._follow_module()
        groups = self._batcher.groups(list(map(normalised, calls)))
        self._watch.settle()
        return groups

    @torch.no_grad()
    def plain_together(self, group: CallGroup) -> list[Any]:
        """The module itself, once for several calls; `alike` has just looked at its weights."""
        outputs = self._batcher.run(group)
        self._watch.settle()
        return outputs

    @property
    def stays_alone(self) -> list[str]:
        """Why dense calls of some kind don't share a call of the module."""
        return list(self._batcher.refused.values())

    def record(self, **inputs: Any) -> tuple[Any, StepCache]:
        """The dense output, and a cache for edits of this step."""
        result: tuple[Any, StepCache] = self.step([RecordStep(inputs)])[0]
        return result

    def edit(self, steps: Sequence[EditStep]) -> list[Any]:
        """One ragged batch of edits; one output per member, of the module's full shape."""
        return self.step(steps)

    def batch(self, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
        """All sites of every member, whatever their sizes, in one ragged batch."""
        return self.step([DenseStep(i) for i in inputs])

    @torch.no_grad()
    def step(self, steps: Sequence[AnyStep]) -> list[Any]:
        """Any mix of edits, recordings and dense members, in one ragged call per program."""
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
        """Begin to load what a later `step(steps)` will read; call it before the step in between.

        Masks, caches and plans are those of that step; of `inputs` only the sizes count. `only`:
        what was begun for other steps is given up. Without a loader nothing happens.
        """
        loads = self._executor.loads
        if loads.loader is None:
            return []
        groups = list(self.batches(steps))
        if only:
            loads.forget_others(groups)
        return [loads.ahead(*group) for group in groups]

    def batches(self, steps: Sequence[EditStep]) -> Iterator[tuple[Program, Frame, list[Member]]]:
        """What edits with some sites to compute come down to: ragged batches, one per program and
        device."""
        for program, members in self.members(steps):
            for frame, chosen in self._executor.batches(program, members):
                yield program, frame, chosen

    def members(self, steps: Sequence[EditStep]) -> Iterator[tuple[Program, list[Member]]]:
        """Edits with some sites to compute as members of batches, in their order, per program."""
        groups: dict[str, list[CheckedCall]] = {}
        for step in steps:
            call = self._call(step)
            program = call.compilation.program
            if program is not None and call.mask is not None and bool(call.mask.any()):
                groups.setdefault(program.code, []).append(call)
        for code, calls in groups.items():
            yield self.programs[code], self._executor.members(self.programs[code], calls)

    def mask_shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape of a mask for these inputs: (height, width) of the latent, or (tokens,)."""
        with self._lock:
            sizes = self._call(DenseStep(inputs)).sizes
        return (sizes["y"], sizes["x"]) if "y" in sizes else (sizes.get("tokens", 0),)

    def refresh(self) -> None:
        """Say that weights were changed through `.data`, which leaves no trace."""
        self._weights_changed()
        for program in self.programs.values():
            self._executor.derive(program)

    def fingerprint(self) -> str:
        """What tells these weights from others; recordings of other weights are refused."""
        self._follow_module()
        return self._watch.fingerprint()

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The rewritten graph of the first capture (captured at the first call, if not yet)."""
        if not self.programs:
            raise MissingRequest(
                "no graph: either nothing was called yet (call the denoiser once, or pass "
                "example_inputs to compile()), or all of it runs dense; explain() says why"
            )
        return next(iter(self.programs.values())).module

    @property
    def compilations(self) -> list[Compilation]:
        """What was captured so far."""
        return self._known.serves

    @property
    def programs(self) -> dict[str, Program]:
        """The rewritten graphs, by what they compute."""
        return self._known.programs

    @property
    def watch(self) -> Stopwatch | None:
        """What times the inputs of each batch, if somebody asked for it."""
        return self._executor.watch

    @watch.setter
    def watch(self, watch: Stopwatch | None) -> None:
        self._executor.watch = watch

    @property
    def waited(self) -> float:
        """Seconds in which its graphs have waited for inputs so far: what loads didn't hide."""
        return self._executor.waited

    @property
    def loader(self) -> Loader | None:
        """What loads cached rows while a graph computes."""
        return self._executor.loads.loader

    @property
    def regions(self) -> list[Region]:
        """The parts of the graph that may have other sites than the mask's, numbered from 1.

        A plan may choose those of a region of keys and values, `EditStep.wide` those of a stretch.
        """
        return list(next(iter(self.programs.values())).interface.regions) if self.programs else []

    @property
    def stretches(self) -> list[Region]:
        """The regions that are stretches of blocks, from the input on: stretch 1 is the first."""
        return [region for region in self.regions if region.kind == STRETCH]

    def explain(self, mask_ratio: float = 0.1) -> str:
        """What each pass did, what runs where, and what it costs."""
        from maskfx.runtime.explain import explain

        return explain(self, mask_ratio)

    # Following the module's weights.

    def _follow_module(self) -> None:
        bring(self.module)
        change = self._watch.change()
        if change is WeightChange.TENSORS:  # captured graphs hold the tensors of before
            self.forget()
        if change is not WeightChange.NONE:
            self._weights_changed()

    def forget(self) -> None:
        """Capture the module again at its next call: it computes something else now."""
        with self._lock:
            self._known.forget()
            self._executor.forget()
            self._batcher.forget()
            self._checked.forget()
            self._watch = Weights(self.module)

    def _weights_changed(self) -> None:
        """What was computed from weights is computed again; pre-packed code compiled again."""
        self._watch.forget()
        self._checked.forget()
        self._known.doubt()
        self._executor.forget_weights()

    # One call.

    def _call(self, step: AnyStep) -> CheckedCall:
        """A member of a step, checked but for its timestep."""
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
        """No program: the module itself; an edit keeps the record outside the mask.

        Where there is a graph, edits run that, so that they are those of a program.
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
    """Timesteps as one number per request: requests at different steps share a graph."""
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
