"""Non-negative least squares, which both fits of costs use."""

import numpy as np
import pytest

from maskfx.runtime.planner.least_squares import non_negative


def test_never_goes_below_zero() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    found = non_negative(rows, np.array([3.0, 2.0, 1.0]))  # a free fit would have a negative slope
    assert found[1] == 0.0
    assert found[0] == pytest.approx(2.0)


def test_weights_count_as_repeated_rows() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    seconds = np.array([1.0, 3.0, 4.0])
    repeated = [0, 1, 1, 1, 2]
    found = non_negative(rows, seconds, np.array([1.0, 3.0, 1.0]))
    assert found == pytest.approx(non_negative(rows[repeated], seconds[repeated]))


def test_columns_of_very_different_size_and_without_values() -> None:
    draw = np.random.default_rng(0)
    rows = np.column_stack([np.ones(30), draw.uniform(1e9, 1e12, 30), np.zeros(30)])
    found = non_negative(rows, rows @ np.array([1e-3, 2e-12, 5.0]))
    assert found == pytest.approx([1e-3, 2e-12, 0.0], rel=1e-6)


def test_equal_columns_share_their_effect() -> None:
    rows = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    assert non_negative(rows, np.array([2.0, 4.0, 6.0])) == pytest.approx([1.0, 1.0], rel=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_coefficients_are_better(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows, seconds = draw.normal(size=(12, 3)), draw.normal(size=12)
    found = non_negative(rows, seconds)
    least = ((rows @ found - seconds) ** 2).sum()
    for other in found + draw.normal(scale=0.2, size=(300, 3)):
        assert ((rows @ np.maximum(other, 0) - seconds) ** 2).sum() >= least - 1e-9
