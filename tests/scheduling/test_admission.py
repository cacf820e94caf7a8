"""Admission by benefit, against batches that are stepped by hand: a start makes no request late."""

from __future__ import annotations

from math import inf

from hypothesis import assume, given, settings
from hypothesis import strategies as some

from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Demand, Running, Work, Worker
from maskfx.scheduling.router import make_router
from maskfx.scheduling.scheduler import SlackScheduler

COSTS = FittedCosts(
    base=0.05, per_request=0.01, per_size=0.04, per_site=1e-4, per_dense_site=5e-5, per_pair=1e-8
)
EDGE = 1e-6
NOW = 50.0

works = some.builds(
    Work,
    sites=some.integers(1, 1000),
    whole=some.sampled_from([1024, 2304, 4096]),
    steps=some.integers(1, 30),
    branches=some.integers(1, 2),
    kind=some.sampled_from([StepKind.EDIT, StepKind.DENSE]),
)


@some.composite
def demands(draw: some.DrawFn, id: str) -> Demand:
    """A request due after 1 to 8 times what it takes alone, or never."""
    work, arrived = draw(works), draw(some.floats(40.0, NOW))
    times = draw(some.one_of(some.floats(1.0, 8.0), some.just(inf)))
    return Demand(id, work, arrived, arrived + times * COSTS.solo(work))


@some.composite
def scenes(draw: some.DrawFn) -> tuple[list[Demand], list[Worker]]:
    workers = []
    for row in range(draw(some.integers(1, 3))):
        running = [
            Running(draw(demands(f"r{row}-{n}")), draw(some.integers(1, 30)))
            for n in range(draw(some.integers(0, 3)))
        ]
        workers.append(Worker(f"w{row}", 4, running))
    return [draw(demands(f"d{n}")) for n in range(draw(some.integers(1, 6)))], workers


def ends(running: list[tuple[Demand, int]]) -> dict[str, float]:
    """When each of a batch is done, step by step."""
    left, now, found = {d.id: n for d, n in running}, NOW, dict[str, float]()
    while left:
        now += COSTS.step([d.work for d, _ in running if d.id in left])
        for id in list(left):
            left[id] -= 1
            if not left[id]:
                found[id] = now
                del left[id]
    return found


def batches(workers: list[Worker]) -> dict[str, list[tuple[Demand, int]]]:
    return {w.name: [(r.demand, r.left) for r in w.running] for w in workers}


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_a_start_makes_nobody_late(scene: tuple[list[Demand], list[Worker]]) -> None:
    waiting, workers = scene
    # what has waited for longer than `patience` starts in any case, so that it doesn't starve
    scheduler = SlackScheduler(COSTS, make_router("cost"), patience=1e6)
    found = scheduler.decide(NOW, waiting, workers)
    before = {name: ends(batch) for name, batch in batches(workers).items()}
    after = batches(workers)
    for demand, name in found.starts:
        after[name].append((demand, demand.work.steps))
    for name, batch in after.items():
        done = ends(batch)
        for demand, _ in batch:
            was_late = before[name].get(demand.id, NOW) > demand.due
            assert was_late or done[demand.id] <= demand.due + EDGE, (name, demand.id)


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_who_is_dropped_would_be_late_alone_and_who_is_left_would_not(
    scene: tuple[list[Demand], list[Worker]],
) -> None:
    waiting, workers = scene
    found = SlackScheduler(COSTS, make_router("cost")).decide(NOW, waiting, workers)
    dropped = {d.id for d in found.drops}
    for demand in waiting:
        alone = NOW + COSTS.solo(demand.work)
        assert (demand.id in dropped) == (alone > demand.due)


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_no_worker_is_idle_while_a_request_that_can_be_in_time_waits(
    scene: tuple[list[Demand], list[Worker]],
) -> None:
    waiting, workers = scene
    found = SlackScheduler(COSTS, make_router("cost")).decide(NOW, waiting, workers)
    left = len(waiting) - len(found.starts) - len(found.drops)
    used = {name for _, name in found.starts} | {w.name for w in workers if w.running}
    assert not left or used == {w.name for w in workers}


@settings(max_examples=60, deadline=None)
@given(scenes(), some.integers(1, 4))
def test_without_deadlines_a_batch_grows_as_long_as_that_gains(
    scene: tuple[list[Demand], list[Worker]], gain: int
) -> None:
    """A request that is left would be less than `gain` times faster in any batch with a slot."""
    waiting, workers = scene
    waiting = [Demand(d.id, d.work, d.arrived) for d in waiting]
    workers = [
        Worker(w.name, 4, [Running(Demand(r.demand.id, r.demand.work, 0.0), r.left)
                           for r in w.running])
        for w in workers
    ]  # fmt: skip
    least = 1 + gain / 20
    scheduler = SlackScheduler(COSTS, make_router("cost"), gain=least)
    found = scheduler.decide(NOW, waiting, workers)
    assume(not found.drops)
    after = {name: [d.work for d, _ in batch] for name, batch in batches(workers).items()}
    for demand, name in found.starts:
        after[name].append(demand.work)
    started = {d.id for d, _ in found.starts}
    for demand in waiting:
        if demand.id in started:
            continue
        for batch in after.values():
            apart = COSTS.step(batch) + COSTS.step([demand.work])
            assert len(batch) == 4 or apart < least * COSTS.step([*batch, demand.work]) + EDGE
