"""How many workers a queue needs."""

from __future__ import annotations

import pytest

from maskfx.scheduling.worker_count import WorkerCount


def counting() -> WorkerCount:
    return WorkerCount(least=1, most=4, slots=8, grow_seconds=10, shrink_seconds=60)


@pytest.mark.parametrize(
    ("requests", "wanted"), [(0, 1), (8, 1), (9, 2), (16, 2), (17, 3), (1000, 4)]
)
def test_needed_within_the_bounds(requests: int, wanted: int) -> None:
    assert counting().needed(requests) == wanted


def test_a_queue_must_be_long_for_some_time() -> None:
    count = counting()
    assert count.change(0.0, 20, 1) == 0
    assert count.change(9.9, 20, 1) == 0
    assert count.change(9.95, 4, 1) == 0  # short again
    assert count.change(10.0, 20, 1) == 0
    assert count.change(19.0, 20, 1) == 0
    assert count.change(20.0, 20, 1) == 2
    assert count.change(20.1, 20, 3) == 0


def test_it_shrinks_later_and_one_by_one() -> None:
    count = counting()
    assert count.change(0.0, 0, 3) == 0
    assert count.change(59.0, 0, 3) == 0
    assert count.change(60.0, 0, 3) == -1
    assert count.change(60.1, 0, 2) == 0
    assert count.change(120.2, 0, 2) == -1
    assert count.change(200.0, 0, 1) == 0
    assert count.change(300.0, 0, 1) == 0


def test_a_turn_begins_anew() -> None:
    count = counting()
    assert count.change(0.0, 0, 2) == 0
    assert count.change(59.0, 30, 2) == 0
    assert count.change(61.0, 30, 2) == 0, "too few for 2 s only"
    assert count.change(69.0, 30, 2) == 2
