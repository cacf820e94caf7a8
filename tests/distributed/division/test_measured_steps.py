"""Which degree a step gets, as predictions and measured steps say."""

from __future__ import annotations

from maskfx.distributed.division.measured_steps import RETRY, WHOLE, MeasuredSteps

FLOPS = 1000.0


def test_the_first_steps_arent_cut_and_the_very_first_one_isnt_counted() -> None:
    steps = MeasuredSteps()
    for seconds in (90.0, 4.0):
        assert steps.best("a", FLOPS, {WHOLE: 2.0, 2: 1.0}) == WHOLE
        steps.note("a", FLOPS, WHOLE, seconds)
    assert steps.seconds("a", FLOPS, WHOLE) == 4.0
    assert steps.best("a", FLOPS, {WHOLE: 2.0, 2: 1.0, 4: 1.5}) == 2
    assert steps.best("a", FLOPS, {WHOLE: 2.0, 2: 2.5}) == WHOLE
    assert steps.best("b", FLOPS, {WHOLE: 2.0, 2: 1.0}) == WHOLE
    assert steps.best("a", 4 * FLOPS, {WHOLE: 2.0, 2: 1.0}) == WHOLE


def test_what_steps_took_counts_more_than_what_was_predicted() -> None:
    steps, predicted = MeasuredSteps(), {WHOLE: 2.0, 2: 1.0, 4: 1.5}
    for seconds in (90.0, 4.0):
        steps.note("a", FLOPS, WHOLE, seconds)
    for seconds in (90.0, 5.0):
        assert steps.best("a", FLOPS, predicted) == 2  # a cold step isn't counted
        steps.note("a", FLOPS, 2, seconds)
    assert steps.best("a", FLOPS, predicted) == 4
    for seconds in (90.0, 6.0):
        steps.note("a", FLOPS, 4, seconds)
    assert steps.best("a", FLOPS, predicted) == WHOLE
    for _ in range(20):
        steps.note("a", FLOPS, WHOLE, 8.0)  # other programs use that core now
    assert steps.best("a", FLOPS, predicted) == 2


def test_steps_alike_are_compared_by_the_flop() -> None:
    steps = MeasuredSteps()
    for seconds in (90.0, 1024.0):
        steps.note("a", 1024.0, WHOLE, seconds)
    assert steps.seconds("a", 2047.0, WHOLE) == 2047.0
    assert steps.seconds("a", 2048.0, WHOLE) is None


def test_a_degree_that_was_measured_beside_other_programs_is_measured_again() -> None:
    steps, predicted, chosen = MeasuredSteps(), {WHOLE: 2.0, 2: 1.0, 4: 9.0}, []
    for seconds in (90.0, 2.0):
        steps.note("a", FLOPS, WHOLE, seconds)
    for seconds in (90.0, 3.0):  # while other programs use the cores
        steps.note("a", FLOPS, 2, seconds)
    for _ in range(8 * RETRY):
        degree = steps.best("a", FLOPS, predicted)
        chosen.append(degree)
        steps.note("a", FLOPS, degree, {WHOLE: 2.0, 2: 1.0}[degree])  # they have ended
    assert chosen[: RETRY - 8] == [WHOLE] * (RETRY - 8)
    first = chosen.index(2)
    assert chosen[-1] == 2
    assert chosen[first:].count(WHOLE) <= 3 * RETRY  # the mean follows in few measurements
    assert 4 not in chosen  # predicted to take more than twice as long


def test_no_more_than_one_step_in_64_is_tried_again() -> None:
    steps, predicted = MeasuredSteps(), {WHOLE: 2.0, 2: 3.0, 3: 3.1, 4: 3.2}
    taken = {WHOLE: 2.0, 2: 3.0, 3: 3.1, 4: 3.2}
    chosen = []
    for _ in range(10 * RETRY):
        chosen.append(steps.best("a", FLOPS, predicted))
        steps.note("a", FLOPS, chosen[-1], taken[chosen[-1]])
    assert len(chosen) - chosen.count(WHOLE) <= 10
    assert {2, 3, 4} <= set(chosen)
