"""Execute the calls of one or many runs as one ragged step (members of any sizes) per denoiser."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import isfinite
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
from maskfx.pipelines.runs.dense_members import run_by_module, run_module, synchronize
from maskfx.pipelines.runs.interception import bars_disabled
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.pipelines.runs.step_members import CallMember, choose_steps, count_sites, settled
from maskfx.runtime.cache.step_cache import has_unread
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.offload import device_of
from maskfx.runtime.hardware.queued_work import QueuedWork
from maskfx.runtime.load_choice import has_loads
from maskfx.runtime.lora.in_place_costs import ChosenBy
from maskfx.runtime.step_executor import SharedAdapters, StepExecutor
from maskfx.runtime.steps import AnyStep, EditStep, RecordStep, is_fixed

log = logging.getLogger(__name__)


Executors = Callable[[CompiledDenoiser], StepExecutor | None]  # None: in this thread


class StepThreads:
    """Threads in which steps are computed elsewhere: one per executor, which keeps their order."""

    def __init__(self) -> None:
        self._pools: WeakKeyDictionary[StepExecutor, ThreadPoolExecutor] = WeakKeyDictionary()
        self._lock = Lock()  # groups of requests may step at the same time

    def start(
        self,
        executor: StepExecutor,
        queued: QueuedWork,
        work: Callable[..., None],
        *args: object,
    ) -> Future[None]:
        """Run a function after those started before with the same executor.

        Its copies of tensors that `queued` knows don't wait for steps computed meanwhile.
        """

        def run() -> None:
            with queued.current():
                work(*args, executor)

        with self._lock:
            if executor not in self._pools:
                self._pools[executor] = ThreadPoolExecutor(1, thread_name_prefix="maskfx-step")
            return self._pools[executor].submit(run)

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
            leaves = pytree.tree_leaves([call.inputs for call in group])
            there = [leaf for leaf in leaves if type(leaf) is Tensor]
            queued = QueuedWork(device_of(group[0].denoiser.module), there)
            started = own.start(executor, queued, run_group, group, finite)
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
