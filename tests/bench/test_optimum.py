"""The integer program of the rounds' benchmark against schedules that are known."""

import random

from bench.rounds.optimum import Job, best_list, bound
from bench.rounds.simulation import Machine, simulate_rounds
from bench.rounds.workloads import dense, flux_costs
from maskfx.scheduling.load import Demand
from maskfx.scheduling.rounds.round_plan import RoundSettings
from maskfx.scheduling.rounds.rounds import RoundScheduler

LINEAR = {1: 1.0, 2: 0.5, 4: 0.25}


def test_what_the_devices_can_do_until_the_deadlines_counts() -> None:
    """Two devices make four steps in two seconds: two requests of two steps, not three."""
    jobs = [Job(2, LINEAR, 2.0) for _ in range(3)]
    assert bound(jobs, 2) == best_list(jobs, 2) == 2
    assert bound([*jobs, Job(1, LINEAR, 2.5)], 2) == 3


def test_a_request_is_not_faster_than_its_fastest_degree() -> None:
    two = {1: 1.0, 2: 0.5}  # of four devices
    assert bound([Job(4, two, 1.9)], 4) == best_list([Job(4, two, 1.9)], 4) == 0
    assert bound([Job(4, two, 2.0)], 4) == best_list([Job(4, two, 2.0)], 4) == 1


def test_changing_degrees_can_be_better_than_every_list() -> None:
    """The small one first, on one of two devices: only if the other one changes its degree."""
    seconds = {1: 1.0, 2: 0.5}
    jobs = [Job(1, {1: 1.0, 2: 1.0}, 1.0), Job(5, seconds, 3.0)]
    assert best_list(jobs, 2) == 1
    assert bound(jobs, 2) == 2


def test_no_schedule_exceeds_the_bound() -> None:
    draw, costs = random.Random(2), flux_costs()
    exact = Machine(overhead=0.0, error=0.0)
    for _ in range(15):
        demands, jobs = [], []
        for number in range(draw.randint(2, 4)):
            work = dense(draw.choice((256, 512, 1024, 2048)))
            seconds = {k: costs.step(k, [work]) for k in (1, 2, 4)}
            due = draw.uniform(1, 3) * work.steps * seconds[4]
            demands.append(Demand(str(number), work, 0.0, due))
            jobs.append(Job(work.steps, seconds, due))
        most = bound(jobs, 4)
        scheduler = RoundScheduler(costs, 4, RoundSettings(margin=0.0, batch=1))
        made = simulate_rounds(scheduler, demands, exact).in_time(demands) * len(jobs)
        assert round(made) <= most
        assert best_list(jobs, 4) <= most
