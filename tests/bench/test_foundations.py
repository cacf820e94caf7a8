"""The figures of Katz's model that the bench of late inputs prints."""

from __future__ import annotations

import pytest

from bench.foundations import katz


def test_equations_and_bound_are_of_the_measured_parts() -> None:
    """Two nets of 1 s, a UNet of 4 s of which 3 come before it reads them, and 2 s of the rest."""
    found = katz([[1.0, 1.0], [0.5, 1.5]], [4.0, 4.0], [2.5, 3.5], 2.0)
    assert found["equation_1"] == pytest.approx(2 + 2 * (1 + 1 + 4))
    assert found["equation_2"] == pytest.approx(2 + 2 * 4)
    assert found["gustafson"]["serial_share"] == pytest.approx(0.25)
    assert found["gustafson"]["bound"] == pytest.approx(0.25 + 0.75 * 3)
