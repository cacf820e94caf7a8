"""CompiledDenoiser: what users hold. One ragged batch per step, whatever its members ask for."""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx import roles as roles_
from maskfx.capture import Capture, capture, copies, has_meta, same_values, with_batch
from maskfx.compiler import Compilation, compile_capture
from maskfx.config import Settings
from maskfx.errors import CacheError, InputError, MaskError, MissingRequest
from maskfx.lanes import Lane
from maskfx.passes.context import derive
from maskfx.program import Program, Region, SideGraph
from maskfx.runtime.cache import StepCache, keep_rows
from maskfx.runtime.frame import Frame, Member, place_rows, tap_parts
from maskfx.runtime.runner import Fetch, Runner
from maskfx.runtime.sites import SitesMemo
from maskfx.weights import Change, Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EditStep:
    """Compute the masked sites only; the rest comes from `cache`.

    `mask` is boolean, True = edit: (height, width) of the latent, or (tokens,) for packed inputs.
    `any_step` allows a cache that was recorded at another timestep. `plan` names, by the number of
    a region (`CompiledDenoiser.regions`), the sites that it computes from loaded inputs: a mask
    that covers `mask`. A region that isn't named computes what is masked.
    """

    inputs: Mapping[str, Any]
    mask: Tensor
    cache: StepCache
    any_step: bool = False
    plan: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordStep:
    """Compute everything and keep what later edits need."""

    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class DenseStep:
    """Compute everything."""

    inputs: Mapping[str, Any]


AnyStep = EditStep | RecordStep | DenseStep


@dataclass
class Call:
    """One member of a step: its flattened arguments and the compilation that serves it."""

    step: AnyStep
    values: list[Any]
    spec: pytree.TreeSpec
    sizes: dict[str, int]
    compilation: Compilation
    mask: Tensor | None = None
    plan: dict[int, Tensor] = field(default_factory=dict)
    output_spec: pytree.TreeSpec | None = None


@dataclass
class SideMemo:
    """Results of a request graph, kept as long as the very same tensors come in."""

    limit: int = 64
    kept: OrderedDict[tuple[Any, ...], tuple[list[Any], Sequence[Any]]] = field(
        default_factory=OrderedDict
    )

    def run(
        self, side: SideGraph, capture: Capture, values: Sequence[Any], owner: int, batch: int
    ) -> Sequence[Any]:
        key: list[Any] = [owner, batch]
        held = []
        tensors = [values[i] for i in side.used if isinstance(values[i], Tensor)]
        if any(t.is_inference() for t in tensors):  # they change without a trace
            return run_side(side, capture, values)
        for i in side.used:
            value, leaf = values[i], capture.leaves[i]
            if isinstance(value, Tensor) and not leaf.step:
                key.append((id(value), value._version))
                held.append(value)
            elif isinstance(value, Tensor):
                key.append(tuple(value.shape))
        full = tuple(key)
        found = self.kept.get(full)
        if found is None:
            found = self.kept[full] = (held, run_side(side, capture, values))
            if len(self.kept) > self.limit:
                self.kept.popitem(last=False)
        else:
            self.kept.move_to_end(full)
        return found[1]


def run_side(side: SideGraph, capture: Capture, values: Sequence[Any]) -> Sequence[Any]:
    """A side graph's results; one whose batch is frozen runs as often as the call needs."""
    fixed = capture.fixed_batch
    batch = next(
        (
            v.shape[leaf.roles.index("batch")]
            for v, leaf in zip(values, capture.leaves, strict=True)
            if "batch" in leaf.roles
        ),
        1,
    )
    if fixed is None or fixed == batch or not side.lanes:
        results: Sequence[Any] = side.module(*values)
        return results
    runs = [
        side.module(*with_batch(capture.leaves, values, fixed, start))
        for start in range(0, batch, fixed)
    ]
    joined = []
    for parts, lane in zip(zip(*runs, strict=True), side.lanes, strict=True):
        joined.append(torch.cat(parts)[:batch] if lane.has_batch else parts[0])
    return joined


class CompiledDenoiser:
    """A denoiser that computes dense, records, and edits on active sites only."""

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        roles: Mapping[str, roles_.Roles] | None = None,
        example_inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self.module, self.settings, self.roles = module, settings, roles
        self.compilations: list[Compilation] = []
        self.programs: dict[str, Program] = {}
        self.failures: list[str] = []
        self._sites = SitesMemo()
        self._sides = SideMemo()
        self._frames: OrderedDict[Any, Frame] = OrderedDict()
        self._runners: dict[tuple[str, bool], Callable[[Fetch], Any]] = {}
        self._watch = Weights(module)
        self._proved: set[Any] = set()
        self._signature = signature_of(module)
        self._weights: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        if example_inputs is not None:
            self._call(DenseStep(example_inputs))

    # What users call.

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Dense, as the module; under `maskfx.editing(...)` an edit or a recording."""
        active = _EDITING.get()
        if active is None or args:
            return self.module(*args, **inputs)
        return active.run(self, inputs)

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
        for i, step in enumerate(steps):
            if not isinstance(step, (EditStep, RecordStep, DenseStep)):
                raise InputError(
                    f"step(): member {i} is a {type(step).__name__}; pass EditStep, RecordStep or "
                    "DenseStep"
                )
        self._follow_module()
        calls = [self._call(s) for s in steps]
        results: list[Any] = [None] * len(calls)
        groups: dict[str | None, list[int]] = {}
        for i, call in enumerate(calls):
            if (
                isinstance(call.step, EditStep)
                and call.mask is not None
                and not bool(call.mask.any())
            ):
                results[i] = self._unflatten(call, [copy_of(t) for t in call.step.cache.output])
                continue
            program = call.compilation.program
            groups.setdefault(program.code if program else None, []).append(i)
        for code, members in groups.items():
            outputs = (
                [self._dense(calls[i]) for i in members]
                if code is None
                else self._ragged(self.programs[code], [calls[i] for i in members])
            )
            for i, output in zip(members, outputs, strict=True):
                results[i] = output
        return results

    def refresh(self) -> None:
        """Say that weights were changed through `.data`, which leaves no trace."""
        self._weights_changed()
        for program in self.programs.values():
            for item in program.interface.derived:
                origin = program.origins[item.origin]
                getattr(program.module, item.name).copy_(derive(origin, item.order, item.shape))

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The rewritten graph of the first capture (captured at the first call, if not yet)."""
        if not self.programs:
            raise MissingRequest(
                "no graph yet: call the denoiser once, or pass example_inputs to compile(); "
                + " ".join(self.failures)
            )
        return next(iter(self.programs.values())).module

    @property
    def regions(self) -> list[Region]:
        """The parts of the graph whose sites a plan may choose; region 1 is the first."""
        return list(next(iter(self.programs.values())).interface.regions) if self.programs else []

    def explain(self, mask_ratio: float = 0.1) -> str:
        """What each pass did, what runs where, and what it costs."""
        from maskfx.explain import explain

        return explain(self, mask_ratio)

    # Following the module's weights.

    def _follow_module(self) -> None:
        change = self._watch.change()
        if change is Change.TENSORS:  # captured graphs hold the tensors of before
            self.compilations.clear()
            self.programs.clear()
            self._frames.clear()
            self._runners.clear()
            self._watch = Weights(self.module)
        if change is not Change.NONE:
            self._weights_changed()

    def _weights_changed(self) -> None:
        """What was computed from weights is computed again; pre-packed code compiled again."""
        self._watch.forget()
        self._sides.kept.clear()
        for frame in self._frames.values():
            frame.forget_given()
        if self.settings.prepack:
            self._runners.clear()

    # One call.

    def _call(self, step: AnyStep) -> Call:
        inputs = self._normalise(step.inputs)
        check_arguments(self.module, self._signature, inputs)
        paths, values, spec = roles_.flatten(inputs)
        compilation = self._find(inputs, values, spec)
        self._watch.settle()
        leaves = compilation.capture.leaves
        sizes = roles_.observed_sizes(leaves, values)
        call = Call(step, values, spec, sizes, compilation)
        if isinstance(step, EditStep):
            call.mask = self._check_edit(step, call)
            call.plan = check_plan(step, call)
        return call

    def _normalise(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Timesteps as one number per request: requests at different steps share a graph."""
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"inputs must be a mapping of argument names, got {type(inputs).__name__}"
            )
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

    def _find(
        self, inputs: dict[str, Any], values: list[Any], spec: pytree.TreeSpec
    ) -> Compilation:
        """The compilation that accepts these arguments; a new one if none does."""
        disagreement: InputError | None = None
        for compilation in self.compilations:
            if spec != compilation.capture.in_spec or not same_ranks(compilation.capture, values):
                continue
            try:
                sizes = roles_.observed_sizes(compilation.capture.leaves, values)
            except InputError as error:
                if ": text:" not in str(error):  # texts of other lengths get a capture of their own
                    disagreement = error
                continue
            if compilation.capture.serves(self.module, spec, values, sizes):
                return self._proven(compilation, values, spec)
        if disagreement is not None:
            raise disagreement
        with torch.no_grad():
            self._warm_tables(inputs, values)
            new = compile_capture(
                capture(self.module, inputs, self.roles), plans=self.settings.plans
            )
        if new.program is not None:
            new.program = self.programs.setdefault(new.program.code, new.program)
        self.compilations.append(new)
        return self._proven(new, values, spec)

    def _proven(
        self, compilation: Compilation, values: list[Any], spec: pytree.TreeSpec
    ) -> Compilation:
        """The compilation, once its program was compared with the module at this size."""
        program, leaves = compilation.program, compilation.capture.leaves
        if (
            program is None
            or compilation.capture.pyramid.base is None
            and "image" not in compilation.capture.pyramid.segments
        ):
            return compilation
        sizes = roles_.observed_sizes(leaves, values)
        key = (program.code, sizes.get("y"), sizes.get("x"), sizes.get("tokens"))
        if key not in self._proved:
            self._proved.add(key)
            if has_meta(self.module, values):
                return compilation
            with torch.no_grad():
                self._prove(compilation, program, values, spec, sizes)
        return compilation

    def _warm_tables(self, inputs: dict[str, Any], values: list[Any]) -> None:
        """Some modules fill tables at their first call; under capture they would hold fakes."""
        if not self.compilations and not has_meta(self.module, values):
            try:
                self.module(**clone_tensors(inputs))
            except Exception as error:
                raise InputError(
                    f"{type(self.module).__name__} itself fails on these inputs: {error}"
                ) from error

    def _prove(
        self,
        compilation: Compilation,
        program: Program,
        values: list[Any],
        spec: pytree.TreeSpec,
        sizes: dict[str, int],
    ) -> None:
        """Record and edit once beside the module; a program that isn't right is given up."""
        shape = (sizes["y"], sizes["x"]) if "y" in sizes else (sizes["tokens"],)
        mask = torch.arange(prod(shape)).view(shape) % 3 == 1
        wanted = self.module(**pytree.tree_unflatten(copies(values), spec))
        inputs = pytree.tree_unflatten(copies(values), spec)

        def call(step: AnyStep, mask: Tensor | None = None) -> Call:
            return Call(step, copies(values), spec, sizes, compilation, mask)

        try:
            recorded, cache = self._ragged(program, [call(RecordStep(inputs))])[0]
            edited = self._ragged(program, [call(EditStep(inputs, mask, cache), mask)])[0]
            right = same_values(recorded, wanted) and same_values(edited, wanted)
            reason = "its rows give another result than the module"
        except Exception as error:
            log.debug("a program fails", exc_info=True)
            right, reason = False, f"its rows fail: {type(error).__name__}: {error}"
        if not right:
            compilation.program = None
            compilation.reasons = {**compilation.reasons, "program": f"{reason} at {sizes}"}

    def _check_edit(self, step: EditStep, call: Call) -> Tensor:
        cache, sizes = step.cache, call.sizes
        if not isinstance(cache, StepCache):
            raise CacheError(
                f"EditStep.cache: expected a StepCache from record(), got {type(cache).__name__}"
            )
        wanted = (sizes["y"], sizes["x"]) if "y" in sizes else (sizes.get("tokens", 0),)
        mask = step.mask
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            seen = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise MaskError(
                f"EditStep.mask: expected a boolean tensor of shape {wanted}, got {seen}; "
                "use mask > 0.5"
            )
        if tuple(mask.shape) != wanted:
            raise MaskError(
                f"EditStep.mask: expected shape {wanted}, got {tuple(mask.shape)}; "
                "resize it to the latent (by max-pooling, so that thin strokes survive)"
            )
        program = call.compilation.program
        if cache.dtype != self._dtype(call):
            raise CacheError(
                f"EditStep.cache holds {cache.dtype}, the inputs are {self._dtype(call)}; "
                "record it again"
            )
        if cache.weights != self._watch.fingerprint():
            raise CacheError(
                "EditStep.cache was recorded with other weights (another model, or before a "
                "change of weights); record it again"
            )
        if cache.constants != constants_of(call.compilation.capture, call.values):
            raise CacheError(
                f"EditStep.cache was recorded with {cache.constants}, the inputs say "
                f"{constants_of(call.compilation.capture, call.values)}; record it again"
            )
        if cache.program != (program.code if program else self._dense_code(call)):
            raise CacheError(
                "EditStep.cache was recorded by another model, or with other argument structure; "
                "record it again"
            )
        for role, size in cache.sizes.items():
            if not role.startswith("text:") and sizes.get(role) != size:
                raise CacheError(
                    f"EditStep.cache was recorded at {role}={size}, the inputs have "
                    f"{sizes.get(role)}; "
                    "record one for this size"
                )
        if not step.any_step:
            for name, now in self._steps(call).items():
                recorded = cache.step.get(name)
                if recorded is not None and not torch.equal(recorded, now):
                    raise CacheError(
                        f"EditStep.cache was recorded at {name}={recorded.tolist()}, "
                        "the inputs have "
                        f"{now.tolist()}; use this step's cache, or say any_step=True"
                    )
        return mask.detach().cpu()

    @staticmethod
    def _steps(call: Call) -> dict[str, Tensor]:
        """The arguments that say which step this is."""
        leaves = call.compilation.capture.leaves
        return {
            leaf.path: v
            for leaf, v in zip(leaves, call.values, strict=True)
            if leaf.tensor
            and leaf.step
            and ("timestep" in leaf.path or leaf.path in ("t", "sigma"))
            and v.dim() <= 1
        }

    @staticmethod
    def _dense_code(call: Call) -> str:
        return f"dense {call.spec}"

    # Running.

    def _dense(self, call: Call) -> Any:
        """No program: the module itself; an edit keeps the record outside the mask."""
        output = self.module(**pytree.tree_unflatten(call.values, call.spec))
        self._watch.settle()
        flat, call.output_spec = pytree.tree_flatten(output)
        if isinstance(call.step, RecordStep):
            cache = StepCache(
                self._dense_code(call),
                dict(call.sizes),
                self._dtype(call),
                [copy_of(t) for t in flat],
                self._steps(call),
                self._watch.fingerprint(),
                constants_of(call.compilation.capture, call.values),
            )
            return output, cache
        if isinstance(call.step, EditStep):
            assert call.mask is not None
            kept = [
                masked(new, old, call.mask)
                for new, old in zip(flat, call.step.cache.output, strict=True)
            ]
            return self._unflatten(call, kept)
        return output

    def _ragged(self, program: Program, calls: Sequence[Call]) -> list[Any]:
        self._follow_weights(program)
        interface = program.interface
        members = []
        for call in calls:
            compilation = call.compilation
            assert compilation.request is not None
            assert compilation.dense is not None
            sites = self._sites.get(
                program.code, interface.pyramid, call.sizes, self._effective_mask(call), call.plan
            )
            given: dict[str, Sequence[Any]] = {"step": call.values}
            given["request"] = self._sides.run(
                compilation.request,
                compilation.capture,
                call.values,
                id(compilation),
                call.sizes["batch"],
            )
            dense = compilation.dense
            given["dense"] = (
                run_side(dense, compilation.capture, call.values) if dense.lanes else ()
            )
            cache = call.step.cache if isinstance(call.step, EditStep) and not sites.full else None
            members.append(
                Member(sites, call.sizes["batch"], given, cache, isinstance(call.step, RecordStep))
            )
        frame = self._frame(program, members)
        recording = any(m.recording for m in members)
        result = self._runner(program, recording, frame, members)(frame.fetch(members))
        outputs, emitted = result if recording else (result, ())
        return [
            self._result(program, frame, calls, members, i, outputs, emitted)
            for i in range(len(calls))
        ]

    def _effective_mask(self, call: Call) -> Tensor | None:
        if not isinstance(call.step, EditStep) or call.mask is None or bool(call.mask.all()):
            return None
        return call.mask

    def _frame(self, program: Program, members: Sequence[Member]) -> Frame:
        key = (program.code, tuple(id(m.sites) for m in members), tuple(m.batch for m in members))
        frame = self._frames.get(key)
        if frame is None:
            frame = Frame(
                program.interface, tuple(m.sites for m in members), tuple(m.batch for m in members)
            )
            self._frames[key] = frame
            if len(self._frames) > 32:
                self._frames.popitem(last=False)
        else:
            self._frames.move_to_end(key)
        return frame

    def _runner(
        self, program: Program, recording: bool, frame: Frame, members: Sequence[Member]
    ) -> Callable[[Fetch], Any]:
        """What runs a program; recordings are rare and run eagerly."""
        key = (program.code, recording)
        if key not in self._runners:
            if self.settings.inductor and not recording:
                from maskfx.inductor import compile_rows

                example = frame.inputs(members)
                self._runners[key] = compile_rows(program, self.settings, example)
            else:
                module = program.recording if recording else program.module
                self._runners[key] = Runner(module, self.settings.prepack and not recording)
        return self._runners[key]

    def _result(
        self,
        program: Program,
        frame: Frame,
        calls: Sequence[Call],
        members: Sequence[Member],
        index: int,
        outputs: Sequence[Tensor],
        emitted: Sequence[Tensor],
    ) -> Any:
        call, member = calls[index], members[index]
        flat = []
        for k, (lane, rows) in enumerate(zip(program.interface.outputs, outputs, strict=True)):
            assert lane is not None
            own = own_rows(rows, lane, frame, index)
            if lane.kind != "rows":
                flat.append(own.clone())
                continue
            recorded = member.cache.output[k] if member.cache is not None else None
            full = recorded.clone() if recorded is not None else empty_output(own, lane, member)
            place_rows(full, own, lane, member.sites)
            flat.append(full)
        output = self._unflatten(call, flat)
        if not member.recording:
            return output
        cache = StepCache(
            program.code,
            dict(call.sizes),
            self._dtype(call),
            [t.clone() for t in flat],
            self._steps(call),
            self._watch.fingerprint(),
            constants_of(call.compilation.capture, call.values),
        )
        alone = len(calls) == 1
        taps = list(program.interface.taps.values())
        parts = [
            [
                p if alone and len(t.segments) == 1 else p.clone()
                for p in tap_parts(t, e, frame, index)
            ]
            for t, e in zip(taps, emitted, strict=True)
        ]
        keep_rows(cache, taps, parts)
        return output, cache

    @staticmethod
    def _dtype(call: Call) -> torch.dtype:
        leaves = call.compilation.capture.leaves
        value: Tensor = next(
            v
            for v, leaf in zip(call.values, leaves, strict=True)
            if leaf.step and leaf.tensor and v.dim() >= 3
        )
        return value.dtype

    @staticmethod
    def _unflatten(call: Call, flat: list[Any]) -> Any:
        capture_ = call.compilation.capture
        spec = capture_.out_spec if capture_.module is not None else call.output_spec
        assert spec is not None
        return pytree.tree_unflatten(flat, spec)

    def _follow_weights(self, program: Program) -> None:
        """Derive re-laid weights again when their origin changed in place."""
        for item in program.interface.derived:
            origin = program.origins[item.origin]
            key = f"{id(program)}:{item.name}"
            known = self._weights.get(key)
            if known is None or known[0]() is not origin or known[1] != origin._version:
                if known is not None:
                    getattr(program.module, item.name).copy_(derive(origin, item.order, item.shape))
                self._weights[key] = (weakref.ref(origin), origin._version)


def check_plan(step: EditStep, call: Call) -> dict[int, Tensor]:
    """The sites that each region computes."""
    program = call.compilation.program
    count = len(program.interface.regions) if program else 0
    plan = {}
    for region, sites in step.plan.items():
        if not 1 <= region <= count:
            known = f"there are regions 1 to {count}" if count else "this denoiser has none"
            raise InputError(
                f"EditStep.plan: region {region}, but {known}; compile with plans=True, and see "
                "CompiledDenoiser.regions"
            )
        if not isinstance(sites, Tensor) or sites.dtype != torch.bool:
            raise MaskError(f"EditStep.plan[{region}]: expected a boolean mask, got {sites!r:.60}")
        if sites.shape != step.mask.shape or bool((step.mask & ~sites).any()):
            raise MaskError(
                f"EditStep.plan[{region}]: expected a mask of shape {tuple(step.mask.shape)} that "
                f"covers EditStep.mask, got shape {tuple(sites.shape)}"
            )
        plan[region] = sites.detach().cpu()
    return plan


def own_rows(rows: Tensor, lane: Lane, frame: Frame, index: int) -> Tensor:
    """One member's part of an output: (batch, active, ...) rows, or its requests' values."""
    first = sum(frame.batches[:index])
    batch = frame.batches[index]
    if lane.kind != "rows":
        return rows[first : first + batch]
    parts, base = [], 0
    for segment in lane.segments:
        counts = frame.counts(segment)
        start = base + sum(counts[:first])
        parts.append(
            rows[start : start + sum(counts[first : first + batch])].unflatten(0, (batch, -1))
        )
        base += sum(counts)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def empty_output(rows: Tensor, lane: Lane, member: Member) -> Tensor:
    from maskfx.lanes import Batch
    from maskfx.runtime.frame import atom_size

    shape = []
    for dim in lane.dims:
        size = 1
        for atom in dim:
            size *= member.batch if isinstance(atom, Batch) else atom_size(atom, member.sites)
        shape.append(size)
    return rows.new_empty(shape)


def constants_of(capture_: Capture, values: Sequence[Any]) -> list[Any]:
    """Arguments that are no tensors: sizes of the picture among them."""
    leaves = zip(capture_.leaves, values, strict=True)
    return [v for leaf, v in leaves if not leaf.tensor and leaf.argument != "return_dict"]


def signature_of(module: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def check_arguments(
    module: nn.Module, signature: inspect.Signature | None, inputs: Mapping[str, Any]
) -> None:
    """Do the inputs fit the module's signature?"""
    if signature is None:
        return
    try:
        signature.bind(**inputs)
    except TypeError as error:
        raise MissingRequest(
            f"{type(module).__name__}: {error}; it got {sorted(inputs)}; pass the arguments that "
            "the pipeline passes"
        ) from error


def same_ranks(capture_: Capture, values: Sequence[Any]) -> bool:
    return all(
        isinstance(v, Tensor) == leaf.tensor and (not leaf.tensor or v.dim() == len(leaf.roles))
        for v, leaf in zip(values, capture_.leaves, strict=True)
    )


def clone_tensors(tree: Any) -> Any:
    return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, tree)


def copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def masked(new: Any, old: Any, mask: Tensor) -> Any:
    """New values where masked, recorded ones elsewhere; values of another shape are new."""
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return new
    if mask.dim() == 2 and new.dim() >= 3 and new.shape[-2:] == mask.shape:
        return torch.where(mask, new, old)
    if mask.dim() == 1 and new.dim() == 3 and new.shape[1] == mask.shape[0]:
        return torch.where(mask[:, None], new, old)
    return new


# backend="maskfx": the mask and the cache come from the surroundings.


@dataclass
class Editing:
    """What calls inside `with maskfx.editing(...)` do."""

    mask: Tensor | None
    caches: tuple[StepCache, ...] = ()
    recorded: list[StepCache] = field(default_factory=list)

    def run(
        self, denoiser: CompiledDenoiser, inputs: Mapping[str, Any], own: set[str] | None = None
    ) -> Any:
        """Edit with the one cache, or with the first of several whose program is in `own`."""
        if self.mask is not None:
            fitting = [c for c in self.caches if c.program in (own or ())] or list(self.caches)
            return denoiser.edit([EditStep(inputs, self.mask, fitting[0])])[0]
        output, cache = denoiser.record(**inputs)
        self.recorded.append(cache)
        return output


_EDITING: ContextVar[Editing | None] = ContextVar("maskfx_editing", default=None)


def current_editing() -> Editing | None:
    """What the surrounding `with maskfx.editing(...)` asks for."""
    return _EDITING.get()


@contextlib.contextmanager
def editing(
    mask: Tensor | None = None, cache: StepCache | Sequence[StepCache] | None = None
) -> Iterator[Editing]:
    """Let calls of compiled denoisers edit (`mask` and `cache`), or record (neither).

    Works for `torch.compile(module, backend="maskfx")` and for a CompiledDenoiser alike; caches
    of recording calls gather in `.recorded`. A module that Dynamo cuts into several graphs records
    several caches: pass them as a list.
    """
    if (mask is None) != (cache is None):
        raise InputError("editing() needs both mask= and cache= to edit, or neither to record")
    caches = () if cache is None else (cache,) if isinstance(cache, StepCache) else tuple(cache)
    if mask is not None and not caches:
        raise InputError("editing() got an empty list of caches; record first")
    token = _EDITING.set(Editing(mask, caches))
    try:
        value = _EDITING.get()
        assert value is not None
        yield value
    finally:
        _EDITING.reset(token)
