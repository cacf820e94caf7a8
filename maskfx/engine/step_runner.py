"""StepRunner: computes the steps of an engine, in its process or others, and answers the calls."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from weakref import WeakSet

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.distributed.heartbeat import Waits
from maskfx.distributed.rank_group import RankGroup
from maskfx.distributed.ranks import Ranks
from maskfx.engine.processes.services import NetServices, OwnProcesses
from maskfx.engine.ticket import AnsweredStep, MemberWork, ParkedCalls, TicketState, tell
from maskfx.pipelines.runs.execute import Executors, StepThreads, execute
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.in_place import share_weights
from maskfx.runtime.lora.in_place_costs import ChosenBy
from maskfx.runtime.step_executor import StepExecutor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """Statistics of one step: batch size, start time and durations."""

    requests: int
    began: float
    gathered: float  # seconds from the first submitted call to the start of the step
    seconds: float
    sites: int = 0  # computed, over all requests and their guidance branches
    bubble: float = 0.0  # seconds in which compute waited for cached rows
    members: tuple[MemberWork, ...] = ()  # what each request computed
    degree: int = 1  # ranks that computed it
    cpu: float = 0.0  # seconds of the processor in the thread that computed it
    in_place: bool = False  # adapters were in the weights of one of its denoisers
    idle: bool = False  # recorded a template while no request ran

    @property
    def ended(self) -> float:
        return self.began + self.seconds


class StepRunner:
    """Computes steps; several may run at the same time, on different ranks.

    Args:
        own_process: Which denoisers have processes of their own.
        ranks: Processes over which the steps of the others are split; 1 for none.
        `told`: Callback after each step.
        rank_timeout: Seconds without progress after which a rank is replaced.
    """

    def __init__(
        self,
        own_process: OwnProcesses,
        ranks: Ranks,
        told: Callable[[Step], None] | None,
        rank_timeout: float = 1.0,
    ) -> None:
        self.steps: deque[Step] = deque(maxlen=4096)
        self.services = NetServices(own_process)
        self.ranks, self._ranks = ranks.count, ranks
        self._waits = Waits(silence=rank_timeout, stall=rank_timeout)
        self._told = told
        self._threads = StepThreads()
        self._groups: MutableMapping[nn.Module, RankGroup] = WeakIdKeyDictionary()
        self._creating = threading.Lock()  # requests' threads create groups
        self._seen: WeakSet[CompiledDenoiser] = WeakSet()  # those that stepped
        self._apart: dict[frozenset[int], bool] = {}

    def adopt(self, holder: object, denoisers: Mapping[str, CompiledDenoiser]) -> None:
        """Prepare the processes of a request's denoisers; `release` ends the use of its nets."""
        self.services.lease(holder, denoisers)
        for denoiser in denoisers.values():
            with self._creating:
                known = denoiser.module in self._groups or self.services.has(denoiser)
                if self.ranks > 1 and not known:
                    self._groups[denoiser.module] = RankGroup(
                        denoiser, self._ranks, waits=self._waits
                    )

    def release(self, holder: object) -> None:
        self.services.release(holder)

    def executor(self, denoiser: CompiledDenoiser) -> StepExecutor | None:
        """Return where the steps of a denoiser are computed; None for the caller's thread."""
        return self.services.of(denoiser) or self._groups.get(denoiser.module)

    @property
    def rank_count(self) -> int:
        """The number of ranks that can compute now, of all denoisers."""
        return min([self.ranks, *(group.pool.size for group in self.rank_groups())])

    def rank_groups(self) -> list[RankGroup]:
        return list(self._groups.values())

    def usual(self) -> float:
        """Return the median duration of the latest 8 steps."""
        latest = [self.steps[-i].seconds for i in range(1, min(8, len(self.steps)) + 1)]
        return statistics.median(latest) if latest else 0.0

    def run_on(self, parked: list[ParkedCalls], ranks: tuple[int, ...]) -> float:
        """Compute calls on these ranks and answer them; return the seconds, 0 if a rank failed."""

        def executor(denoiser: CompiledDenoiser) -> StepExecutor | None:
            found = self.executor(denoiser)
            return found.on(ranks) if isinstance(found, RankGroup) else found

        modules = {call.denoiser.module for p in parked for call in p.calls}
        groups = [group for m in modules if (group := self._groups.get(m)) is not None]
        before = sum(group.failures + group.computed_here for group in groups)
        began = time.perf_counter()
        self.run(parked, executor, len(ranks))
        seconds = time.perf_counter() - began
        after = sum(group.failures + group.computed_here for group in groups)
        return seconds if after == before else 0.0

    def run(
        self, parked: list[ParkedCalls], executors: Executors | None = None, degree: int = 1
    ) -> None:
        """Compute calls as one step and answer them.

        Args:
            parked: The calls of each request.
            executors: Where the steps of denoisers are computed; by default on all ranks.
            degree: The number of ranks that compute them.
        """
        denoisers = {c.denoiser for p in parked for c in p.calls}
        waited = sum(d.waited for d in denoisers)
        began, before = time.perf_counter(), time.thread_time()
        try:
            calls = [call for p in parked for call in p.calls]
            self._seen.update(denoisers)
            self.take_adapters_out(denoisers)
            in_place = ChosenBy.COSTS if self._share_nothing(denoisers) else None
            execute(calls, True, executors or self.executor, self._threads, in_place)
        except Exception as error:
            log.exception("a step failed as a whole")
            for p in parked:
                p.error = error
        ended, cpu = time.perf_counter(), time.thread_time() - before
        gathered = began - min(p.at for p in parked)
        bubble = sum(d.waited for d in denoisers) - waited
        members = tuple(p.member() for p in parked)
        sites = sum(member.sites for member in members)
        took = ended - began
        written = any(d.in_place.in_use for d in denoisers)
        idle = all(p.ticket.idle for p in parked)
        step = Step(
            len(parked), began, gathered, took, sites, bubble, members, degree, cpu, written, idle
        )
        self.steps.append(step)
        for p, member in zip(parked, members, strict=True):
            p.ticket.steps += 1
            if not p.calls[-1].recording:
                p.ticket.sites += member.sites
                p.ticket.whole += member.whole
            if p.last:
                p.ticket.state = TicketState.RUNNING
            if p.ticket.told is not None:
                call = p.calls[-1]
                tell(p.ticket.told, AnsweredStep(call.step, call.recording, p.at, began, ended))
            p.answered.set()
        if self._told is not None:
            tell(self._told, step)

    def take_adapters_out(self, stepping: Collection[CompiledDenoiser] = ()) -> None:
        """Take adapters out of the weights of the denoisers that don't step now."""
        for denoiser in [one for one in self._seen if one not in stepping]:
            denoiser.in_place.end()

    def _share_nothing(self, denoisers: Collection[CompiledDenoiser]) -> bool:
        """Return True unless two of these have weights in common."""
        key = frozenset(map(id, denoisers))
        if len(key) > 1 and key not in self._apart:
            self._apart[key] = not share_weights([d.module for d in denoisers])
        return len(key) < 2 or self._apart[key]

    def close(self) -> None:
        """End all processes and threads, and take adapters out of the weights."""
        self.take_adapters_out()
        self.services.close()
        for group in self.rank_groups():
            group.stop()
        self._threads.close()
