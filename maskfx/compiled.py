"""CompiledDenoiser: what users hold. One ragged batch per step, whatever its members ask for."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
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
from maskfx.program import Program, SideGraph
from maskfx.runtime.cache import StepCache, keep_rows
from maskfx.runtime.frame import Frame, Member, place_rows, tap_parts
from maskfx.runtime.sites import SitesMemo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EditStep:
    """Compute the masked sites only; the rest comes from `cache`.

    `mask` is boolean, True = edit: (height, width) of the latent, or (tokens,) for packed inputs.
    `any_step` allows a cache that was recorded at another timestep.
    """

    inputs: Mapping[str, Any]
    mask: Tensor
    cache: StepCache
    any_step: bool = False


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
    output_spec: pytree.TreeSpec | None = None


@dataclass
class SideMemo:
    """Results of a request graph, kept as long as the very same tensors come in."""

    limit: int = 64
    kept: OrderedDict[tuple[Any, ...], tuple[list[Any], Sequence[Any]]] = field(
        default_factory=OrderedDict
    )

    def run(
        self, side: SideGraph, capture: Capture, values: Sequence[Any], owner: int
    ) -> Sequence[Any]:
        key: list[Any] = [owner]
        held = []
        for i in side.used:
            value, leaf = values[i], capture.leaves[i]
            if isinstance(value, Tensor) and not leaf.step:
                version = -1 if value.is_inference() else value._version
                key.append((id(value), version))
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
        self._runners: dict[str, Any] = {}
        self._packed: dict[str, int] = {}
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

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The rewritten graph of the first capture (captured at the first call, if not yet)."""
        if not self.programs:
            raise MissingRequest(
                "no graph yet: call the denoiser once, or pass example_inputs to compile(); "
                + " ".join(self.failures)
            )
        return next(iter(self.programs.values())).module

    def explain(self, mask_ratio: float = 0.1) -> str:
        """What each pass did, what runs where, and what it costs."""
        from maskfx.explain import explain

        return explain(self, mask_ratio)

    # One call.

    def _call(self, step: AnyStep) -> Call:
        inputs = self._normalise(step.inputs)
        paths, values, spec = roles_.flatten(inputs)
        compilation = self._find(inputs, values, spec)
        leaves = compilation.capture.leaves
        sizes = roles_.observed_sizes(leaves, values)
        call = Call(step, values, spec, sizes, compilation)
        if isinstance(step, EditStep):
            call.mask = self._check_edit(step, call)
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
            elif isinstance(value, Tensor) and value.numel() == 1 and value.dim() <= 1:
                if value.shape != (batch,):
                    out[name] = value.reshape(1).expand(batch).contiguous()
        return out

    def _find(
        self, inputs: dict[str, Any], values: list[Any], spec: pytree.TreeSpec
    ) -> Compilation:
        """The compilation that accepts these arguments; a new one if none does."""
        for compilation in self.compilations:
            if spec != compilation.capture.in_spec or not same_ranks(compilation.capture, values):
                continue
            try:
                sizes = roles_.observed_sizes(compilation.capture.leaves, values)
            except InputError:
                continue
            if compilation.capture.serves(self.module, spec, values, sizes):
                return compilation
        with torch.no_grad():
            self._warm_tables(inputs, values)
            new = compile_capture(capture(self.module, inputs, self.roles))
        if new.program is not None and new.program.code not in self.programs:
            self._prove(new, values, spec)
        if new.program is not None:
            known = self.programs.setdefault(new.program.code, new.program)
            new.program = known
        self.compilations.append(new)
        return new

    def _warm_tables(self, inputs: dict[str, Any], values: list[Any]) -> None:
        """Some modules fill tables at their first call; under capture they would hold fakes."""
        if not self.compilations and not has_meta(self.module, values):
            self.module(**clone_tensors(inputs))

    def _prove(self, new: Compilation, values: list[Any], spec: pytree.TreeSpec) -> None:
        """Run a new program once against the module; one that isn't right is given up."""
        program = new.program
        assert program is not None
        if has_meta(self.module, values):
            return
        sizes = roles_.observed_sizes(new.capture.leaves, values)
        shape = (sizes["y"], sizes["x"]) if "y" in sizes else (sizes["tokens"],)
        mask = torch.arange(prod(shape)).view(shape) % 3 == 1
        wanted = self.module(**pytree.tree_unflatten(copies(values), spec))
        self.programs[program.code] = program
        inputs = pytree.tree_unflatten(copies(values), spec)
        try:
            recorded, cache = self._ragged(
                program, [Call(RecordStep(inputs), copies(values), spec, sizes, new)]
            )[0]
            edit = EditStep(inputs, mask, cache)
            edited = self._ragged(program, [Call(edit, copies(values), spec, sizes, new, mask)])[0]
            right = same_values(recorded, wanted) and same_values(edited, wanted)
            reason = "its rows give another result than the module"
        except Exception as error:
            log.debug("a program fails", exc_info=True)
            right, reason = False, f"its rows fail: {type(error).__name__}: {error}"
        if not right:
            del self.programs[program.code]
            new.program, new.reasons = None, {**new.reasons, "program": reason}

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
        primary = next(
            v
            for v, leaf in zip(call.values, call.compilation.capture.leaves, strict=True)
            if leaf.step and leaf.tensor and v.dim() >= 3
        )
        if cache.dtype != primary.dtype:
            raise CacheError(
                f"EditStep.cache holds {cache.dtype}, the inputs are {primary.dtype}; "
                "record it again"
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
        flat, call.output_spec = pytree.tree_flatten(output)
        if isinstance(call.step, RecordStep):
            cache = StepCache(
                self._dense_code(call),
                dict(call.sizes),
                self._dtype(call),
                [copy_of(t) for t in flat],
                self._steps(call),
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
                program.code, interface.pyramid, call.sizes, self._effective_mask(call)
            )
            given: dict[str, Sequence[Any]] = {"step": call.values}
            given["request"] = self._sides.run(
                compilation.request, compilation.capture, call.values, id(compilation)
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
        inputs = frame.inputs(members)
        emitted: Sequence[Tensor] = ()
        if any(m.recording for m in members):
            outputs, emitted = program.recording(*inputs)
        else:
            outputs = self._runner(program, inputs)(*inputs)
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

    def _runner(self, program: Program, inputs: Sequence[Tensor]) -> Any:
        if not self.settings.inductor:
            return program.module
        if program.code not in self._runners:
            from maskfx.inductor import compile_rows

            self._runners[program.code] = compile_rows(program, self.settings, inputs)
        return self._runners[program.code]

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
        """Derive re-laid weights again when their origin changed in place.

        Pre-packed weights are part of the compiled code: it is compiled again.
        """
        if self.settings.prepack:
            version = sum(p._version for p in program.module.parameters())
            if self._packed.setdefault(program.code, version) != version:
                self._packed[program.code] = version
                self._runners.pop(program.code, None)
        for item in program.interface.derived:
            origin = program.origins[item.origin]
            key = f"{id(program)}:{item.name}"
            known = self._weights.get(key)
            if known is None or known[0]() is not origin or known[1] != origin._version:
                if known is not None:
                    getattr(program.module, item.name).copy_(derive(origin, item.order, item.shape))
                self._weights[key] = (weakref.ref(origin), origin._version)


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
