"""The frontier of bench.patches: which baselines cross it."""

from __future__ import annotations

from typing import Any

import pytest

from bench.patches.frontier import against, fastest, frontier, likeness_at, lines, report


def row(side: str, family: str, times_faster: float, ssim: float) -> dict[str, Any]:
    return {"side": side, "family": family, "times_faster": times_faster, "ssim": ssim}


OURS = [
    row("every=2", "whole steps", 2.0, 0.99),
    row("every=4", "whole steps", 3.0, 0.97),
    row("every=9", "whole steps", 4.0, 0.93),
    row("judge", "patches, judge, step", 1.5, 0.98),
]
DENSE = row("dense", "dense", 1.0, 1.0)


def test_the_frontier_has_the_sides_that_no_other_is_better_than() -> None:
    assert [one["side"] for one in frontier(OURS)] == ["every=2", "every=4", "every=9"]


def test_between_two_points_likeness_lies_on_a_line() -> None:
    points = [(1.5, 0.99), (2.0, 0.97), (4.0, 0.93)]
    assert likeness_at(points, 3.0) == pytest.approx(0.95)
    assert likeness_at(points, 1.0) == 0.99
    assert likeness_at(points, 4.1) is None


@pytest.mark.parametrize(
    ("speed", "ssim", "above", "crosses"),
    [
        (1.5, 0.994, -0.001, False),
        (1.5, 0.996, 0.001, True),
        (2.5, 0.979, -0.001, False),
        (2.5, 0.981, 0.001, True),
        (4.5, 0.929, -0.001, False),
        (4.5, 0.930, 0.0, True),
        (0.9, 0.999, -0.001, False),
    ],
)
def test_a_baseline_crosses_if_it_is_above_the_line(
    speed: float, ssim: float, above: float, crosses: bool
) -> None:
    oracle = row("oracle", "patches, oracle", 9.0, 1.0)
    [found] = against([DENSE, *OURS, oracle, row("8 steps", "fewer steps", speed, ssim)])
    assert found["crosses"] == crosses
    assert found["ssim_above_ours"] == pytest.approx(above)
    assert found["faster_than_all_of_ours"] == (speed > 4)


def test_the_report_names_the_fastest_that_are_alike_enough_and_who_crosses() -> None:
    cache = row("cache", "TaylorSeer", 3.2, 0.98)
    found = report([DENSE, *OURS, cache, row("4 steps", "fewer steps", 5.0, 0.9)])
    assert found["fastest"]["ours"]["side"] == "every=4"
    assert found["fastest"]["baselines"]["side"] == "cache"
    assert found["crossing"] == ["cache"]
    assert fastest([row("a", "fewer steps", 2.0, 0.5)]) is None
    text = lines(found)
    assert text[0] == "fastest at SSIM 0.95, ours: every=4, 3.00 times, 0.9700"
    assert text[2] == "cache: CROSSES, SSIM +0.0180"
    assert text[3] == "4 steps: beyond ours, SSIM -0.0300"
