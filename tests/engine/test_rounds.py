"""Rounds in the engine: disjoint groups, elastic degrees, every request served, the same pictures.

Ranks are processes in the slow tests; in the others the steps of a rank run in this process, and
which ranks compute at the same time is noted.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

import maskfx
from maskfx.engine.admission.request_estimates import RequestEstimates
from maskfx.errors import DeadlineMissed, InputError
from maskfx.runtime.step_executor import compute_steps
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.degree_costs import from_efficiency
from maskfx.scheduling.rounds.elastic import SETTINGS, ElasticRounds, work_of
from maskfx.scheduling.rounds.round_policy import (
    RankedGroup,
    RoundCall,
    RoundDecision,
    StepLoad,
    check,
)
from tests.factories.pipelines import PIPES, anew, call_of, square, white

DIT, UNET = "FluxInpaintPipeline", "StableDiffusionInpaintPipeline"
WHOLE = "StableDiffusionPipeline"  # without a mask nothing is captured
PROFILE = from_efficiency(FittedCosts(base=0.0, per_request=0.0, per_site=1e-4), {2: 0.9, 4: 0.8})


@cache
def pipeline(name: str) -> Any:
    return anew(name, compiled_pipe=maskfx.compile(PIPES[name].build(), quality="all-steps"))


def arguments(name: str, seed: int, mask: Any = None, steps: int = 3) -> dict[str, Any]:
    given = call_of(PIPES[name], seed, mask)
    return {**given, "num_inference_steps": steps, "output_type": "latent", "return_dict": False}


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


class Script:
    """Runs each request alone for a step at a time, at degrees one after the other."""

    at_borders = True

    def __init__(self, *degrees: int) -> None:
        self.degrees, self.taken = degrees, list[int]()

    def decide(
        self, now: float, calls: Sequence[RoundCall], ranks: Sequence[int], count: int
    ) -> RoundDecision:
        degree = self.degrees[len(self.taken) % len(self.degrees)]
        self.taken.append(degree)
        oldest = min(calls, key=lambda call: call.arrived)
        return RoundDecision((RankedGroup(tuple(ranks[:degree]), {oldest.id: 1}),))

    def learn(self, degree: int, batch: Sequence[StepLoad], seconds: float) -> None:
        assert seconds > 0


class Chance(Script):
    """Chooses requests and steps at random, degrees in turn, whenever a rank is free."""

    at_borders = False

    def __init__(self, seed: int, *degrees: int) -> None:
        super().__init__(*degrees)
        self.draw = random.Random(seed)

    def decide(
        self, now: float, calls: Sequence[RoundCall], ranks: Sequence[int], count: int
    ) -> RoundDecision:
        left, free, groups = list(calls), list(ranks), list[RankedGroup]()
        self.draw.shuffle(left)
        while left and free:
            degree = min(len(free), self.degrees[len(self.taken) % len(self.degrees)])
            self.taken.append(degree)
            own, free = tuple(free[:degree]), free[degree:]
            members, left = left[: (n := self.draw.choice((1, 2)))], left[n:]
            groups.append(RankedGroup(own, {m.id: self.draw.choice((1, 2, 5)) for m in members}))
        return RoundDecision(tuple(groups))


class LocalSet:
    """Some ranks of a group."""

    joint = False

    def __init__(self, group: Any, ranks: tuple[int, ...]) -> None:
        self.group, self.ranks = group, ranks

    def run(self, denoiser: Any, steps: Any, shared: Any = None) -> Any:
        return self.group.compute(denoiser, steps, self.ranks)


class LocalGroup:
    """Ranks whose steps this process computes; notes which compute at the same time."""

    def __init__(self, denoiser: Any, ranks: maskfx.Ranks, waits: Any = None) -> None:
        self.pool, self.failures, self.computed_here = SimpleNamespace(size=ranks.count), 0, 0
        self.now = set[int]()
        self.sets = list[tuple[int, ...]]()
        self.most = 0  # groups at the same time
        self.groups = 0
        self.overlaps = 0
        self._lock = threading.Lock()

    def on(self, ranks: tuple[int, ...]) -> Any:
        return LocalSet(self, ranks)

    def compute(self, denoiser: Any, steps: Any, ranks: tuple[int, ...]) -> Any:
        with self._lock:
            self.overlaps += not self.now.isdisjoint(ranks)
            self.now |= set(ranks)
            self.sets.append(ranks)
            self.groups += 1
            self.most = max(self.most, self.groups)
        time.sleep(0.01)  # others start meanwhile
        with self._lock:
            found = compute_steps(denoiser, steps)
            self.now -= set(ranks)
            self.groups -= 1
        return found

    def stop(self) -> None:
        return


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskfx.engine.step_runner.RankGroup", LocalGroup)


def group_of(engine: maskfx.Engine) -> Any:
    (group,) = engine.runner.rank_groups()
    return group


# What is decided.


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_groups_are_disjoint_and_every_parked_request_is_served(count: int) -> None:
    """Random loads, deadlines that can and can't be met, and none; new requests join all the time.

    At most a few requests join per round, so that all of them are served in the end.
    """
    draw = random.Random(count)
    policy, now, joined = ElasticRounds(start=PROFILE, fixed=True), 0.0, 0
    calls: dict[int, RoundCall] = {}
    rounds = 0
    while calls or joined < 40:
        for _ in range(draw.randint(0, 3) if joined < 40 else 0):
            sites, steps = draw.choice((16, 64, 256)), draw.randint(1, 9)
            due = draw.choice((float("inf"), now + draw.uniform(0.001, 1.0)))
            load = StepLoad(draw.randint(1, sites), sites, draw.choice((1, 2)))
            calls[joined] = RoundCall(joined, load, steps, steps, now, due)
            joined += 1
        if not calls:
            continue
        decision = policy.decide(now, list(calls.values()), range(count), count)
        check(decision, list(calls.values()), range(count))
        assert decision.groups
        assert not decision.drops
        longest = 0.0
        for group in decision.groups:
            loads = [calls[id].load for id in group.steps]
            seconds = 1e-4 * sum(x.sites * x.pictures for x in loads) / len(group.ranks)
            longest = max(longest, seconds * max(group.steps.values()))
            for id, made in group.steps.items():
                call = calls.pop(id)
                assert made <= call.left
                if made < call.left:
                    calls[id] = RoundCall(
                        id, call.load, call.left - made, call.steps, call.arrived, call.due
                    )
        now += longest
        rounds += 1
        assert rounds < 1000, f"{len(calls)} requests starve"


def test_a_free_rank_gets_steps_that_end_with_the_round() -> None:
    """A late comer on the rank that is left; not beyond the border, nor on ranks that compute."""
    policy = ElasticRounds(replace(SETTINGS, scale_up=False), start=PROFILE, fixed=True)
    load = StepLoad(100, 100)  # 10 ms
    (first,) = policy.decide(0.0, [RoundCall(0, load, 50, 50, 0.0)], range(2), 2).groups
    (busy,) = first.ranks
    seconds = 0.01 * first.steps[0]
    late_comer = RoundCall(1, load, 50, 50, 0.01)
    (group,) = policy.decide(0.5 * seconds, [late_comer], [1 - busy], 2).groups
    assert group.ranks == (1 - busy,)
    assert 1 <= group.steps[1] <= first.steps[0] / 2
    assert policy.decide(0.999 * seconds, [late_comer], [1 - busy], 2).groups == ()
    assert policy.decide(2 * seconds, [late_comer], [1 - busy], 2).groups == ()
    assert policy.decide(2 * seconds, [late_comer], range(2), 2).groups


def test_ranks_in_blocks_of_eight_have_borders_of_their_own() -> None:
    """A request starts beyond the border of the block that computes, and goes on at its own."""
    policy = ElasticRounds(start=PROFILE, fixed=True)
    long, large = StepLoad(80_000, 80_000), StepLoad(10_000, 10_000)
    (first,) = policy.decide(0.0, [RoundCall(0, long, 50, 50, 0.0)], range(16), 16).groups
    free = [n for n in range(16) if n not in first.ranks]
    second = RoundCall(1, large, 50, 50, 0.1)
    (own,) = policy.decide(0.1, [second], free, 16).groups
    assert {n // 8 for n in own.ranks} == {1 - first.ranks[0] // 8}
    left = 50 - own.steps[1]
    (further,) = policy.decide(1.0, [RoundCall(1, large, left, 50, 0.1)], free, 16).groups
    assert further.ranks == own.ranks


def test_ranks_that_others_have_are_not_decided_about() -> None:
    """Ranks that are busy with what the policy didn't decide, and another number of ranks."""
    policy = ElasticRounds(start=PROFILE, fixed=True)
    call = RoundCall(0, StepLoad(100, 100), 5, 5, 0.0)
    assert policy.decide(0.0, [call], [1, 2], 4).groups == ()
    assert policy.decide(0.1, [call], range(4), 4).groups
    (group,) = policy.decide(0.2, [call], range(2), 2).groups
    assert set(group.ranks) <= {0, 1}


@pytest.mark.usefixtures("local")
def test_a_request_starts_on_a_free_rank_while_another_group_computes() -> None:
    """The policy of rounds gives the first request one rank only, for steps of the whole run."""
    pipe = pipeline(WHOLE)
    settings = replace(SETTINGS, scale_up=False, length=30.0)
    profile = from_efficiency(FittedCosts(base=0.05, per_request=0.0, per_site=0.0), {2: 0.5})
    policy = ElasticRounds(settings, start=profile, fixed=True)
    with maskfx.Engine(ranks=2, rounds=policy) as engine:
        long = engine.submit(pipe, **arguments(WHOLE, 1, steps=40))
        while not long.steps:
            time.sleep(0.005)
        short = engine.submit(pipe, **arguments(WHOLE, 2, steps=2))
        short.result(60)
        assert not long.done()
        long.result(60)
        group = group_of(engine)
    assert group.overlaps == 0
    assert {ranks for ranks in group.sets} == {(0,), (1,)}


def test_costs_are_fitted_to_the_steps_that_were_made() -> None:
    policy = ElasticRounds()
    assert policy.profile.degrees == (1, 2, 3, 4, 8)
    truth = from_efficiency(FittedCosts(base=0.01, per_request=0.0, per_site=1e-4), {2: 0.55})
    draw = random.Random(1)
    loads = [StepLoad(n, n) for n in (draw.randint(50, 400) for _ in range(60))]
    for load in loads:
        for degree in (1, 2):
            batch = [work_of(load)]
            step = truth.one.step(batch) if degree == 1 else truth.step(2, batch)
            policy.learn(degree, [load], step * draw.uniform(0.98, 1.02))
    policy.refit()
    for load in loads:
        for degree in (1, 2):
            wanted = truth.step(degree, [work_of(load)])
            assert policy.profile.step(degree, [work_of(load)]) == pytest.approx(wanted, rel=0.05)
    call = RoundCall(0, loads[0], 5, 5, 0.0)
    other = RoundCall(1, loads[1], 5, 5, 0.0)
    decision = policy.decide(0.0, [call, other], (0, 1), 2)
    assert [len(group.ranks) for group in decision.groups] == [1, 1]  # 2 hardly pays


@pytest.mark.parametrize(
    "wrong",
    [
        RoundDecision((RankedGroup((0,), {1: 1}), RankedGroup((0, 1), {2: 1}))),
        RoundDecision((RankedGroup((2,), {1: 1}),)),
        RoundDecision((RankedGroup((0,), {1: 1}), RankedGroup((1,), {1: 1}))),
        RoundDecision((RankedGroup((0,), {7: 1}),)),
        RoundDecision((RankedGroup((0,), {1: 0}),)),
    ],
)
def test_a_wrong_decision_is_refused(wrong: RoundDecision) -> None:
    calls = [RoundCall(id, StepLoad(1, 1), 3, 3, 0.0) for id in (1, 2)]
    with pytest.raises(ValueError, match="a round"):
        check(wrong, calls, (0, 1))


# What the engine does.


def test_rounds_need_ranks() -> None:
    with pytest.raises(InputError, match="ranks=2"):
        maskfx.Engine(rounds=ElasticRounds())


@pytest.mark.usefixtures("local")
def test_groups_step_at_the_same_time_on_disjoint_ranks() -> None:
    pipe = pipeline(WHOLE)

    def given() -> list[dict[str, Any]]:  # with new generators
        return [arguments(WHOLE, seed, steps=3 + seed % 3) for seed in range(6)]

    alone = [pipe(**each)[0] for each in given()]
    with maskfx.Engine(ranks=4, rounds=Chance(1, 1, 2, 3)) as engine:
        tickets = [engine.submit(pipe, **each) for each in given()]
        found = [ticket.result(60)[0] for ticket in tickets]
        group = group_of(engine)
    assert group.overlaps == 0
    assert group.most > 1
    assert {len(ranks) for ranks in group.sets} >= {1, 2}
    for ours, theirs in zip(found, alone, strict=True):
        assert error(ours, theirs) < 1e-4
    assert engine.rounds is not None
    assert sum(engine.rounds.counts.steps.values()) == len(group.sets)


@pytest.mark.usefixtures("local")
def test_a_request_that_isnt_chosen_stays_parked_and_may_be_cancelled() -> None:
    pipe = pipeline(WHOLE)

    class First(Script):
        """Only the oldest request steps."""

    with maskfx.Engine(ranks=2, rounds=First(1)) as engine:
        long = engine.submit(pipe, **arguments(WHOLE, 1, steps=12))
        while not long.steps:
            time.sleep(0.005)
        parked = engine.submit(pipe, **arguments(WHOLE, 2))
        late = engine.submit(pipe, **arguments(WHOLE, 3), deadline=0.05)
        parked.cancel()
        with pytest.raises(maskfx.MaskfxError):
            parked.result(60)
        with pytest.raises(DeadlineMissed):
            late.result(60)
        assert not long.done()
        assert parked.steps == late.steps == 0
        long.result(60)


@pytest.mark.usefixtures("local")
def test_a_policy_that_fails_or_chooses_nothing_holds_nobody_up() -> None:
    class Broken(Script):
        def decide(self, *given: Any) -> RoundDecision:
            self.taken.append(0)
            if len(self.taken) % 2:
                raise ZeroDivisionError
            return RoundDecision()

    with maskfx.Engine(ranks=2, rounds=Broken(1)) as engine:
        engine.submit(pipeline(WHOLE), **arguments(WHOLE, 1)).result(60)


@pytest.mark.usefixtures("local")
def test_a_request_that_cannot_be_estimated_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate, failed = RequestEstimates.call, list[Any]()

    def failing(self: RequestEstimates, parked: Any) -> RoundCall:
        if not failed:
            failed.append(parked)
            raise ZeroDivisionError("no estimate")
        return estimate(self, parked)

    monkeypatch.setattr(RequestEstimates, "call", failing)
    with maskfx.Engine(ranks=2, rounds=Script(1)) as engine:
        with pytest.raises(ZeroDivisionError):
            engine.submit(pipeline(WHOLE), **arguments(WHOLE, 1)).result(60)
        engine.submit(pipeline(WHOLE), **arguments(WHOLE, 2)).result(60)


@pytest.mark.usefixtures("local")
def test_a_dropped_request_ends_as_late() -> None:
    class Dropping(Script):
        def decide(self, now: float, calls: Sequence[RoundCall], *rest: Any) -> RoundDecision:
            return RoundDecision(late=(calls[0].id,), drops=(calls[0].id,))

    with maskfx.Engine(ranks=2, rounds=Dropping(1)) as engine:
        ticket = engine.submit(pipeline(WHOLE), **arguments(WHOLE, 1), deadline=100)
        with pytest.raises(DeadlineMissed, match="can't be done"):
            ticket.result(60)
        assert engine.rounds is not None
        assert engine.rounds.counts.late == 1


# On processes.


@pytest.mark.slow
@pytest.mark.parametrize("name", [DIT, UNET])
def test_an_elastic_run_makes_the_picture_of_a_run_alone(name: str) -> None:
    """An edit and a picture as a whole, at degrees 1, 2, 4, 2, 1 within each run."""
    pipe = pipeline(name)

    def given() -> list[dict[str, Any]]:
        return [arguments(name, 0, square(), 7), arguments(name, 1, white(), 7)]

    pipe(**given()[0])  # records the template
    alone = [pipe(**each)[0] for each in given()]
    script = Script(1, 2, 4, 2, 1)
    with maskfx.Engine(ranks=4, rounds=script) as engine:
        found = [engine.submit(pipe, **each).result(300)[0] for each in given()]
        group = group_of(engine)
        assert group.computed_here == group.failures == 0
    assert set(script.taken) == {1, 2, 4}
    for ours, theirs in zip(found, alone, strict=True):
        assert error(ours, theirs) < 1e-4


@pytest.mark.slow
def test_a_killed_rank_loses_nothing() -> None:
    """Groups of one rank each step at the same time; one rank is killed, then another one hangs."""
    pipe = pipeline(WHOLE)

    def given() -> list[dict[str, Any]]:
        return [arguments(WHOLE, seed, steps=10) for seed in range(4)]

    alone = [pipe(**each)[0] for each in given()]
    with maskfx.Engine(ranks=3, rounds=Chance(2, 1)) as engine:
        engine.submit(pipe, **given()[0]).result(300)  # starts the ranks
        group = group_of(engine)
        group.pool.waits = type(group.pool.waits)(step=5, exchange=3, start=120)
        group.pool.ranks.waits = group.pool.waits
        tickets = [engine.submit(pipe, **each) for each in given()]
        while sum(ticket.steps for ticket in tickets) < 4:
            time.sleep(0.005)
        os.kill(group.pool.ranks.all[0].child.pid, signal.SIGKILL)
        while sum(ticket.steps for ticket in tickets) < 12:
            time.sleep(0.005)
        os.kill(group.pool.ranks.all[1].child.pid, signal.SIGSTOP)  # the killed one may be gone
        found = [ticket.result(300)[0] for ticket in tickets]
        assert group.failures >= 1
    for ours, theirs in zip(found, alone, strict=True):
        assert error(ours, theirs) < 1e-4
