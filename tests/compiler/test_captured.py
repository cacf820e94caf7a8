"""Which sizes a capture accepts, by the conditions of its export."""

from __future__ import annotations

import pytest
import sympy
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv

from maskfx.compiler.capture.captured import Capture
from maskfx.ir.geometry.pyramid import Pyramid

Y, X = sympy.symbols("s0 s1", integer=True, positive=True)


@pytest.mark.parametrize(("y", "accepted"), [(16, True), (32, False), (9, False)])
def test_a_condition_may_divide_by_a_size(y: int, accepted: bool) -> None:
    """In a picture of 9 it divides by nothing."""
    spec = pytree.tree_structure({})
    condition = sympy.Eq(FloorDiv(X, FloorDiv(Y, 16)), X)
    found = Capture(
        module=None,
        leaves=[],
        in_spec=spec,
        out_spec=spec,
        pyramid=Pyramid(batch=1, base=(16, 24)),
        constants={},
        symbols={"y": Y, "x": X},
        guards=[condition],
    )
    assert found.accepts(spec, [], {"batch": 1, "y": y, "x": 24}) is accepted
