"""The cheapest degrees for a deadline, against all divisions of the steps over degrees."""

from collections.abc import Iterator
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskfx.scheduling.rounds.allocation import Mix, StepTimes

times = st.dictionaries(
    st.sampled_from((1, 2, 3, 4, 8)), st.floats(0.01, 2.0), min_size=1, max_size=5
)


def divisions(steps: int, degrees: list[int]) -> Iterator[dict[int, int]]:
    if len(degrees) == 1:
        yield {degrees[0]: steps}
        return
    for count in range(steps + 1):
        for rest in divisions(steps - count, degrees[1:]):
            yield {degrees[0]: count, **rest}


def exhaustive(seconds: dict[int, float], steps: int, slack: float) -> float:
    costs = [
        sum(n * k * seconds[k] for k, n in division.items())
        for division in divisions(steps, sorted(seconds))
        if sum(n * seconds[k] for k, n in division.items()) <= slack * (1 + 1e-9) + 1e-9
    ]
    return min(costs, default=inf)


@settings(max_examples=200, deadline=None)
@given(times, st.integers(1, 6), st.floats(0.0, 12.0))
def test_a_mix_meets_the_deadline_at_the_cost_of_the_best_division(
    seconds: dict[int, float], steps: int, slack: float
) -> None:
    best = exhaustive(seconds, steps, slack)
    mix = StepTimes(seconds).cheapest(steps, slack)
    if mix is None:
        assert best == inf
        return
    assert sum(n for _, n in mix.parts) == steps
    assert mix.seconds <= slack * (1 + 1e-8) + 1e-8
    assert len(mix.parts) <= 2
    hull = StepTimes(seconds).hull
    costs = [k * seconds[k] for k in hull]
    step = max((b - a for a, b in pairwise(costs)), default=0.0)  # of rounding to whole steps
    assert best - 1e-9 <= mix.device_seconds <= best + step + 1e-9


@settings(max_examples=200, deadline=None)
@given(times, st.integers(1, 6), st.floats(0.0, 12.0))
def test_steps_that_can_be_split_cost_no_more_than_whole_ones(
    seconds: dict[int, float], steps: int, slack: float
) -> None:
    found = StepTimes(seconds).fluid(steps, slack)
    best = exhaustive(seconds, steps, slack)
    assert (found == inf) == (best == inf)
    assert found <= best * (1 + 1e-6) or best == inf


def test_the_mix_of_two_neighbours_and_what_is_left_out() -> None:
    seconds = {1: 1.0, 2: 0.6, 4: 0.39, 8: 0.2}  # a mix of 2 and 8 beats 4
    times = StepTimes(seconds)
    assert times.hull == (1, 2, 8)
    assert times.cheapest(10, 10.0) == Mix(((1, 10),), 10.0, 10.0)
    mix = times.cheapest(10, 4.0)
    assert mix is not None
    assert mix.parts == ((8, 5), (2, 5))  # the faster degree first
    assert mix.device_seconds == pytest.approx(5 * 1.6 + 5 * 1.2)
    assert times.fluid(10, 4.0) == pytest.approx(mix.device_seconds)  # no step was rounded
    assert times.cheapest(10, 1.9) is None
    assert times.latest_start(10, due=7.0) == 5.0


def test_a_degree_that_is_slower_than_a_smaller_one_is_never_used() -> None:
    assert StepTimes({1: 0.1, 2: 0.2, 4: 0.4}).hull == (1,)
