"""Schedulers: what always holds, whatever comes, and which request goes first."""

from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from maskfx.errors import InputError
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.fleet import Fleet
from maskfx.scheduling.load import (
    Decision,
    Demand,
    Running,
    Scheduler,
    TemplateTier,
    Work,
    Worker,
)
from maskfx.scheduling.router import ROUTERS, make_router
from maskfx.scheduling.scheduler import PROBE, SCHEDULERS, SlackScheduler, make_scheduler

COSTS = FittedCosts(base=0.05, per_request=0.01, per_site=1e-4, around_base=0.1, disk_bandwidth=1e9)
EDIT = Work(sites=400, whole=4096, steps=20)  # 2.1 s alone
SOLO = COSTS.solo(EDIT)

shared = some.builds(
    Work,
    sites=some.integers(1, 4096),
    whole=some.just(4096),
    steps=some.integers(1, 50),
    branches=some.integers(1, 2),
    template=some.sampled_from([None, "s", "t"]),
    bytes=some.integers(0, 10**6),
)
dues = some.one_of(some.just(inf), some.floats(0, 200))


@some.composite
def scenes(draw: some.DrawFn) -> tuple[float, list[Demand], list[Worker]]:
    """A moment: what waits, and workers with some under way."""

    def one(id: str) -> Demand:
        return Demand(id, draw(shared), draw(some.floats(0, 50)), draw(dues), draw(users))

    users = some.sampled_from(["", "a", "b"])
    workers = []
    for row in range(draw(some.integers(1, 4))):
        slots = draw(some.integers(1, 4))
        running = [
            Running(one(f"r{row}-{n}"), draw(some.integers(0, 50)))
            for n in range(draw(some.integers(0, slots)))
        ]
        warm = draw(
            some.dictionaries(some.sampled_from(["s", "t"]), some.sampled_from(TemplateTier))
        )
        workers.append(Worker(f"w{row}", slots, running, warm))
    waiting = [one(f"d{n}") for n in range(draw(some.integers(0, 12)))]
    return draw(some.floats(50, 100)), waiting, workers


def at_best(demand: Demand, workers: list[Worker]) -> float:
    """On an idle worker whose template is as near as any worker's."""
    tier = min(w.tier(demand.work.template) for w in workers)
    return COSTS.solo(demand.work) + COSTS.recording(demand.work, tier)


def every_scheduler() -> list[Scheduler]:
    return [make_scheduler(s, r, COSTS) for s in SCHEDULERS for r in ROUTERS]


@settings(max_examples=80, deadline=None)
@given(scenes())
def test_what_always_holds(scene: tuple[float, list[Demand], list[Worker]]) -> None:
    now, waiting, workers = scene
    before = [(list(w.running), dict(w.warm)) for w in workers]
    for scheduler, again in zip(every_scheduler(), every_scheduler(), strict=True):
        found = scheduler.decide(now, waiting, workers)
        assert found == again.decide(now, waiting, workers), "not deterministic"
        assert found == scheduler.decide(now, waiting, workers), "what it kept changed it"
        assert found == scheduler.decide(now, waiting, Fleet(workers, COSTS)), "kept fleet"
        assert [(w.running, w.warm) for w in workers] == before, "workers were changed"
        gone = [d.id for d, _ in found.starts] + [d.id for d in found.drops]
        assert len(gone) == len(set(gone)), "started or dropped twice"
        assert set(gone) <= {d.id for d in waiting}
        for worker in workers:
            given_it = sum(name == worker.name for _, name in found.starts)
            assert given_it <= worker.free
        for demand in found.drops:
            assert now + at_best(demand, workers) > demand.due, "dropped without proof"
        for demand in waiting:
            if demand.id not in gone:
                assert now + at_best(demand, workers) <= demand.due, "hopeless, but kept"
        if not any(w.running for w in workers):
            assert found.starts or len(found.drops) == len(waiting), "nobody would ever be called"


def serve(
    scheduler: Scheduler, coming: Callable[[float], list[Demand]], until: float, slots: int = 1
) -> dict[str, float]:
    """When each request started, on one worker whose requests take what they take alone."""
    waiting: list[Demand] = []
    worker = Worker("w", slots)
    ends: dict[str, float] = {}
    started: dict[str, float] = {}
    now = 0.0
    while now < until:
        waiting += coming(now)
        worker.running = [r for r in worker.running if ends[r.demand.id] > now]
        found: Decision = scheduler.decide(now, waiting, [worker])
        for demand, _ in found.starts:
            started[demand.id] = now
            ends[demand.id] = now + COSTS.solo(demand.work)
            worker.running.append(Running(demand, demand.work.steps))
        gone = {d.id for d, _ in found.starts} | {d.id for d in found.drops}
        waiting = [d for d in waiting if d.id not in gone]
        now += SOLO / 4
    return started


@pytest.mark.parametrize("slots", [1, 3])
def test_a_request_without_a_deadline_starts_in_spite_of_a_flood_with_deadlines(slots: int) -> None:
    def coming(now: float) -> list[Demand]:
        flood = [Demand(f"{now} {n}", EDIT, now, now + 2 * SOLO, f"{now} {n}") for n in range(2)]
        lone = [Demand("lone", Work(4000, 4096, 50), 0.0, user="me")]
        return flood + lone if now == 0 else flood

    patient = SlackScheduler(COSTS, make_router("cost"), patience=3.0)
    started = serve(patient, coming, 60 * SOLO, slots)
    alone = COSTS.solo(Work(4000, 4096, 50))
    assert started["lone"] <= 3 * alone + 3 * SOLO
    assert len(started) > 15


def test_a_flood_of_one_user_does_not_starve_another() -> None:
    def coming(now: float) -> list[Demand]:
        flood = [Demand(f"{now} {n}", EDIT, now, now + 8 * SOLO, "flood") for n in range(4)]
        return [*flood, Demand(f"{now} x", EDIT, now, now + 8 * SOLO, "x")] if now < 40 else flood

    started = serve(make_scheduler("slack", "cost", COSTS), coming, 60.0, slots=2)
    served = [id.endswith("x") for id, at in started.items() if at < 40]
    assert sum(served) >= 0.3 * len(served)  # a fifth of the requests are its own


def test_of_the_equally_urgent_the_user_with_the_fewest_under_way_goes_first() -> None:
    under_way = Running(Demand("r", EDIT, 0.0, user="many"), 10)
    waiting = [
        Demand("a", EDIT, 0.0, 50.0, "many"),
        Demand("b", EDIT, 0.0, 50.0, "none"),
    ]
    scheduler = make_scheduler("slack", "cost", COSTS)
    [(first, _)] = scheduler.decide(0.0, waiting, [Worker("w", 2, [under_way])]).starts
    assert first.id == "b"


def test_the_least_slack_goes_first_and_slack_is_in_units_of_what_it_takes_alone() -> None:
    long = Work(400, 4096, 100)
    waiting = [
        Demand("short", EDIT, 0.0, 8.0),  # three times what it takes
        Demand("long", long, 0.0, 2 * COSTS.solo(long)),  # later, but only twice
    ]
    starts = make_scheduler("slack", "cost", COSTS).decide(0.0, waiting, [Worker("w", 1)]).starts
    assert [d.id for d, _ in starts] == ["long"]
    starts = make_scheduler("fcfs", "cost", COSTS).decide(0.0, waiting, [Worker("w", 1)]).starts
    assert [d.id for d, _ in starts] == ["long"]  # same arrival: by its name


def test_nobody_under_way_is_made_late() -> None:
    under_way = Running(Demand("r", EDIT, 0.0, SOLO + 0.2), 20)
    asked = [Demand("d", Work(4000, 4096, 20), 0.0, 100.0)]
    slack, fcfs = (make_scheduler(name, "cost", COSTS) for name in ("slack", "fcfs"))
    worker = Worker("w", 2, [under_way])
    assert slack.decide(0.0, asked, [worker]) == Decision()
    assert len(fcfs.decide(0.0, asked, [worker]).starts) == 1
    other = Worker("v", 2, [Running(Demand("s", EDIT, 0.0, 90.0), 20)])
    assert [n for _, n in slack.decide(0.0, asked, [worker, other]).starts] == ["v"]


def test_who_has_waited_long_enough_starts_even_if_that_makes_another_late() -> None:
    under_way = Running(Demand("r", EDIT, 0.0, 1000.0 + SOLO + 0.2), 20)
    asked = [Demand("d", Work(4000, 4096, 20), 0.0)]
    scheduler, worker = make_scheduler("slack", "cost", COSTS), Worker("w", 2, [under_way])
    early = [Running(Demand("r", EDIT, 0.0, SOLO + 0.2), 20)]
    assert scheduler.decide(0.0, asked, [Worker("w", 2, early)]) == Decision()
    assert len(scheduler.decide(1000.0, asked, [worker]).starts) == 1


def test_a_batch_grows_only_while_that_gains() -> None:
    costly = FittedCosts(base=0.05, per_request=0.0, per_site=1e-3)  # of sites, nearly all
    waiting = [Demand(str(n), Work(1000, 4096, 10), 0.0, 1e4) for n in range(4)]
    scheduler = SlackScheduler(costly, make_router("cost"), gain=1.04)
    worker = Worker("w", 4)
    # together 1.05 / 1.05+1.05 / 2.05 = 1.024 times faster: one at a time
    assert len(scheduler.decide(0.0, waiting, [worker]).starts) == 1
    assert len(SlackScheduler(costly, make_router("cost"), gain=1.0).decide(
        0.0, waiting, [worker]
    ).starts) == 4  # fmt: skip


def test_a_late_one_is_dropped_and_one_that_never_is_due_is_not() -> None:
    waiting = [Demand("late", EDIT, 0.0, 10.0 + SOLO / 2), Demand("ever", EDIT, 0.0)]
    for name in SCHEDULERS:
        found = make_scheduler(name, "cost", COSTS).decide(10.0, waiting, [Worker("w", 4)])
        assert [d.id for d in found.drops] == ["late"]
        assert [d.id for d, _ in found.starts] == ["ever"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_costs_that_are_believed_too_high_are_tried_again_some_time(name: str) -> None:
    scheduler = make_scheduler(name, "cost", COSTS)
    workers = [Worker("w", 4)]
    seconds = 0.0
    while seconds < PROBE:
        late = Demand(f"at {seconds}", EDIT, seconds, seconds + SOLO / 2)
        assert scheduler.decide(seconds, [late], workers) == Decision(drops=(late,))
        seconds += 20.0
    several = [Demand(f"{n}", EDIT, 70.0, 70.0 + SOLO / 2) for n in range(3)]
    found = scheduler.decide(70.0, several, workers)
    assert len(found.starts) == 1
    assert len(found.drops) == 2
    again = scheduler.decide(71.0, several[:1], workers)
    assert not again.starts, "one is enough for another minute"
    busy = [Worker("w", 4, [Running(Demand("r", EDIT, 0.0), 3)])]
    assert not scheduler.decide(200.0, several[:1], busy).starts, "whoever runs teaches"


def test_an_unknown_scheduler_is_refused() -> None:
    with pytest.raises(InputError, match="slack, fcfs"):
        make_scheduler("edf", "cost", COSTS)


def test_in_a_crowd_the_shorter_goes_first_and_of_equals_the_one_with_more_slack() -> None:
    scheduler = SlackScheduler(COSTS, make_router("cost"))
    short = Work(sites=400, whole=4096, steps=10)
    crowd = [Demand(f"c{n}", EDIT, 0.0, 4 * SOLO) for n in range(20)]
    tight, loose = (Demand(f"{due}", short, 0.0, due * SOLO) for due in (1.1, 4.0))
    busy = Worker("w", 2, [Running(Demand("r", short, 0.0), 5)])
    found = scheduler.decide(0.0, [*crowd, tight, loose], [busy])
    assert [demand.id for demand, _ in found.starts] == [loose.id]
    long = Demand("long", EDIT, 0.0, 1.5 * SOLO)
    few = scheduler.decide(0.0, [loose, long], [Worker("w", 1)])
    assert [demand.id for demand, _ in few.starts] == [long.id], "no crowd: the least slack first"


@pytest.mark.parametrize(("made", "starts"), [(0, 0), (1, 1)])
def test_the_preparation_of_one_without_a_step_counts(made: int, starts: int) -> None:
    """It begins after the step under way; the room is enough for one that steps already."""
    other, steps = Demand("n", EDIT, 0.0), EDIT.steps
    together = COSTS.step([EDIT, EDIT])
    due = (steps - made) * together + COSTS.around(EDIT) + together / 2
    worker = Worker("w", 2, [Running(Demand("r", EDIT, 0.0, due), steps - made)])
    found = SlackScheduler(COSTS, make_router("cost")).decide(0.0, [other], [worker])
    assert len(found.starts) == starts


def test_a_request_waits_for_the_step_under_way() -> None:
    running = Running(Demand("r", EDIT, 0.0), EDIT.steps)
    own = COSTS.around(EDIT) + EDIT.steps * COSTS.step([EDIT, EDIT])
    step = COSTS.step([EDIT])
    for room, starts in ((step / 2, 0), (1.1 * step, 1)):
        found = SlackScheduler(COSTS, make_router("cost")).decide(
            0.0, [Demand("n", EDIT, 0.0, own + room)], [Worker("w", 2, [running])]
        )
        assert len(found.starts) == starts
