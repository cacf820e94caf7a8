"""Run: one execution of a pipeline's own code, counting its steps and collecting denoiser calls.

The pipeline's code is not modified. During the run, calls of the denoisers are intercepted, and
methods that nearly all pipelines share: `prepare_latents`, the `step` of their schedulers, and the
`get_crop_region` of their mask processor. Without `prepare_latents` the latents begin with the
run's own noise; without `step` a change of the timestep begins a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx.ir.geometry.level_shares import MaskWork
from maskfx.ir.late import LateTensor
from maskfx.ir.listed import count_listed
from maskfx.ir.modules.module_settings import RunSettings
from maskfx.ir.objects import Watched, made_object
from maskfx.ir.values import copy_of
from maskfx.pipelines.adapters.late_lora import from_step
from maskfx.pipelines.adapters.lora import CallAdapters, suspended
from maskfx.pipelines.call_policy import CallPosition, sample_branch
from maskfx.pipelines.deferred import (
    Ledger,
    deferred_like,
    force_all,
    hold,
    is_ready,
    pending_in,
    pending_sources,
)
from maskfx.pipelines.handlers.autoencoder import AutoencoderCalls
from maskfx.pipelines.handlers.call_handler import CallHandler, CallPart
from maskfx.pipelines.masks.masks import Box
from maskfx.pipelines.parts.pipeline import StepOutput
from maskfx.pipelines.parts.stand_in import COMPUTES, Hooks, MethodCall, computing
from maskfx.pipelines.runs.call_inputs import (
    ShapeKey,
    Sizes,
    device_of,
    on_meta,
    own_inputs,
    shape_key,
    shapes_of,
    wants_gradients,
)
from maskfx.pipelines.runs.function_changes import FunctionChanges
from maskfx.pipelines.runs.late_results import LateResults
from maskfx.pipelines.runs.late_rows import LateRows
from maskfx.pipelines.runs.silent_calls import makes_zeros, silent_key, zeros_of
from maskfx.pipelines.schedules.forecasts import Forecasts
from maskfx.pipelines.schedules.schedule import RunSchedule, latents_of, with_latents
from maskfx.pipelines.schedules.step_count import BY_TIME, StepCount
from maskfx.pipelines.waiting import Wait, wait_uninterrupted
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.reuse.session import Times, times_of
from maskfx.runtime.sites.mask import Mask, MaskCache
from maskfx.runtime.step_kinds import StepKind
from maskfx.runtime.steps import DenseStep
from maskfx.runtime.validation.sample_arguments import join_results, select_sample

Execute = Callable[[list["DenoiserCall"]], None]
Shapes = dict[tuple[str, ShapeKey], object]  # denoiser and inputs -> shapes of the result

# what puts hooks on parts of a denoiser
WHOSE_HOOKS = "offloading, caching, or guidance that skips layers"


@dataclass(eq=False)
class DenoiserCall:
    """One denoiser call of a run; `values` are the leaves of its result, None before it has one."""

    run: PipelineRun
    name: str
    step: int
    branch: str
    inputs: dict[str, object]
    steps: int | None = None  # number of steps of the run, if known
    times: Times = ()  # scheduler times, if the handler reads them
    values: Sequence[object] | None = None
    result: object = None
    error: Exception | None = None
    sites: int = 0  # number of sites that its steps compute, all samples together
    whole: int = 0  # number of all its sites
    samples: int = 0  # number of pictures that its steps compute, guidance branches included
    kind: StepKind = StepKind.DENSE  # of its last step
    work: MaskWork | None = None  # of these sites at all levels, if it is known
    running: Future[None] | None = None  # done when it has values or an error; None: not elsewhere
    shape: ShapeKey | None = None  # of its inputs
    late: bool = False  # whether nothing of its own step waits for it

    @property
    def denoiser(self) -> CompiledDenoiser:
        return self.run.denoisers[self.name]

    def sources(self) -> list[DenoiserCall]:
        """Return the calls without a result that its inputs are computed from."""
        return [call for call in pending_sources(self.inputs) if isinstance(call, DenoiserCall)]

    def ready(self) -> bool:
        """Return True if all inputs are available, and none waits for another call."""
        return all(map(is_ready, pytree.tree_leaves(self.inputs)))

    def wait(self) -> None:
        """Wait until it has values, if it is computed elsewhere; raise its error."""
        if self.running is not None:
            self.running.result()
        if self.error is not None:
            raise self.error

    @property
    def adapters(self) -> Updates:
        """The updates of the denoiser at this step."""
        return self.run.adapters.at(self.name, self.step)

    @property
    def recording(self) -> bool:
        """Whether the call belongs to the recording of a template."""
        return self.run.handler.records

    def parts(self) -> list[CallPart]:
        """Return the call's parts: one per sample if the handler splits lists of samples."""
        if pending_in(self.inputs):
            self.inputs = pytree.tree_map(self._late, self.inputs)
        self.inputs = force_all(self.inputs)
        count = count_listed(self.inputs) if self.run.handler.splits else 0
        if not count:
            return [self._part(self.branch, self.inputs)]
        return [
            self._part(
                sample_branch(self.branch, i, count),
                {name: select_sample(value, i, count) for name, value in self.inputs.items()},
            )
            for i in range(count)
        ]

    def _late(self, value: Any) -> object:
        """Return a tensor that waits, for a value that another call is computing elsewhere."""
        calls = [] if is_ready(value) else pending_sources(value)
        running = [call for call in calls if isinstance(call, DenoiserCall) and call.running]
        if not running:
            return value

        def arrive() -> Tensor:
            for call in running:
                call.wait()
            found: Tensor = value.force()
            return found

        def arrived() -> bool:
            return all(call.running is not None and call.running.done() for call in running)

        return LateTensor(value.like, value.device, arrive, arrived)

    def _part(self, branch: str, inputs: dict[str, object]) -> CallPart:
        position, rows = CallPosition(self.name, self.step, branch), self.run.rows
        late = None if rows is None else rows.of(position)
        return CallPart(
            position, self.denoiser, inputs, self.times, self.steps, self.adapters, late
        )

    def answer(self, results: Sequence[object]) -> None:
        self.result = results[0] if len(results) == 1 else join_results(results)
        self.values = pytree.tree_leaves(self.result)


@dataclass(eq=False)
class PipelineRun:
    """One request's run of its pipeline. `execute` runs calls and sets their results."""

    pipe: object
    denoisers: Mapping[str, CompiledDenoiser]
    handler: CallHandler
    execute: Execute
    shapes: Shapes = field(default_factory=dict)
    coding: AutoencoderCalls | None = None
    box: Box | None = None
    notes: Counter[str] = field(default_factory=Counter)
    adapters: CallAdapters = field(default_factory=CallAdapters)
    wait: Wait = wait_uninterrupted  # for an adapter
    late: LateResults | None = None  # None: denoisers read one another's results in time
    rows: LateRows | None = None  # None: ranks wait for one another's rows
    follow: Callable[[str], RunSettings] | None = None  # returns a denoiser's settings
    at_once: bool = False  # whether each call is computed before the pipeline goes on
    settings: dict[str, RunSettings] = field(default_factory=dict)  # as of their first call
    hooks: dict[str, Hooks] = field(default_factory=dict)  # of parts of denoisers called so far
    _masks: MaskCache = field(default_factory=MaskCache)  # a run's steps share a few masks
    _changes: FunctionChanges = field(default_factory=FunctionChanges)
    _changed: int = -1  # the step at which constants of a call changed

    def __post_init__(self) -> None:
        self.ledger = Ledger(self._resolve, wait_for_call)
        self._schedule = RunSchedule(self.pipe)
        self._count = StepCount(self._schedule)
        own, modules = self.handler, {n: one.module for n, one in self.denoisers.items()}
        self.forecasts = Forecasts(self.pipe, own.forecast, modules.get, self.note, own.blends)
        self.selection = self.forecasts.selected(own.selection, modules)
        self._names = {id(denoiser.module): name for name, denoiser in self.denoisers.items()}

    @property
    def step(self) -> int:
        return self._count.step

    def handles(self, module: nn.Module) -> bool:
        """Return True for a denoiser of this pipeline whose calls may be deferred."""
        name = self._names.get(id(module))
        if name is None:
            return False
        if name not in self.hooks:
            self.hooks[name] = Hooks(module)
        if self.hooks[name].act():
            self.note(f"{name}: hooks act on it or its parts ({WHOSE_HOOKS}); it runs dense")
            return False
        if self.follow is not None and name not in self.settings:
            self.settings[name] = self.follow(name)
        if name in self.settings and self.settings[name].changed():
            self.note(f"{name}: a setting of it changes during the run; it runs dense from there")
            return False
        return True

    def call(self, module: nn.Module, inputs: dict[str, object]) -> object:
        """Handle a call of a stand-in; its result is deferred if its shape is known."""
        name = self._names[id(module)]
        if wants_gradients(inputs):
            self.note(f"{name}: gradients are asked of it; the module computes these calls")
            return COMPUTES
        if self._count.precedes(inputs):
            return self._compute_now(name, inputs)
        self._begin()
        if self._count.begins_by_time(name, inputs):
            self.note(BY_TIME)
        branch, steps = self._count.add(name), self._schedule.steps(module, self.step)
        times = times_of(inputs, self.step) if self.handler.reads_times else ()
        call = DenoiserCall(self, name, self.step, branch, inputs, steps, times)
        call.shape = shape_key(inputs)
        key = (name, call.shape)
        if self._follows:
            self._follow_function(call)
        silent = silent_key(key, inputs)
        if silent is not None and self.shapes.get(silent) is not None:
            return zeros_of(self.shapes[silent], device_of(inputs))
        if not self._computes(steps):
            guess = self._guess(call)
            if guess is not None:
                return guess
        self.adapters = from_step(
            self.adapters,
            self.step,
            lambda: times or times_of(inputs, self.step),
            self.wait,
            self.denoisers,
        )
        if self._follows:
            self._follow_adapters(call)
        if self.late is not None:
            self.late.add(call)
            self.late.exchange(call)
        self.ledger.calls.append(call)
        unknown = key not in self.shapes or silent is not None and silent not in self.shapes
        if self.at_once or unknown:
            watched = Watched(inputs)
            self.ledger.settle()
            call.wait()
            if unknown and not made_object(call.result) and not watched.written():
                self.shapes[key] = pytree.tree_map(on_meta, call.result)
                if silent is not None:  # None: it isn't zero
                    zero = makes_zeros(module, call.inputs, call.result)
                    self.shapes[silent] = self.shapes[key] if zero else None
            # the pipeline may change what it gets; the next step may read the call's own
            return call.result if self.late is None else pytree.tree_map(copy_of, call.result)
        hold(call.inputs)
        call.inputs = own_inputs(call.inputs)
        return deferred_like(self.shapes[key], device_of(inputs), self.ledger, call)

    def code(self, part: nn.Module, method: str, call: MethodCall) -> object:
        """Return the result of an autoencoder's or encoder's call; None if it shall run itself."""
        if self.coding is None:
            return None
        with suspended():
            found = self.coding.code(part, method, call)
        return self.coding.kept(part, method, call) if found is None else found

    def codes(self, autoencoder: nn.Module, method: str) -> bool:
        """Return True if `code` may return a result."""
        return self.coding is not None and self.coding.codes(autoencoder, method)

    def active(self, mask: Tensor) -> int:
        """Return the number of active sites of a mask."""
        return self.mask(mask).count

    def mask(self, sites: Tensor) -> Mask:
        """Return a mask; the same one for as long as its sites are unchanged."""
        return self._masks.of(sites)

    @property
    def _follows(self) -> bool:
        """Whether outputs of earlier steps are used, so that changes of the function matter."""
        return self.selection.skips or bool(self.late or self.rows)

    def _guess(self, call: DenoiserCall) -> object:
        """Return the result of a call that isn't computed; None if it must be."""
        held = None if self.late is None else self.late.held(call)
        if held is not None and held.shape is not None:
            shapes = self.shapes.get((call.name, held.shape))
            if shapes is not None:
                return deferred_like(shapes, device_of(call.inputs), self.ledger, held)
        self.ledger.settle()  # the forecast needs the outputs before
        return self.forecasts.at(key_of(call), call.times, call.inputs, call.steps)

    def _compute_now(self, name: str, inputs: dict[str, object]) -> object:
        """Return the module's own result; the call belongs to no step."""
        self.ledger.settle()
        with suspended(), computing([self.denoisers[name].module]):
            adapters = self.adapters.at(name, 0)
            return self.denoisers[name].plain_step(DenseStep(force_all(inputs), adapters))

    def _begin(self) -> None:
        if self._schedule.changes():
            self.handler.begin(self._schedule.schedule)

    def _computes(self, steps: int | None) -> bool:
        """Return True for a step that is computed: selected, or one whose function changed."""
        return self.selection.computes(self.step, steps) or self._changed == self.step

    def _follow_function(self, call: DenoiserCall) -> None:
        """Compute this step, and forget earlier outputs, if the call's constants have changed."""
        if self._changes.of_constants(call):
            if self._changed != self.step:
                self._changed = self.step
                self.forecasts.clear()
            self._read_in_time()
            self.note(f"{call.name}: its settings change at step {self.step}, which is computed")

    def _follow_adapters(self, call: DenoiserCall) -> None:
        """Forget a call's earlier outputs if other adapters act from this computed step on."""
        if self._changes.of_adapters(call):
            self._read_in_time()
            self.forecasts.forget((call.name, call.branch))

    def _read_in_time(self) -> None:
        """Let the calls of this step read no values of the step before."""
        if self.late is not None:
            self.late.read_in_time(self.step)
        if self.rows is not None:
            self.rows.forget()

    def after_step(self, result: StepOutput) -> StepOutput:
        """End a step of the scheduler; return its result with the latents the handler changed."""
        self._begin()
        latents = latents_of(result)
        changed = self.handler.after_step(self.step, latents)
        self._count.end()
        return result if changed is latents else with_latents(result, changed)

    def prepare(self, outputs: Any, height: int | None, width: int | None) -> object:
        """Return the pipeline's initial latents as changed by the handler."""
        several = isinstance(outputs, tuple)
        tensors = outputs if several else (outputs,)
        changed = self.handler.prepare(tensors, height, width, self.box)
        return tuple(changed) if several else changed[0]

    def note(self, text: str) -> None:
        """Count a note that explain() prints."""
        self.notes[text] += 1

    def _resolve(self, calls: list[DenoiserCall]) -> None:
        spare = [] if self.late is None else self.late.spare(calls)
        if len(spare) < len(calls):
            calls = [call for call in calls if call not in spare]
            self.ledger.calls[:0] = spare  # computed if something reads them after all
        with suspended():
            self.execute(calls)
        for call in calls:
            if call.error is not None:
                raise call.error
            if self.selection.skips and not call.late:
                self.forecasts.learn(key_of(call), call.times, call.inputs, call.result)


def key_of(call: DenoiserCall) -> tuple[str, str, Sizes]:
    """Return what calls have in common whose outputs continue each other."""
    return call.name, call.branch, shapes_of(call.inputs)


def wait_for_call(source: object) -> None:
    """Wait for a call that is computed elsewhere."""
    if isinstance(source, DenoiserCall):
        source.wait()
