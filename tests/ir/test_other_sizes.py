"""Sizes at which a capture's equations hold, also where an equation divides by a size."""

from __future__ import annotations

import sympy
from torch.utils._sympy.functions import FloorDiv

from maskfx.ir.geometry.other_sizes import VALUES, other_bases

Y, X = sympy.symbols("s0 s1", integer=True, positive=True)


def test_equations_choose_the_sizes() -> None:
    found = other_bases({"y": Y, "x": X}, [sympy.Eq(sympy.Mod(Y, 8), 0)])
    assert {y for y, _ in found} == {v for v in VALUES if v % 8 == 0}


def test_an_equation_that_divides_by_nothing_there_does_not_hold() -> None:
    """The number of patches of 16 is 0 in a picture of 9, and the others are left."""
    found = other_bases({"y": Y, "x": X}, [sympy.Eq(FloorDiv(X, FloorDiv(Y, 16)), X)])
    assert {y for y, _ in found} == {v for v in VALUES if v // 16 == 1}
