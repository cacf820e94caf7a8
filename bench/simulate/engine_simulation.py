"""An engine under a simulated clock, with the policies of batches and admission that serve.

A request is queued until fewer than `running` others are active, is prepared, waits until it is
admitted, makes its steps, and is decoded. Step and preparations share one core: each gets an equal
part of it. A request that isn't done at its deadline ends there: between two steps, before it is
prepared, or when it is decoded. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from maskfx.engine.admission.batch_policy import BatchPolicy, WaitingRequest
from maskfx.scheduling.admission_policy import AdmissionPolicy
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Demand
from maskfx.scheduling.rounds.round_policy import RoundCall, StepLoad

EDGE = 1e-9  # seconds: rounding


@dataclass(eq=False)
class Request:
    """One request: what is left of it."""

    number: int
    demand: Demand
    left: int
    encoding: float
    decoding: float
    parked: float = inf
    admitted: bool = False
    overtaken: int = 0

    @property
    def load(self) -> StepLoad:
        work = self.demand.work
        return StepLoad(work.sites, work.whole, work.branches, work.kind)

    def call(self) -> RoundCall:
        demand = self.demand
        return RoundCall(
            self.number,
            self.load,
            self.left,
            demand.work.steps,
            demand.arrived,
            demand.due,
            self.decoding,
        )


@dataclass
class EngineSimulation:
    """One engine.

    Args:
        costs: Seconds of steps and of what is around them.
        waiting: Which calls a step batches.
        running: The most requests that are active at once.
        admission: Which prepared requests begin; None for all.
    """

    costs: FittedCosts
    waiting: BatchPolicy
    running: int
    admission: AdmissionPolicy | None
    now: float = 0.0
    latency: list[float] = field(default_factory=list)  # of those in time
    batches: list[int] = field(default_factory=list)
    late: int = 0
    _queued: list[Request] = field(default_factory=list)
    _encoding: list[Request] = field(default_factory=list)
    _parked: list[Request] = field(default_factory=list)
    _decoding: list[Request] = field(default_factory=list)
    _batch: list[Request] = field(default_factory=list)
    _step: float = inf  # seconds left of the step under way
    _took: float = 0.0  # seconds of that step

    def run(self, demands: Sequence[Demand]) -> None:
        """Serve all requests."""
        coming = [self._request(n, one) for n, one in enumerate(demands)][::-1]
        while (
            coming
            or self._queued
            or self._encoding
            or self._parked
            or self._decoding
            or self._batch
        ):
            self._start()
            arrives = coming[-1].demand.arrived - self.now if coming else inf
            tasks = [r.encoding for r in self._encoding] + [r.decoding for r in self._decoding]
            tasks += [self._step] if self._batch else []
            ends = min(tasks, default=inf) * len(tasks) if tasks else inf
            passed = max(0.0, min(arrives, ends))
            self.now += passed
            self._advance(passed / len(tasks) if tasks else 0.0)
            while coming and coming[-1].demand.arrived <= self.now + EDGE:
                self._queued.append(coming.pop())

    def _request(self, number: int, demand: Demand) -> Request:
        around, share = self.costs.around(demand.work), self.costs.decode_share
        left = demand.work.steps
        return Request(number, demand, left, (1 - share) * around, share * around)

    def _is_late(self, request: Request) -> bool:
        return self.now >= request.demand.due

    def _drop_late(self, among: list[Request]) -> list[Request]:
        kept = [request for request in among if not self._is_late(request)]
        self.late += len(among) - len(kept)
        return kept

    def _start(self) -> None:
        """Admit what there is room for, and begin a step if none is under way."""
        self._queued = self._drop_late(self._queued)
        active = len(self._encoding) + len(self._parked) + len(self._decoding) + len(self._batch)
        while self._queued and active < self.running:
            self._encoding.append(self._queued.pop(0))
            active += 1
        if self._batch:
            return
        self._parked = self._drop_late(self._parked)
        ready = self._admitted()
        if not ready:
            return
        seats = [WaitingRequest(r.parked, r.number, r.overtaken, r.demand.due) for r in ready]
        self._batch = [ready[place] for place in self.waiting.choose(seats)]
        latest = max(request.number for request in self._batch)
        for request in ready:
            request.overtaken += request not in self._batch and request.number < latest
        self._parked = [request for request in self._parked if request not in self._batch]
        self._step = self._took = self.costs.step([r.demand.work for r in self._batch])
        self.batches.append(len(self._batch))

    def _admitted(self) -> list[Request]:
        policy = self.admission
        acts = policy is not None and policy.acts([r.demand.due for r in self._parked])
        new = [request for request in self._parked if not request.admitted]
        if policy is None or not acts:
            for request in new:
                request.admitted = True
        elif new:
            active = [request.call() for request in self._parked if request.admitted]
            if len(active) <= self.waiting.batch:
                self._decide(policy, new, active)
        return [request for request in self._parked if request.admitted]

    def _decide(self, policy: AdmissionPolicy, new: list[Request], active: list[RoundCall]) -> None:
        found = policy.decide(self.now, [r.call() for r in new], active, self.waiting.batch)
        for request in new:
            request.admitted = request.number in found.starts
        dropped = [request for request in new if request.number in found.drops]
        self.late += len(dropped)
        self._parked = [request for request in self._parked if request not in dropped]
        left = [request for request in new if request not in dropped]
        if left and not active and not found.starts:
            min(left, key=lambda r: (r.demand.arrived, r.number)).admitted = True

    def _advance(self, seconds: float) -> None:
        """Each task gets these seconds of the core."""
        for request in self._encoding:
            request.encoding -= seconds
        for request in self._decoding:
            request.decoding -= seconds
        for request in [one for one in self._encoding if one.encoding <= EDGE]:
            self._encoding.remove(request)
            request.parked = self.now
            self._parked.append(request)
        for request in [one for one in self._decoding if one.decoding <= EDGE]:
            self._decoding.remove(request)
            if self._is_late(request):
                self.late += 1
            else:
                self.latency.append(self.now - request.demand.arrived)
        if not self._batch:
            return
        self._step -= seconds
        if self._step > EDGE:
            return
        if self.admission is not None:
            self.admission.learn([request.load for request in self._batch], self._took)
        for request in self._batch:
            request.left -= 1
            (self._parked if request.left else self._decoding).append(request)
            request.parked = self.now
        self._batch = []
