"""CompiledDenoiser: what users hold. One ragged batch per step, whatever its members ask for."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx import roles as roles_
from maskfx.ambient import current_editing
from maskfx.capture import capture, copies, copy_of, has_meta, same_values
from maskfx.checks import (
    check_arguments,
    check_edit,
    check_regions,
    dense_code,
    same_ranks,
    signature_of,
)
from maskfx.compiler import Compilation, compile_capture
from maskfx.config import Settings
from maskfx.errors import InputError, MissingRequest
from maskfx.loads import Loads, Stopwatch
from maskfx.passes.context import derive
from maskfx.program import STRETCH, Program, Region
from maskfx.runtime.cache import StepCache, keep_rows
from maskfx.runtime.frame import Frame, Member
from maskfx.runtime.loader import Loader, Loading
from maskfx.runtime.rows import empty_output, own_rows, place_rows, tap_parts
from maskfx.runtime.runner import Fetch, Runner
from maskfx.runtime.sites import SitesMemo
from maskfx.sides import SideMemo, run_side
from maskfx.steps import (
    AnyStep,
    Call,
    DenseStep,
    EditStep,
    RecordStep,
    clone_tensors,
    constants_of,
    dtype_of,
    effective_mask,
    masked,
    steps_of,
    unflatten,
)
from maskfx.weights import Change, Weights

log = logging.getLogger(__name__)


class Planner(Protocol):
    """Says what each edit of a batch loads and what it projects again (`maskfx.planning`)."""

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
        self.module, self.settings, self.roles = module, settings, roles
        self.compilations: list[Compilation] = []
        self.programs: dict[str, Program] = {}
        self._sites = SitesMemo()
        self._sides = SideMemo()
        self._frames: OrderedDict[Any, Frame] = OrderedDict()
        self._runners: dict[tuple[str, bool], Callable[[Fetch], Any]] = {}
        self._watch = Weights(module)
        self._proved: set[Any] = set()
        self._given_up: dict[str, str] = {}
        self._signature = signature_of(module)
        self._weights: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._loads = Loads(loader)
        self.watch: Stopwatch | None = None
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
        if self.settings.mode == "patch_batch" and not all(isinstance(s, DenseStep) for s in steps):
            raise InputError(
                'mode="patch_batch" keeps nothing: pass DenseStep or call batch(); compile with '
                'mode="mask_cache" to record and edit'
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
                and call.compilation.capture.module is not None
            ):
                results[i] = unflatten(call, [copy_of(t) for t in call.step.cache.output])
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

    @torch.no_grad()
    def ahead(self, steps: Sequence[EditStep], only: bool = False) -> list[Loading]:
        """Begin to load what a later `step(steps)` will read; call it before the step in between.

        Masks, caches and plans are those of that step; of `inputs` only the sizes count. `only`:
        what was begun for other steps is given up. Without a loader nothing happens.
        """
        if self._loads.loader is None:
            return []
        groups = list(self.batches(steps))
        if only:
            self._loads.forget_others(groups)
        return [self._loads.ahead(*group) for group in groups]

    def batches(self, steps: Sequence[EditStep]) -> Iterator[tuple[Program, Frame, list[Member]]]:
        """What edits with some sites to compute come down to: per program, one ragged batch."""
        groups: dict[str, list[Call]] = {}
        for step in steps:
            call = self._call(dataclasses.replace(step, any_step=True))
            program = call.compilation.program
            if program is not None and call.mask is not None and bool(call.mask.any()):
                groups.setdefault(program.code, []).append(call)
        for code, calls in groups.items():
            program = self.programs[code]
            members = [self._member(program, call, {}) for call in calls]
            yield program, self._frame(program, members), members

    def mask_shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape of a mask for these inputs: (height, width) of the latent, or (tokens,)."""
        sizes = self._call(DenseStep(inputs)).sizes
        return (sizes["y"], sizes["x"]) if "y" in sizes else (sizes.get("tokens", 0),)

    def refresh(self) -> None:
        """Say that weights were changed through `.data`, which leaves no trace."""
        self._weights_changed()
        for program in self.programs.values():
            for item in program.interface.derived:
                origin = program.origins[item.origin]
                getattr(program.module, item.name).copy_(derive(origin, item.order, item.shape))

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
    def loader(self) -> Loader | None:
        """What loads cached rows while a graph computes."""
        return self._loads.loader

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
        from maskfx.explanation import explain

        return explain(self, mask_ratio)

    # Following the module's weights.

    def _follow_module(self) -> None:
        change = self._watch.change()
        if change is Change.TENSORS:  # captured graphs hold the tensors of before
            self.forget()
        if change is not Change.NONE:
            self._weights_changed()

    def forget(self) -> None:
        """Capture the module again at its next call: it computes something else now."""
        self.compilations.clear()
        self.programs.clear()
        self._frames.clear()
        self._runners.clear()
        self._proved.clear()
        self._given_up.clear()
        self._sides.kept.clear()
        self._watch = Weights(self.module)

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
            call.mask = check_edit(step, call, self._watch.fingerprint())
            call.regions = check_regions(step, call)
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
            dense = self.settings.mode == "dense"
            if not dense:
                self._warm_tables(inputs, values)
            found = capture(self.module, inputs, self.roles, attempt=not dense)
            new = compile_capture(
                found, plans=self.settings.plans, stretches=self.settings.stretches
            )
        self.compilations.append(new)
        if new.program is not None and new.program.code in self._given_up:
            self._give_up(new.program.code, self._given_up[new.program.code])
        elif new.program is not None:
            new.program = self.programs.setdefault(new.program.code, new.program)
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
        if key not in self._proved and not has_meta(self.module, values):
            self._proved.add(key)
            sides, frames = set(self._sides.kept), set(self._frames)
            with torch.no_grad():
                wrong = self._prove(compilation, program, values, spec, sizes)
            for side in set(self._sides.kept) - sides:
                del self._sides.kept[side]
            for frame in set(self._frames) - frames:
                del self._frames[frame]
            if wrong:
                self._give_up(program.code, wrong)
        return compilation

    def _give_up(self, code: str, reason: str) -> None:
        """Run dense what has this program; it isn't right."""
        self._given_up[code] = reason
        self.programs.pop(code, None)
        for recording in (True, False):
            self._runners.pop((code, recording), None)
        for compilation in self.compilations:
            if compilation.program is not None and compilation.program.code == code:
                compilation.program = None
                compilation.reasons = {**compilation.reasons, "program": reason}

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
    ) -> str:
        """Record and edit once beside the module; what is wrong, if something is."""
        shape = (sizes["y"], sizes["x"]) if "y" in sizes else (sizes["tokens"],)
        mask = torch.arange(prod(shape)).view(shape) % 3 == 1
        wanted = self.module(**pytree.tree_unflatten(copies(values), spec))
        inputs = pytree.tree_unflatten(copies(values), spec)

        def call(step: AnyStep, mask: Tensor | None = None) -> Call:
            return Call(step, copies(values), spec, sizes, compilation, mask)

        try:
            recorded, cache = self._ragged(program, [call(RecordStep(inputs))])[0]
            edit = call(EditStep(inputs, mask, cache), mask)
            edit.regions = every_other(program.interface.regions, mask)
            edited = self._ragged(program, [edit])[0]
        except Exception as error:
            log.debug("a program fails", exc_info=True)
            return f"its rows fail: {type(error).__name__}: {error} at {sizes}"
        if same_values(recorded, wanted) and same_values(edited, wanted):
            return ""
        return f"its rows give another result than the module at {sizes}"

    # Running.

    def _dense(self, call: Call) -> Any:
        """No program: the module itself; an edit keeps the record outside the mask."""
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

    def _ragged(self, program: Program, calls: Sequence[Call]) -> list[Any]:
        self._follow_weights(program)
        members = []
        for call in calls:
            compilation = call.compilation
            assert compilation.request is not None
            assert compilation.dense is not None
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
            members.append(self._member(program, call, given))
        frame = self._frame(program, members)
        recording = any(m.recording for m in members)
        runner = self._runner(program, recording, frame, members)
        with self._loads.step(program, frame, members) as loading:
            fetch = frame.fetch(members, loading)
            result = runner(fetch if self.watch is None else self.watch.over(fetch))
        if self.watch is not None:
            self.watch.stop()
        outputs, emitted = result if recording else (result, ())
        return [
            self._result(program, frame, calls, members, i, outputs, emitted)
            for i in range(len(calls))
        ]

    def _member(self, program: Program, call: Call, given: dict[str, Sequence[Any]]) -> Member:
        sites = self._sites.get(
            program.code, program.interface.pyramid, call.sizes, effective_mask(call), call.regions
        )
        cache = call.step.cache if isinstance(call.step, EditStep) and not sites.full else None
        return Member(sites, call.sizes["batch"], given, cache, isinstance(call.step, RecordStep))

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
        output = unflatten(call, flat)
        if not member.recording:
            return output
        cache = StepCache(
            program.code,
            dict(call.sizes),
            dtype_of(call),
            [t.clone() for t in flat],
            steps_of(call),
            self._watch.fingerprint(),
            constants_of(call.compilation.capture, call.values),
        )
        alone = len(calls) == 1
        taps = list(program.interface.taps.values())
        parts = [
            [
                p if alone and owns(p, call.values) else p.clone()
                for p in tap_parts(t, e, frame, index)
            ]
            for t, e in zip(taps, emitted, strict=True)
        ]
        keep_rows(cache, taps, parts)
        return output, cache

    def _follow_weights(self, program: Program) -> None:
        """Derive re-laid weights again when their origin changed in place."""
        for item in program.interface.derived:
            origin = program.origins[item.origin]
            key = f"{id(program)}:{item.name}"
            version = 0 if origin.is_inference() else origin._version
            known = self._weights.get(key)
            if known is None or known[0]() is not origin or known[1] != version:
                if known is not None:
                    getattr(program.module, item.name).copy_(derive(origin, item.order, item.shape))
                self._weights[key] = (weakref.ref(origin), version)


def every_other(regions: Sequence[Region], mask: Tensor) -> dict[int, Tensor]:
    """Regions that compute everything, the mask, everything, and so on."""
    chosen = {}
    for number, region in enumerate(regions, 1):
        if number % 2 or region.inside in chosen:
            chosen[number] = torch.ones_like(mask)
    return chosen


def owns(rows: Tensor, arguments: Sequence[Any]) -> bool:
    """May a recording keep these rows as they are: no part of something else, no argument's?"""
    memory = rows.untyped_storage()
    if memory.nbytes() != rows.nbytes:
        return False
    given = [v for v in arguments if isinstance(v, Tensor) and not v.is_meta]
    return all(memory.data_ptr() != v.untyped_storage().data_ptr() for v in given)
