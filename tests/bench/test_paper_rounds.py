"""The baseline of rounds: what TetriServe's Algorithm 1 decides where that is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.rounds.paper import Allocation, PaperScheduler, cheapest
from bench.rounds.simulation import Machine, RoundSimulation
from bench.rounds.workloads import STEPS, Arrivals, dense, flux_costs, images
from maskfx.scheduling.rounds.allocation import StepTimes
from maskfx.scheduling.rounds.placement import Devices
from maskfx.scheduling.rounds.round_plan import RoundRequest

COSTS = flux_costs()


def request(id: str, side: int, due: float, left: int = STEPS, **rest: Devices) -> RoundRequest:
    return RoundRequest(id, dense(side), left, 0.0, due, home=rest.get("home"))


@settings(deadline=None)
@given(
    st.integers(1, 30),
    st.lists(st.floats(0.5, 1.0), min_size=3, max_size=3),
    st.floats(0.1, 40.0),
)
def test_the_least_device_seconds_are_those_of_the_closed_form(
    steps: int, efficiency: list[float], slack: float
) -> None:
    seconds = {1: 1.0}
    for doubled, share in enumerate(efficiency):
        seconds[2 ** (doubled + 1)] = seconds[2**doubled] / (2 * share)
    found = cheapest(steps, slack, seconds)
    closed = StepTimes(seconds).cheapest(steps, slack)
    cost = sum(part.steps * part.degree * seconds[part.degree] for part in found)
    assert sum(part.steps for part in found) == steps
    assert len(found) <= 2
    assert all(part.steps for part in found)
    if closed is None:
        assert found == [Allocation(steps, min(seconds, key=lambda k: seconds[k]))]
    else:
        assert cost <= closed.device_seconds * (1 + 1e-6)


def test_the_urgent_one_gets_the_devices_and_the_patient_one_waits() -> None:
    """Both need all devices to be in time; the one with slack survives without a step."""
    alone = STEPS * COSTS.step(8, [dense(2048)])
    scheduler = PaperScheduler(COSTS, 8)
    decided = scheduler.decide(
        0.0,
        [request("patient", 2048, 3 * alone), request("urgent", 2048, 1.02 * alone)],
    )
    assert [set(group.steps) for group in decided.groups] == [{"urgent"}]
    assert decided.groups[0].devices == Devices(0, 8)
    assert decided.length == pytest.approx(5 * COSTS.step(8, [dense(2048)]))


def test_a_request_that_survives_without_a_step_gets_idle_devices() -> None:
    decided = PaperScheduler(COSTS, 8).decide(0.0, [request("only", 1024, 1000.0)])
    assert decided.groups[0].devices.size == 8  # enlarged, since it gains


def test_groups_stay_and_equal_small_requests_share_one() -> None:
    stays = request("stays", 1024, 1000.0, home=Devices(0, 1))
    decided = PaperScheduler(COSTS, 2).decide(0.0, [request("new", 1024, 1000.0), stays])
    places = {id: group.devices for group in decided.groups for id in group.steps}
    assert places == {"new": Devices(1, 1), "stays": Devices(0, 1)}
    small = [request(f"s{n}", 256, 1000.0) for n in range(3)]
    (group,) = PaperScheduler(COSTS, 1).decide(0.0, small).groups
    assert len(group.steps) == 3


def test_late_requests_run_on_what_is_left_or_are_dropped() -> None:
    late = request("late", 2048, 0.5)
    decided = PaperScheduler(COSTS, 8).decide(0.0, [late])
    assert (decided.late, decided.drops, len(decided.groups)) == (("late",), (), 1)
    dropped = PaperScheduler(COSTS, 8, drop=True).decide(0.0, [late])
    assert (dropped.drops, dropped.groups) == (("late",), ())


def test_every_request_ends() -> None:
    demands = images(Arrivals("uniform", burst=2.0), 60, seed=3)
    outcome = RoundSimulation(PaperScheduler(COSTS, 8), demands, Machine()).run()
    assert set(outcome.ended) == {d.id for d in demands}
