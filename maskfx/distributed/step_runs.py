"""StepRuns: a step of one denoiser on several ranks, by whole members first.

A member that a rank computes whole takes no exchange, and is computed as one process would: a dense
one by the module. What can't be dealt evenly is divided by sites, if that is predicted to be faster
and, after a few steps, was measured to be. Knows nothing of partitions and exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch.utils import _pytree as pytree

from maskfx.distributed.divider import Divider
from maskfx.distributed.division.dealing import Dealing, dealings, dealt, is_even
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.measured_steps import WHOLE
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.messages import PartResult, WholeResult
from maskfx.distributed.processes import RankFailure
from maskfx.distributed.rank_pool import Lease, NoRanks, RankPool
from maskfx.distributed.ranks_in_place import NotWritten, RanksInPlace
from maskfx.distributed.requests import note_code, whole_requests
from maskfx.distributed.samples import StepSamples, join_samples, shape_of
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.execution.executor import Split
from maskfx.runtime.step_executor import compute_steps
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, late_exchange
from maskfx.runtime.transport.tensor_transport import Unsendable

ATTEMPTS = 4  # of a step on ranks, before it runs in this process


class RankOwner(Protocol):
    """What this module uses of a `RankGroup`."""

    denoiser: CompiledDenoiser
    pool: RankPool
    divider: Divider
    given_costs: LinkCosts | None
    last: list[PartResult | WholeResult | None]
    computed_here: int

    @property
    def costs(self) -> LinkCosts: ...

    def repeats(self, why: Exception) -> bool: ...

    def free_ended(self) -> None: ...

    def here(self) -> AbstractContextManager[object]: ...

    def in_place(self, ranks: Sequence[int] | None) -> RanksInPlace: ...


@dataclass(frozen=True)
class RunPlan:
    """How a step is computed.

    Args:
        dealing: Its members, dealt to ranks.
        partition: The shares of those that are divided; None: they follow from predicted costs.
        seconds: What is predicted.
    """

    dealing: Dealing
    partition: Partition | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Predicted:
    """The members of a step of one program.

    Args:
        costs: Their FLOPs.
        kind: What is equal in steps alike.
        ways: By degree, how the step is computed.
    """

    costs: list[float]
    kind: tuple[object, ...]
    ways: dict[int, RunPlan]


class StepRuns:
    """Runs the steps of a `RankGroup`."""

    def __init__(self, owner: RankOwner) -> None:
        self._owner = owner
        self._samples = StepSamples(owner.denoiser)

    def run(
        self,
        steps: Sequence[AnyStep],
        ranks: Sequence[int] | None,
        divided: Callable[[Partition | None], Split],
    ) -> list[Any]:
        """Compute steps on several ranks.

        Args:
            steps: The members.
            ranks: Their numbers; None: all.
            divided: Returns what divides a batch, by its members' shares if they are given.
        """
        samples = [self._samples.of(step) for step in steps]
        members = [sample for own in samples for sample in own]
        with self._owner.denoiser.validated_once(members):
            ordered = self._run(members, ranks, divided)
        module = self._owner.denoiser.module
        return list(join_samples(steps, list(map(len, samples)), ordered, module))

    def _run(
        self,
        members: Sequence[AnyStep],
        ranks: Sequence[int] | None,
        divided: Callable[[Partition | None], Split],
    ) -> list[object]:
        apart = [n for n, step in enumerate(members) if not can_be_whole(step)]
        free = [n for n in range(len(members)) if n not in apart]
        found: dict[int, object] = {}
        if free:
            own = [members[n] for n in free]
            results = self._whole_or_divided(own, ranks, divided)
            found.update(zip(free, results, strict=True))
        if apart:
            split = divided(None)
            results = self._owner.denoiser.step([members[n] for n in apart], split=split)
            found.update(zip(apart, results, strict=True))
        return [found[n] for n in range(len(members))]

    def on_one(
        self, steps: Sequence[AnyStep], ranks: Sequence[int], divided: Callable[[], Split]
    ) -> list[Any]:
        """Compute steps on one rank as a whole, and as a batch those whose rows lie here."""
        found = dict.fromkeys(range(len(steps)))
        for kept in (False, True):
            own = [n for n, step in enumerate(steps) if keeps_rows(step) == kept]
            some = [steps[n] for n in own]
            if some and kept:  # their rows are written in this process
                results = self._owner.denoiser.step(some, split=divided())
                found.update(zip(own, results, strict=True))
            elif some:
                found.update(zip(own, self._on_ranks(some, ranks[:1])[0], strict=True))
        return list(found.values())

    # Plans.

    def _whole_or_divided(
        self,
        members: Sequence[AnyStep],
        ranks: Sequence[int] | None,
        divided: Callable[[Partition | None], Split],
    ) -> list[Any]:
        count = self._owner.pool.size if ranks is None else len(ranks)
        equal = [1.0] * len(members)
        found = Predicted(equal, (), {WHOLE: RunPlan(dealt(equal, count))})
        if not (are_alike(members) and is_even(found.ways[WHOLE].dealing, equal)):
            found = self._predicted(members, count)
        degree, costs = self._degree(found), found.costs
        plan = found.ways[degree]
        results: dict[int, object] = {}
        seconds = 0.0
        left = plan.dealing.divided
        whole = [n for n in range(len(members)) if n not in left]
        if whole:
            given = [members[n] for n in whole], ranks, [costs[n] for n in whole]
            own, seconds = self._on_ranks(*given)
            results.update(zip(whole, own, strict=True))
        if left:
            split = divided(plan.partition)
            own = self._owner.denoiser.step([members[n] for n in left], split=split)
            results.update(zip(left, own, strict=True))
            seconds += max(0.0 if one is None else one.seconds for one in self._owner.last)
        if len(found.ways) > 1 and seconds:
            self._owner.divider.measured.note(found.kind, sum(costs), degree, seconds)
        return [results[n] for n in range(len(members))]

    def _degree(self, predicted: Predicted) -> int:
        ways, costs = predicted.ways, predicted.costs
        seconds = {degree: plan.seconds for degree, plan in ways.items()}
        even = WHOLE in ways and is_even(ways[WHOLE].dealing, costs)
        # with given costs a step's division doesn't depend on earlier steps
        if even or len(ways) == 1 or self._owner.given_costs is not None:
            return min(seconds, key=lambda degree: (seconds[degree], degree))
        return self._owner.divider.measured.best(predicted.kind, sum(costs), seconds)

    def _predicted(self, members: Sequence[AnyStep], ranks: int) -> Predicted:
        """Return the ways to compute a step.

        Members without a program that can be divided are whole; those of several programs form
        batches, each of which is divided by itself.
        """
        denoiser, divider = self._owner.denoiser, self._owner.divider
        denoiser.compile_for(members)
        with denoiser.locked():
            groups = list(denoiser.groups(members))
            served = sum(len(numbers) for _, numbers, _ in groups) == len(members)
            if not served or any(divider.refusal(program) for program, *_ in groups):
                equal = [1.0] * len(members)
                return Predicted(equal, (), {WHOLE: RunPlan(dealt(equal, ranks))})
            if len(groups) > 1:
                every = dealt([0.0] * len(members), ranks, range(len(members)))
                return Predicted([0.0] * len(members), (), {WHOLE: RunPlan(every)})
            ((program, _, own),) = groups
            costs = [divider.work.of(program, member).total for member in own]
            modules = [n for n, step in enumerate(members) if isinstance(step, DenseStep)]
            flop = divider.work.flop(self._owner.costs.flop)
            ways: dict[int, RunPlan] = {}
            for dealing in dealings(costs, modules, ranks):
                first = flop * dealing.most(costs)
                if not dealing.divided:
                    ways[WHOLE] = RunPlan(dealing, None, first)
                    continue
                rest = [own[n] for n in dealing.divided]
                found = divider.ways(program, rest, ranks, self._owner.costs)
                for degree, (partition, seconds) in found.items():
                    plan = RunPlan(dealing, partition, first + seconds)
                    if degree != WHOLE and (
                        degree not in ways or plan.seconds < ways[degree].seconds
                    ):
                        ways[degree] = plan
        kind = ("members", program.code, len(members), len(modules), ranks)
        return Predicted(costs, kind, ways)

    # Whole members.

    def _on_ranks(
        self,
        steps: Sequence[AnyStep],
        ranks: Sequence[int] | None,
        costs: Sequence[float] = (),
    ) -> tuple[list[Any], float]:
        """Compute members whole, each on one rank; return the results and the seconds.

        The seconds are 0 if they were computed in this process, because no rank can.
        """
        owner = self._owner
        # captured once, here, for all ranks
        owner.denoiser.compile_for([step for step in steps if not isinstance(step, DenseStep)])
        for _ in range(ATTEMPTS):
            try:
                with owner.pool.lease(ranks) as lease:
                    written = owner.in_place(ranks).write(lease, owner.pool)
                    return self._asked(lease, steps, costs or [1.0] * len(steps), written)
            except NotWritten as why:
                owner.in_place(ranks).refuse(str(why))
            except (NoRanks, RankFailure, Unsendable) as why:
                if not owner.repeats(why):
                    break
            finally:
                owner.free_ended()
        return self._in_this_process(steps), 0.0

    def _asked(
        self, lease: Lease, steps: Sequence[AnyStep], costs: Sequence[float], written: bool
    ) -> tuple[list[Any], float]:
        whole = dealt(costs, len(lease.ranks)).whole
        numbers = {rank: own for rank, own in zip(lease.ranks, whole, strict=True) if own}
        dealt_steps = {rank: [steps[n] for n in own] for rank, own in numbers.items()}
        requests = whole_requests(self._owner.pool, lease, dealt_steps, written)
        found: dict[int, WholeResult] = lease.processes.ask(requests)
        note_code(self._owner.pool, found.values(), steps)
        results: dict[int, object] = {}
        for rank, result in found.items():
            results.update(zip(numbers[rank], result.results, strict=True))
        self._owner.last = [
            replace(found[rank], results=[]) if rank in found else None for rank in lease.ranks
        ]
        seconds = max(result.seconds for result in found.values())
        return [results[n] for n in range(len(steps))], seconds

    def _in_this_process(self, steps: Sequence[AnyStep]) -> list[Any]:
        self._owner.computed_here += 1
        with self._owner.here():
            return compute_steps(self._owner.denoiser, steps)


def keeps_rows(step: AnyStep) -> bool:
    """Return True for a step that reads rows which steps of the same request replace."""
    return isinstance(step, EditStep) and isinstance(step.cache, RollingCache)


def can_be_whole(step: AnyStep) -> bool:
    """Return True for a step that one of several ranks may compute alone.

    One that replaces rows which it reads is computed where they lie. The picture of one whose
    exchanges may be late depends on the number of ranks, and on nothing else.
    """
    return late_exchange(step) is None and not keeps_rows(step)


def are_alike(steps: Sequence[AnyStep]) -> bool:
    """Return True for dense steps whose arguments have equal shapes."""
    if not all(isinstance(step, DenseStep) for step in steps):
        return False
    kinds = set()
    for step in steps:
        values, spec = pytree.tree_flatten(dict(step.inputs))
        kinds.add((spec, *map(shape_of, values)))
    return len(kinds) == 1
