"""Execute the calls of one or many runs as one ragged step (members of any sizes) per denoiser."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf, isfinite
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.errors import CacheError, InputError, NumberError, SizesDisagree
from maskfx.ir import progress
from maskfx.ops import wide
from maskfx.pipelines.parts.stand_in import computing
from maskfx.pipelines.runs.adapters_in_place import adapters_in_place, shared_adapters
from maskfx.pipelines.runs.computed_sites import sites_of
from maskfx.pipelines.runs.interception import bars_disabled
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.pipelines.runs.step_members import CallMember, choose_steps, count_sites, settled
from maskfx.pipelines.templates.batches import picture_of
from maskfx.runtime.cache.step_cache import has_unread
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.dense_ways import DenseBatch, DenseWay
from maskfx.runtime.load_choice import has_loads
from maskfx.runtime.lora.in_place_costs import ChosenBy
from maskfx.runtime.step_executor import SharedAdapters, StepExecutor
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, RecordStep, is_fixed

log = logging.getLogger(__name__)


Executors = Callable[[CompiledDenoiser], StepExecutor | None]  # None: in this thread


class StepThreads:
    """Threads in which steps are computed elsewhere: one per executor, which keeps their order."""

    def __init__(self) -> None:
        self._pools: WeakKeyDictionary[StepExecutor, ThreadPoolExecutor] = WeakKeyDictionary()
        self._lock = Lock()  # groups of requests may step at the same time

    def start(
        self, executor: StepExecutor, work: Callable[..., None], *args: object
    ) -> Future[None]:
        """Run a function after those started before with the same executor."""
        with self._lock:
            if executor not in self._pools:
                self._pools[executor] = ThreadPoolExecutor(1, thread_name_prefix="maskfx-step")
            return self._pools[executor].submit(work, *args, executor)

    def close(self) -> None:
        """Wait for all of them, and end the threads."""
        for pool in list(self._pools.values()):
            pool.shutdown()


def execute(
    calls: Sequence[DenoiserCall],
    finite: bool = False,
    executors: Executors = lambda _: None,
    threads: StepThreads | None = None,
    in_place: ChosenBy | None = None,
) -> None:
    """Run all calls; set the error of each that fails, and the results of the others.

    The calls of a denoiser form one group, with those of others that its executor joins. A group
    whose inputs come from other calls runs after them, or beside them if an executor computes them
    elsewhere: then it waits where it reads them.

    Args:
        calls: the calls, of one or many runs.
        finite: whether non-finite numbers in a result are an error. In a recording they always are.
        executors: returns where the steps of a denoiser are computed.
        threads: for these steps. With them, calls that nothing of this step reads (`late`) may
            still run when this function returns; by default all have ended.
        in_place: what decides whether adapters that all calls of a denoiser share are written into
            its weights; they stay there, and the caller ends that (`CompiledDenoiser.in_place`).
            None: they aren't. Executors decide for themselves.
    """
    left, own = list(calls), threads or StepThreads()
    found = {id(d): executors(d) for d in dict.fromkeys(call.denoiser for call in calls)}
    executors = lambda denoiser: found[id(denoiser)]  # noqa: E731 - the same for the whole step
    elsewhere: list[Future[None]] = []
    try:
        while left:
            group = next_group(left, executors)
            left = [call for call in left if call not in group]
            executor = executors(group[0].denoiser)
            if executor is None:
                run_group(group, finite, in_place=in_place)
                continue
            started = own.start(executor, run_group, group, finite)
            for call in group:
                call.running = started
            if not all(call.late for call in group):
                elsewhere.append(started)
        for started in elsewhere:
            started.result()
    finally:
        if threads is None:
            own.close()


def next_group(left: Sequence[DenoiserCall], executors: Executors) -> list[DenoiserCall]:
    """Return the calls of one group that can start: none waits for a call that is left.

    Those that are computed elsewhere start first. If each group has a call that waits, the calls of
    the first one that don't wait are returned.
    """
    groups: dict[int, list[DenoiserCall]] = {}
    for call in left:
        executor = executors(call.denoiser)
        joint = executor is not None and executor.joint
        groups.setdefault(id(executor if joint else call.denoiser), []).append(call)
    free = [[call for call in own if not waits(call, left)] for own in groups.values()]
    whole = [own for own, all_ in zip(free, groups.values(), strict=True) if len(own) == len(all_)]
    chosen = whole or [own for own in free if own]
    assert chosen, "calls that wait for each other"
    return min(chosen, key=lambda own: executors(own[0].denoiser) is None)


def waits(call: DenoiserCall, left: Sequence[DenoiserCall]) -> bool:
    return any(source in left for source in call.sources())


@torch.no_grad()
def run_group(
    calls: Sequence[DenoiserCall],
    finite: bool,
    executor: StepExecutor | None = None,
    in_place: ChosenBy | None = None,
) -> None:
    """Run calls of one denoiser, or of several that compute the same, as one step."""
    members: list[list[CallMember]] = []
    hidden = all(bars_disabled(call.run.pipe) for call in calls)
    modules = {call.denoiser.module for call in calls}
    with computing(modules), progress.hidden(hidden), switched_as_begun(calls):
        for call in calls:
            try:
                members.append(choose_steps(call))
            except Exception as error:
                call.error = error
        members = settled(members)
        flat = [member for own in members for member in own]
        if flat and in_place is not None:
            with adapters_in_place(calls[0].denoiser, flat, in_place) as measured:
                run_parts(calls[0].denoiser, flat)
                if measured:
                    synchronize(calls[0].denoiser)
        elif flat:
            same = None if executor is None else shared_adapters(flat)
            run_parts(calls[0].denoiser, flat, executor, same)
    # edits of other requests would read wrong values from a recording
    check_finite(m for m in flat if m.error is None and (finite or m.call.recording))
    for own in members:
        finish_call(own)


@contextmanager
def switched_as_begun(calls: Sequence[DenoiserCall]) -> Iterator[None]:
    """Give denoisers the switches that they had when the calls' runs began, within the context."""
    found = [call.run.settings[call.name] for call in calls if call.name in call.run.settings]
    with ExitStack() as stack:
        for settings in found:
            stack.enter_context(settings.switched())
        yield


def run_parts(
    denoiser: CompiledDenoiser,
    members: Sequence[CallMember],
    executor: StepExecutor | None = None,
    shared: SharedAdapters | None = None,
) -> None:
    """Run one ragged step; if it fails, run its halves, down to the member that fails.

    `shared` are adapters that an executor may write into the weights for the step.
    """
    if executor is None:
        members = run_by_module(denoiser, members)
    if not members:
        return
    try:
        if executor is not None:
            results = executor.run(denoiser, steps_elsewhere(denoiser, members), shared)
        else:
            results = denoiser.step(with_loads(denoiser, members))
    except Exception as error:  # a reference to it keeps what the step computed in memory
        alone = error if len(members) == 1 else None
    else:
        for member, result in zip(members, results, strict=True):
            member.result = result
        return
    if alone is None:
        half = len(members) // 2
        run_parts(denoiser, members[:half], executor)
        run_parts(denoiser, members[half:], executor)
    elif isinstance(alone, CacheError) and isinstance(members[0].step, EditStep):
        renewed = members[0].call.run.handler.unfit(members[0].part.position, alone)
        if renewed is None:
            run_in_full(members[0].call.denoiser, members[0], alone)
        else:
            members[0].error = renewed
    elif isinstance(alone, SizesDisagree) and not isinstance(members[0].step, RecordStep):
        run_in_full(members[0].call.denoiser, members[0], alone)  # a module may broadcast them
    else:
        members[0].error = alone


def run_by_module(denoiser: CompiledDenoiser, members: Sequence[CallMember]) -> list[CallMember]:
    """Run the dense members that the module itself should run; return the remaining members.

    On a CPU the module runs all of them: dense row sets take longer than the module's calls.
    Elsewhere it runs those that can share a call of it, or have no other member to share a step
    with. A run alone gets results bit-identical to the module's. With Inductor all members remain,
    because its code may be faster than the module.
    """
    dense = [member for member in members if isinstance(member.step, DenseStep)]
    if not dense or denoiser.settings.inductor:
        return list(members)
    left = [member for member in members if not isinstance(member.step, DenseStep)]
    if denoiser.settings.mode == "patch_batch" and len(dense) > 1:
        return left + run_measured(denoiser, dense)
    if len({id(member.call.run) for member in members}) == 1:
        alone, rows_are_better = dense, bool(left) and not on_cpu(denoiser)
    else:
        alone, rows_are_better = run_shared(denoiser, dense), not on_cpu(denoiser)
    if rows_are_better:
        return left + alone
    for member in alone:
        run_module(denoiser, member)
    return left


def run_measured(denoiser: CompiledDenoiser, dense: Sequence[CallMember]) -> list[CallMember]:
    """Run dense members in rows or by the module, whichever measured faster; return those left.

    Members whose step in rows failed are left.
    """
    shapes = [picture_of(member.step.inputs) for member in dense]
    sizes = len({None if one is None else tuple(one.shape[1:]) for one in shapes})
    sites = sum(sites_of(member.step, lambda mask: mask.numel())[1] for member in dense)
    batch = DenseBatch.of(len(dense), sizes, sites)
    way = denoiser.dense_ways.choose(batch)
    began = time.perf_counter()
    if way is DenseWay.ROWS:
        try:
            results = denoiser.step([member.step for member in dense])
        except Exception as error:
            log.debug("%d dense requests fail in rows: %s", len(dense), error)
            denoiser.dense_ways.add(batch, way, inf, sites)
            return list(dense)  # its halves are tried
        for member, result in zip(dense, results, strict=True):
            member.result = result
    else:
        for member in run_shared(denoiser, dense):
            run_module(denoiser, member)
    synchronize(denoiser)
    took = time.perf_counter() - began
    denoiser.dense_ways.add(batch, way, took, sites)
    return []


def synchronize(denoiser: CompiledDenoiser) -> None:
    """Wait until a GPU has computed what was queued, so that its time can be measured."""
    weights = next(denoiser.module.parameters(), None)
    if weights is not None and weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)


def run_shared(denoiser: CompiledDenoiser, dense: Sequence[CallMember]) -> list[CallMember]:
    """Run dense members that can share a call of the module; return the others and those failed."""
    try:
        steps = [member.step for member in dense]
        groups = denoiser.alike([s.inputs for s in steps], [s.adapters for s in steps])
    except Exception as error:  # trying whether they can share a call needs memory too
        log.debug("whether %d requests can share a call isn't known: %s", len(dense), error)
        return list(dense)
    alone = []
    for group in groups:
        own = [dense[number] for number in group.numbers]
        if len(own) == 1:
            alone += own
            continue
        try:
            results = denoiser.plain_together(group)
        except Exception as error:  # each is run alone, for its result or its error
            log.debug("a call of %d requests fails: %s", len(own), error)
            alone += own
            continue
        for member, result in zip(own, results, strict=True):
            member.result = result
    return alone


def run_module(denoiser: CompiledDenoiser, member: CallMember) -> None:
    try:
        member.result = denoiser.plain_step(member.step)
    except Exception as error:
        member.error = error


def on_cpu(denoiser: CompiledDenoiser) -> bool:
    weights = next(denoiser.module.parameters(), None)
    return weights is not None and weights.device.type == "cpu"


def with_loads(denoiser: CompiledDenoiser, members: Sequence[CallMember]) -> list[AnyStep]:
    """Return the members' steps with load plans, if there is a planner, and begin their loads.

    Then the loads of the next steps of runs that continue are begun.
    """
    steps, planner = [member.step for member in members], denoiser.planner
    if denoiser.loader is None:
        return steps
    own = steps
    if has_loads(denoiser, steps):
        if planner is not None:
            steps = planner.plan_step(steps)
        denoiser.ahead(steps, only=True)
    pairs = [(m, step) for m, step in zip(members, own, strict=True) if is_fixed(step)]
    found = (
        member.call.run.handler.upcoming(member.part, step)
        for member, step in pairs
        if isinstance(step, EditStep)
    )
    upcoming = [step for step in found if step is not None]
    if has_loads(denoiser, upcoming):
        if planner is not None:
            upcoming = planner.plan_ahead(upcoming)
        denoiser.ahead(upcoming)
    return steps


def steps_elsewhere(denoiser: CompiledDenoiser, members: Sequence[CallMember]) -> list[AnyStep]:
    """Return the members' steps, with the recordings whose rows other processes read next."""
    return [with_next(member) if denoiser.reads_apart else member.step for member in members]


def with_next(member: CallMember) -> AnyStep:
    step = member.step
    if not isinstance(step, EditStep) or not is_fixed(step) or not has_unread(step.cache):
        return step
    found = member.call.run.handler.upcoming(member.part, step)
    return step if found is None else replace(step, then=found.cache)


def run_in_full(denoiser: CompiledDenoiser, member: CallMember, why: InputError) -> None:
    """Compute a call densely that can't be an edit; the result is correct without it."""
    member.call.run.note(f"{member.part.position.name}: computed in full: {why}")
    run_module(denoiser, member)


def finish_call(members: Sequence[CallMember]) -> None:
    """Set the result or the error of one call."""
    call = members[0].call
    count_sites(members)
    errors = [member.error for member in members if member.error is not None]
    if errors:
        call.error = errors[0]
        return
    try:
        handler = call.run.handler
        call.answer([handler.take(member.part.position, member.result) for member in members])
    except Exception as error:
        call.values, call.error = None, error  # discard a partial result


def check_finite(members: Iterable[CallMember]) -> None:
    """Set an error on each member whose result has non-finite numbers.

    Each tensor is checked by its sum, and all sums of a device are read at once, because a read
    blocks the host. Only if a sum isn't finite (it may overflow) are its tensor's numbers checked.
    """
    groups: dict[torch.device, list[tuple[CallMember, Tensor, Tensor]]] = {}
    for member in members:
        for leaf in pytree.tree_leaves(member.result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                row = member, leaf, leaf.sum(dtype=wide(leaf.dtype))
                groups.setdefault(leaf.device, []).append(row)
    for group in groups.values():
        sums = torch.stack([total.double() for *_, total in group]).tolist()
        for (member, leaf, _), total in zip(group, sums, strict=True):
            if not isfinite(total) and not bool(leaf.isfinite().all()):
                position = member.part.position
                member.error = NumberError(
                    f"{position.name}, step {position.step}: the denoiser returned numbers that "
                    "aren't finite; check the inputs of this request, or run it in float32"
                )
