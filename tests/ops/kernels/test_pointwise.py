"""Gated halves, modulations and gates against their plain operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from maskfx.ops.base import plain_of
from tests.ops.kernels.tools import Draw, by_segment, check, dtypes, needs_kernels, owners, total

pytestmark = needs_kernels


@dtypes
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated(dtype: torch.dtype, activation: str, gate_first: bool) -> None:
    from maskfx.ops.kernels.pointwise import gated

    rows = Draw(1).values(11, 2 * 19, dtype=dtype)

    def plain(rows: Tensor, activation: str, gate_first: bool) -> Tensor:
        return plain_of("gated")(rows, activation, gate_first, -1)

    check(gated, plain, rows, activation, gate_first)
    check(gated, plain, rows.view(11, 2, 19)[..., :18], activation, gate_first)
    assert gated(rows[:0], activation, gate_first).shape == (0, 19)


@dtypes
@pytest.mark.parametrize("seed", range(2))
def test_modulations_and_gates(dtype: torch.dtype, seed: int) -> None:
    from maskfx.ops.kernels.pointwise import add_gated, modulate

    draw = Draw(seed)
    batch, width = [*draw.batch(3, 2, 12), [1, 0]], (33, 700)[seed]
    rows, base = (draw.values(total(batch), width, dtype=dtype) for _ in range(2))
    scale, shift = (draw.values(len(batch), width, dtype=dtype) for _ in range(2))
    owner = owners(by_segment(batch), len(rows))
    check(modulate, plain_of("modulate"), rows, scale, shift, owner)
    check(add_gated, plain_of("add_gated"), base, rows, scale, owner)
    assert modulate(rows[:0], scale, shift, owner[:0]).shape == (0, width)
