"""When a step starts, and with whom."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskfx.engine.admission.batch_policy import BatchPolicy, WaitingRequest, admitted
from maskfx.errors import InputError

POLICY = BatchPolicy(patience=0.01, share=0.25, batch=3)


def test_nobody_waits_then_nothing_starts() -> None:
    assert POLICY.seconds([], coming=[1.0, 2.0], now=5.0) == inf


def test_a_step_starts_at_once_when_nobody_is_on_the_way() -> None:
    assert POLICY.seconds([WaitingRequest(5.0)], coming=[], now=5.0) == 0


def test_a_full_step_waits_for_nobody_who_was_let_in_later() -> None:
    seats = [WaitingRequest(5.0, began) for began in (1.0, 2.0, 4.0)]
    assert POLICY.seconds(seats, coming=[4.5, 6.0], now=5.0) == 0


def test_a_full_step_waits_for_who_was_let_in_earlier() -> None:
    seats = [WaitingRequest(5.0, began) for began in (1.0, 2.0, 4.0)]
    assert POLICY.seconds(seats, coming=[3.0], now=5.0) == pytest.approx(0.01)
    assert POLICY.seconds([*seats, WaitingRequest(5.0, 0.0)], coming=[3.0], now=5.0) == 0


def test_patience_counts_from_the_first_call() -> None:
    seats = [WaitingRequest(5.0), WaitingRequest(5.004)]
    assert POLICY.seconds(seats, coming=[4.0], now=5.004) == pytest.approx(0.006)
    assert POLICY.seconds(seats, coming=[4.0], now=5.02) == 0


def test_patience_counts_from_the_last_step_for_calls_that_came_during_it() -> None:
    assert POLICY.seconds([WaitingRequest(5.0)], coming=[4.0], now=6.0, ended=6.0) == pytest.approx(
        0.01
    )


def test_patience_grows_with_the_step() -> None:
    found = POLICY.seconds([WaitingRequest(5.0)], coming=[4.0], now=5.0, step=2.0)
    assert found == pytest.approx(0.5)


def test_deadlines_first_then_who_came_first() -> None:
    seats = [
        WaitingRequest(5.0, 1.0),
        WaitingRequest(5.0, 2.0, due=9.0),
        WaitingRequest(4.0, 3.0, due=8.0),
        WaitingRequest(9.0, 0.5),
    ]
    assert BatchPolicy(batch=2).choose(seats) == [1, 2]
    assert BatchPolicy(batch=3).choose(seats) == [1, 2, 3]


def test_who_has_begun_goes_on_before_who_came_later() -> None:
    seats = [WaitingRequest(5.0, 2.0), WaitingRequest(9.0, 1.0), WaitingRequest(4.0, 3.0)]
    assert BatchPolicy(batch=1).choose(seats) == [1]
    assert BatchPolicy(batch=2).choose(seats) == [0, 1]


def test_who_was_overtaken_goes_before_deadlines() -> None:
    seats = [
        WaitingRequest(1.0, overtaken=2),
        WaitingRequest(2.0, due=2.1),
        WaitingRequest(3.0, due=3.1),
    ]
    assert BatchPolicy(batch=1, passes=2).choose(seats) == [0]


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=12))
def test_everybody_goes_within_bounded_steps(arrivals: list[tuple[float, float]]) -> None:
    policy = BatchPolicy(batch=2, passes=2)
    seats = {i: WaitingRequest(at, at, 0, due) for i, (at, due) in enumerate(arrivals)}
    for step in range(len(arrivals) + 3 * policy.passes):
        if not seats:
            break
        order = list(seats)
        chosen = {order[i] for i in policy.choose([seats[i] for i in order])}
        assert len(chosen) == min(2, len(order)), f"step {step} wasn't full"
        seats = {
            i: WaitingRequest(s.parked, s.began, s.overtaken + 1, s.due)
            for i, s in seats.items()
            if i not in chosen
        }
    assert not seats


def test_whoever_has_the_fewest_under_way_is_let_in() -> None:
    assert admitted(["a", "a", "a", "b"], ["a"], 2, {}) == [3, 0]
    assert admitted(["a", "b", "a", "b"], [], 3, {}) == [0, 1, 2]
    assert admitted(["a"], ["a"] * 5, 4, {}) == [0]
    assert admitted([], [], 4, {}) == []


def test_of_two_users_the_one_whose_turn_is_longest_ago() -> None:
    assert admitted(["a", "b"], [], 1, {"a": 7}) == [1]
    assert admitted(["a", "b"], [], 1, {"a": 7, "b": 8}) == [0]


@pytest.mark.parametrize(
    "wrong", [{"patience": -1.0}, {"share": -1.0}, {"batch": 0}, {"passes": -1}]
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        BatchPolicy(**wrong)  # type: ignore[arg-type]
