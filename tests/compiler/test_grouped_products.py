"""Grouped products, written out as products of slices."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskfx.compiler.capture.grouped_products import GroupedProducts, of_groups
from maskfx.compiler.capture.known_numbers import KnownNumbers, filled

SIZES = (3, 0, 5, 2)


def matrices_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.randn(len(sizes), 8, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("unused", [0, 3])
def test_equals_the_operator(unused: int) -> None:
    """Rows after the last group are zero; the operator leaves them as they are."""
    ends = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
    rows, matrices = torch.randn(sum(SIZES) + unused, 8), matrices_of(SIZES)
    found = of_groups(rows, matrices, filled(ends.tolist()))
    wanted = F.grouped_mm(rows, matrices, offs=ends)
    torch.testing.assert_close(found[: sum(SIZES)], wanted[: sum(SIZES)])
    assert found.shape == wanted.shape
    assert not found[sum(SIZES) :].any()


def test_writes_out_what_has_known_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = mock.Mock(side_effect=of_groups)
    monkeypatch.setattr("maskfx.compiler.capture.grouped_products.of_groups", seen)
    rows, matrices = torch.randn(sum(SIZES), 8), matrices_of(SIZES)
    known = KnownNumbers()
    unknown = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
    with known, GroupedProducts(known):
        ends = torch.tensor(SIZES).cumsum(dim=0, dtype=torch.int32)
        first = F.grouped_mm(rows, matrices, offs=ends)
        assert seen.call_count == 1
        torch.testing.assert_close(F.grouped_mm(rows, matrices, offs=unknown), first)
        wide = F.grouped_mm(rows.half(), matrices.half(), offs=ends, out_dtype=torch.float32)
        torch.testing.assert_close(wide, first, rtol=0, atol=0.02)
        assert (wide - wide.half()).any()
    assert seen.call_count == 2
