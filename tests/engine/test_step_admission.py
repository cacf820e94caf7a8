"""Admission to the engine's steps: none becomes late by it, drops have a reason, none starves."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

import maskfx
from maskfx.engine.admission import default_admission
from maskfx.engine.admission.default_admission import MEASURED, DefaultAdmission
from maskfx.engine.admission.step_admission import StepAdmission
from maskfx.engine.step_runner import Step
from maskfx.engine.ticket import ParkedCalls, Ticket, TicketState
from maskfx.errors import DeadlineMissed, InputError
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.admission_policy import AdmissionDecision, AdmissionPolicy, check
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.rounds.elastic import ElasticRounds
from maskfx.scheduling.rounds.round_policy import RoundCall, StepLoad
from maskfx.scheduling.slack_admission import SlackAdmission, demand_of, member_of
from tests.factories.pipelines import PIPES, anew, call_of, square

COSTS = FittedCosts(base=0.4, per_request=0.0, per_site=1e-3, per_size=0.05)
NAME = "FluxInpaintPipeline"


class Fake:
    """A request with a number of steps, whose calls the test parks; it has no pipeline."""

    def __init__(self, id: int, load: StepLoad, steps: int, arrived: float, due: float) -> None:
        self.call = RoundCall(id, load, steps, steps, arrived, due)
        self.ticket = Ticket(lambda: None, due)
        self.left = steps
        self.ended = inf
        self.parked = self.park(arrived)

    def park(self, now: float) -> ParkedCalls:
        calls: list[Any] = [SimpleNamespace(recording=False)]
        return ParkedCalls(self.ticket, calls, now, self.left == 1)

    def stepped(self, now: float) -> None:
        self.left -= 1
        self.parked = self.park(now)
        if not self.left:
            self.ended = now
            self.ticket.finish("a picture")


class FakeEstimates:
    """Estimates of requests whose loads are known."""

    def __init__(self, fakes: dict[Ticket, Fake]) -> None:
        self.fakes = fakes

    def call(self, parked: ParkedCalls) -> RoundCall:
        fake = self.fakes[parked.ticket]
        return replace(fake.call, left=fake.left)

    def note(self, batch: Sequence[ParkedCalls]) -> list[StepLoad]:
        return [self.fakes[parked.ticket].call.load for parked in batch]

    def forget(self) -> None:
        return


class AtOnce:
    """First come, first served."""

    def acts(self, dues: Sequence[float]) -> bool:
        return True

    def decide(
        self, now: float, waiting: Sequence[RoundCall], active: Sequence[RoundCall], slots: int
    ) -> AdmissionDecision:
        room = slots - len(active)
        oldest = sorted(waiting, key=lambda call: call.arrived)
        return AdmissionDecision(tuple(call.id for call in oldest[:room]))

    def learn(self, batch: Sequence[StepLoad], seconds: float) -> None:
        return


def run(policy: AdmissionPolicy, fakes: Sequence[Fake], slots: int = 4) -> StepAdmission:
    """Run requests under a fake clock that steps advance by exactly what they cost."""
    admission = StepAdmission(policy, slots)
    admission._estimates = cast("Any", FakeEstimates({fake.ticket: fake for fake in fakes}))
    now = 0.0
    for _ in range(100_000):
        coming = [fake for fake in fakes if not fake.ticket.done()]
        if not coming:
            return admission
        parked = [fake.parked for fake in coming if fake.call.arrived <= now]
        seated = admission.select(now, parked)
        for fake in coming:
            if fake.parked.error is not None:
                fake.ticket.finish(error=fake.parked.error)
        if not seated:
            assert all(one.error is not None for one in parked), "requests wait beside no step"
            left = [f.call.arrived for f in coming if f.call.arrived > now]
            now = min(left, default=now)
            continue
        if isinstance(policy, DefaultAdmission):
            seated = seated[:slots]  # as the engine's BatchPolicy does
        assert len(seated) <= slots
        members = [fake for fake in coming if fake.parked in seated]
        works = [demand_of(fake.call).work for fake in members]
        took = COSTS.step(works)
        admission.note(seated, Step(len(seated), now, 0.0, took))
        now += took
        for fake in members:
            fake.stepped(now)
    raise AssertionError("requests starve")


def drawn(seed: int, count: int = 60) -> list[Fake]:
    draw = random.Random(seed)
    fakes, at = [], 0.0
    for id in range(count):
        at += draw.expovariate(0.16)
        whole = draw.choice((400, 900, 1600))
        kind = draw.choice((StepKind.EDIT, StepKind.DENSE))
        load = StepLoad(round(whole * draw.uniform(0.05, 1.0)), whole, kind=kind)
        steps = draw.randint(5, 20)
        alone = steps * COSTS.step([demand_of(RoundCall(id, load, steps, steps, at)).work])
        due = inf if draw.random() < 0.2 else at + draw.uniform(0.9, 5.0) * alone
        fakes.append(Fake(id, load, steps, at, due))
    return fakes


@pytest.mark.parametrize("seed", range(4))
def test_a_request_that_begins_meets_its_deadline_and_drops_say_why(seed: int) -> None:
    fakes = drawn(seed)
    admission = run(SlackAdmission(COSTS, fixed=True), fakes)
    dropped = [fake for fake in fakes if fake.ended == inf]
    assert admission.dropped == len(dropped) > 0
    for fake in fakes:
        assert fake.ended == inf or fake.ended <= fake.call.due + 1e-6
    for fake in dropped:
        assert fake.left == fake.call.steps, "dropped after it had begun"
        with pytest.raises(DeadlineMissed, match="predicted to take .* even alone"):
            fake.ticket.result()


@pytest.mark.parametrize("seed", range(4))
def test_more_are_in_time_than_first_come_first_served(seed: int) -> None:
    def in_time(policy: AdmissionPolicy) -> int:
        fakes = drawn(seed)
        run(policy, fakes)
        return sum(fake.ended <= fake.call.due for fake in fakes)

    assert in_time(SlackAdmission(COSTS, fixed=True)) > in_time(AtOnce()) + 5


def test_costs_are_learned_from_the_steps() -> None:
    policy = SlackAdmission()
    run(policy, drawn(1))
    work = demand_of(RoundCall(0, StepLoad(500, 900), 1, 1, 0.0)).work
    assert policy.costs.step([work]) == pytest.approx(COSTS.step([work]), rel=0.15)


def test_the_time_between_steps_counts() -> None:
    class Notes(AtOnce):
        def __init__(self) -> None:
            self.seconds = list[float]()

        def learn(self, batch: Sequence[StepLoad], seconds: float) -> None:
            self.seconds.append(seconds)

    policy = Notes()
    fake = Fake(0, StepLoad(1, 1), 9, 0.0, inf)
    admission = StepAdmission(policy, 1)
    admission._estimates = cast("Any", FakeEstimates({fake.ticket: fake}))
    for step in range(3):
        admission.select(step, [fake.parked])
        admission.note([fake.parked], Step(1, float(step), 0.0, 0.75))
        fake.stepped(step + 0.75)
    assert policy.seconds == [0.75, 1.0, 1.0]


def test_one_that_waits_for_another_doesnt_hold_it_up() -> None:
    class WhenAlone(AtOnce):
        def decide(
            self, now: float, waiting: Sequence[RoundCall], active: Sequence[RoundCall], slots: int
        ) -> AdmissionDecision:
            first = min(call.id for call in waiting)
            return AdmissionDecision(() if active else (first,))

    one, two = (Fake(id, StepLoad(1, 1), 9, 0.0, inf) for id in range(2))
    admission = StepAdmission(WhenAlone(), 2)
    admission._estimates = cast("Any", FakeEstimates({f.ticket: f for f in (one, two)}))
    assert admission.select(0.0, [one.parked]) == [one.parked]
    admission.note([one.parked], Step(1, 0.0, 0.0, 1.0))
    assert admission.select(1.0, [two.parked]) == []
    one.ticket.state = TicketState.WAITING
    assert admission.select(1.0, [two.parked]) == [two.parked]


def test_a_policy_that_fails_holds_up_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(AtOnce):
        def decide(self, *given: object) -> AdmissionDecision:
            raise RuntimeError("a bug")

    class Idle(AtOnce):
        def decide(self, *given: object) -> AdmissionDecision:
            return AdmissionDecision()

    for policy in (Broken(), Idle()):
        fakes = drawn(0, 8)
        run(policy, fakes)
        assert all(fake.ended < inf for fake in fakes)
    assert "an admission can't be decided" in caplog.text


def test_decisions_are_checked() -> None:
    calls = [RoundCall(id, StepLoad(1, 1), 1, 1, 0.0) for id in range(3)]
    check(AdmissionDecision((0, 1), {2: 1.0}), calls, [], 2)
    for wrong in (AdmissionDecision((5,)), AdmissionDecision((0, 0)), AdmissionDecision((0, 1, 2))):
        with pytest.raises(ValueError, match="an admission of"):
            check(wrong, calls, [], 2)


def test_a_request_is_translated() -> None:
    load = StepLoad(10, 64, 2, StepKind.REUSE, True)
    demand = demand_of(RoundCall(7, load, 3, 9, 1.0, 20.0, 2.0, "anna"))
    assert (demand.id, demand.due, demand.user) == ("7", 18.0, "anna")
    work = demand.work
    assert (work.sites, work.whole, work.steps, work.branches) == (10, 64, 3, 2)
    member = member_of(load)
    assert (member.kind, member.sites, member.whole, member.first) == (StepKind.REUSE, 20, 64, True)


# With an engine.


@cache
def pipeline() -> Any:
    return anew(NAME, compiled_pipe=maskfx.compile(PIPES[NAME].build(), quality="all-steps"))


def arguments(seed: int, steps: int = 3) -> dict[str, Any]:
    given = call_of(PIPES[NAME], seed, square())
    return {**given, "num_inference_steps": steps, "output_type": "latent", "return_dict": False}


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def test_what_cant_be_in_time_ends_before_its_first_step() -> None:
    pipe = pipeline()
    wanted = [pipe(**arguments(seed))[0] for seed in range(2)]
    policy = SlackAdmission(FittedCosts(base=10.0, per_request=0.0, per_site=0.0), fixed=True)
    with maskfx.Engine(admission=policy) as engine:
        plain = engine.submit(pipe, **arguments(0))
        late = engine.submit(pipe, **arguments(1), deadline=20.0)  # three steps take 30 s
        loose = engine.submit(pipe, **arguments(1), deadline=100.0)
        with pytest.raises(DeadlineMissed, match=r"take 30\.\d+ s from now.*it made no step"):
            late.result(timeout=60)
        assert late.steps == 0
        assert error(plain.result(timeout=60)[0], wanted[0]) < 1e-4
        assert error(loose.result(timeout=60)[0], wanted[1]) < 1e-4
        assert engine.admission is not None
        assert engine.admission.dropped == 1


def test_requests_begin_when_the_policy_says() -> None:
    class OneByOne(AtOnce):
        def __init__(self) -> None:
            self.seen = list[tuple[RoundCall, ...]]()

        def decide(
            self, now: float, waiting: Sequence[RoundCall], active: Sequence[RoundCall], slots: int
        ) -> AdmissionDecision:
            self.seen.append(tuple(waiting))
            last = max(waiting, key=lambda call: call.id)
            return AdmissionDecision(() if active else (last.id,))

    pipe, policy = pipeline(), OneByOne()
    wanted = [pipe(**arguments(seed))[0] for seed in range(3)]
    with maskfx.Engine(admission=policy) as engine:
        tickets = [engine.submit(pipe, **arguments(seed), user="anna") for seed in range(3)]
        pictures = [ticket.result(timeout=60)[0] for ticket in tickets]
        assert max(step.requests for step in engine.steps) == 1
    for got, right in zip(pictures, wanted, strict=True):
        assert error(got, right) < 1e-4
    assert all(call.user == "anna" and call.left == 3 for calls in policy.seen for call in calls)


def test_rounds_and_admission_exclude_each_other() -> None:
    policy = SlackAdmission()
    with pytest.raises(InputError, match="leave out admission="):
        maskfx.Engine(ranks=2, rounds=ElasticRounds(), admission=policy)


# The default.


def dues(fakes: Sequence[Fake], free: bool) -> Sequence[Fake]:
    """Give no request a deadline, or each of them."""
    for fake in fakes:
        fake.call = replace(fake.call, due=inf if free else fake.call.arrived + 1e4)
        fake.ticket.due = fake.call.due
    return fakes


def test_by_default_requests_without_deadlines_begin_at_once() -> None:
    policy = DefaultAdmission()
    fakes = dues(drawn(0), free=True)
    admission = StepAdmission(policy, 4)
    parked = [fake.parked for fake in fakes]
    assert admission.select(0.0, parked) == parked  # also more than there are slots
    admission.note(parked, Step(len(parked), 0.0, 0.0, 1.0))
    assert policy.policy is None


def test_by_default_slack_decides_where_there_are_deadlines() -> None:
    """As soon as steps were measured; at most those before that are late, and some are dropped."""
    policy, fakes, first_come = DefaultAdmission(), drawn(1), drawn(1)
    admission = run(policy, fakes)
    run(AtOnce(), first_come)
    assert isinstance(policy.policy, SlackAdmission)
    assert admission.dropped == sum(fake.ended == inf for fake in fakes) > 0
    in_time = [sum(f.ended <= f.call.due for f in own) for own in (fakes, first_come)]
    assert in_time[0] >= in_time[1] + 10
    assert sum(fake.call.due < fake.ended < inf for fake in fakes) <= MEASURED


def test_one_deadline_has_slack_decide_about_requests_without() -> None:
    policy = DefaultAdmission()
    assert not policy.acts([inf, inf])
    for _ in range(MEASURED):
        assert not policy.acts([inf, 5.0])  # until enough steps were measured
        policy.learn([StepLoad(10, 64)], 0.5)
    assert policy.acts([inf, 5.0])
    assert not policy.acts([inf])


def test_without_the_servers_packages_requests_begin_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "maskfx.scheduling.slack_admission", None)  # isn't found
    admission = StepAdmission(DefaultAdmission(), 1)
    parked = [fake.parked for fake in dues(drawn(0), free=False)]
    with caplog.at_level(logging.INFO, default_admission.__name__):
        assert admission.select(0.0, parked) == parked
        assert admission.select(0.0, parked) == parked
    assert caplog.text.count("install maskfx[serve]") == 1


def test_an_engine_has_the_default() -> None:
    with maskfx.Engine() as engine, maskfx.Engine(admission=None) as plain:
        assert engine.admission is not None
        assert plain.admission is None
        pipe = pipeline()
        ticket = engine.submit(pipe, **arguments(0), deadline=100.0)
        assert error(ticket.result(timeout=60)[0], pipe(**arguments(0))[0]) < 1e-4
        assert isinstance(engine.admission.policy, DefaultAdmission)
        assert isinstance(engine.admission.policy.policy, SlackAdmission)
    with pytest.raises(InputError, match="give a policy, None"):
        maskfx.Engine(admission=cast("Any", "slack"))
