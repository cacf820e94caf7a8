"""Fleets keep their figures right, and routers choose as they say."""

import random
from dataclasses import replace

import numpy as np
import pytest

from maskfx.errors import InputError
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.composition import members_of
from maskfx.scheduling.cost_model import FittedCosts, LearnedCosts
from maskfx.scheduling.fleet import Fleet
from maskfx.scheduling.load import Demand, Running, TemplateTier, Work, Worker
from maskfx.scheduling.router import FEW, ROUTERS, CostRouter, candidates, choose, make_router
from maskfx.scheduling.step_reports import Stepped

COSTS = FittedCosts(
    base=0.05,
    per_request=0.02,
    per_size=0.03,
    per_site=1e-4,
    per_dense_site=2e-4,
    per_pair=1e-8,
    disk_bandwidth=1e9,
    around_base=0.1,
)
FIGURES = ("compute", "load", "sites", "left", "due", "wholes")


def demand(id: str, sites: int = 100, steps: int = 20, template: str | None = None) -> Demand:
    return Demand(id, Work(sites, 4096, steps, template=template, bytes=1000), 0.0, 1e6, id[0])


def worker(name: str, *loads: tuple[int, int], slots: int = 4) -> Worker:
    """With requests of a number of sites and steps left."""
    running = [Running(demand(f"{name}-{n}", sites), left) for n, (sites, left) in enumerate(loads)]
    return Worker(name, slots, running)


def test_a_fleet_that_is_kept_equals_one_that_is_made_anew() -> None:
    draw = random.Random(0)
    kept = Fleet([Worker(f"w{n}", 4) for n in range(5)], COSTS)
    for number in range(400):
        row = draw.randrange(5)
        running = kept[row].running
        if running and draw.random() < 0.5:
            kept.stepped(row, 1, [r.demand.id for r in running])
        elif running and draw.random() < 0.5:
            kept.end(row, draw.choice(running).demand.id)
        elif kept[row].free:
            kept.start(demand(str(number), draw.randrange(1, 4000), draw.randrange(1, 50)), row)
        kept.warmed(row, f"t{number % 7}", draw.choice(list(TemplateTier)))
    anew = Fleet([replace(w, running=list(w.running)) for w in kept], COSTS)
    assert kept.free.tolist() == anew.free.tolist()
    assert {k: v for k, v in kept.warm.items() if v} == anew.warm
    assert kept.held == anew.held
    for name in FIGURES:  # seats may be in another order
        own = np.sort(getattr(kept, name), axis=1)
        assert np.allclose(own, np.sort(getattr(anew, name), axis=1)), name


def plain_run(members: list[tuple[Work, int]]) -> list[float]:
    """When each of a batch is done, step by step."""
    left, now, ends = [steps for _, steps in members], 0.0, [0.0] * len(members)
    while any(n > 0 for n in left):
        now += COSTS.step([w for (w, _), n in zip(members, left, strict=True) if n > 0])
        for index, n in enumerate(left):
            if n == 1:
                ends[index] = now
            left[index] = n - 1
    return ends


def test_a_forecast_is_what_stepping_comes_to() -> None:
    draw = random.Random(1)

    def some_work(steps: int) -> Work:
        kind = draw.choice([StepKind.EDIT, StepKind.DENSE])
        return Work(draw.randrange(1, 4000), draw.choice([1024, 4096, 9216]), steps, kind=kind)

    for _ in range(60):
        lefts = [draw.randrange(1, 60) for _ in range(3)]
        running = [Running(Demand(f"{n}", some_work(n), 0.0), n) for n in dict.fromkeys(lefts)]
        here = Worker("w", 5, running)
        asked = some_work(draw.randrange(1, 60))
        before = plain_run([(r.demand.work, r.left) for r in here.running])
        after = plain_run([*((r.demand.work, r.left) for r in here.running), (asked, asked.steps)])
        forecast = Fleet([here], COSTS).forecast(asked, np.array([0]))
        assert forecast.own[0] == pytest.approx(after[-1] + COSTS.around(asked))
        assert forecast.harm[0] == pytest.approx(sum(after[:-1]) - sum(before))
        tight = replace(here.running[0].demand, due=(before[0] + after[0]) / 2)
        here.running[0] = Running(tight, here.running[0].left)
        broken = Fleet([here], COSTS).forecast(asked, np.array([0])).breaks(0.0)[0]
        assert bool(broken) == (after[0] > before[0])


def test_each_router_counts_its_own() -> None:
    # one big request about to end, three small ones that go on, two middling ones
    workers = [worker("a", (3000, 1)), worker("b", *[(10, 40)] * 3), worker("c", *[(50, 40)] * 2)]
    fleet = Fleet(workers, COSTS)
    asked = Work(100, 4096, 20)
    assert choose(make_router("requests"), asked, fleet) == 0
    assert choose(make_router("tokens"), asked, fleet) == 1
    assert choose(make_router("cost"), asked, fleet) == 0
    workers[0].running[0].left = 40
    fleet = Fleet(workers, COSTS)
    assert choose(make_router("requests"), asked, fleet) == 0
    assert choose(make_router("cost"), asked, fleet) == 2


def test_a_warm_worker_is_preferred_until_it_is_too_busy() -> None:
    asked = Work(100, 4096, 20, template="t", bytes=2 * 10**8)
    cold, warm = worker("cold"), worker("warm", (100, 20))
    warm.warm["t"], cold.warm["t"] = TemplateTier.HOST, TemplateTier.DISK
    assert choose(CostRouter(), asked, Fleet([cold, warm], COSTS)) == 1
    busy = worker("busy", *[(3000, 50)] * 3)
    busy.warm["t"] = TemplateTier.HOST
    assert choose(CostRouter(), asked, Fleet([cold, busy], COSTS)) == 0


def test_a_full_worker_is_never_chosen() -> None:
    full = worker("full", (1, 1), slots=1)
    assert choose(CostRouter(), Work(1, 1, 1), Fleet([full], COSTS)) is None
    assert choose(CostRouter(), Work(1, 1, 1), Fleet([full, worker("w", (9, 9))], COSTS)) == 1


@pytest.mark.parametrize("name", list(ROUTERS))
def test_of_many_workers_the_candidates_hold_the_best(name: str) -> None:
    draw = random.Random(2)
    workers = [
        worker(f"w{n}", *[(draw.randrange(1, 4000), draw.randrange(1, 50)) for _ in range(n % 4)])
        for n in range(200)
    ]
    workers[77].warm["t"] = TemplateTier.HOST
    fleet, router = Fleet(workers, COSTS), make_router(name)
    asked = Work(100, 4096, 20, template="t", bytes=1000)
    rows = candidates(router, asked, fleet)
    assert len(rows) <= 2 * FEW
    assert 77 in rows
    every = np.arange(200)[fleet.free > 0]
    best = router.scores(fleet.forecast(asked, every)).min()
    assert router.scores(fleet.forecast(asked, rows)).min() == pytest.approx(best)


def test_figures_follow_costs_that_are_learnt() -> None:
    costs = LearnedCosts(COSTS)
    fleet = Fleet([worker("w", (1000, 20))], costs)
    before = fleet.compute[0, 0]
    batch = [Work(1000, 4096, 20)]
    for _ in range(64):
        costs.observe(Stepped(5.0, members_of(batch)))
    assert Fleet.of(fleet, costs).compute[0, 0] > 2 * before


def test_an_unknown_router_is_refused() -> None:
    with pytest.raises(InputError, match="cost, requests, tokens"):
        make_router("fast")
