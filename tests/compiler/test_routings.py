"""Rows that experts select: all rows are computed, and those selected are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskfx.compiler.capture.tracing.packings import Packings
from maskfx.compiler.capture.tracing.routed_rows import RoutedRows
from maskfx.compiler.capture.tracing.routings import Routings, presumed, with_experts
from maskfx.compiler.capture.tracing.selections import Selections
from maskfx.compiler.capture.tracing.waiting_values import value_of
from maskfx.errors import CaptureError
from tests.factories.own_experts import SPELLINGS, Experts

WIDTH = 8


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routed(function: Callable[[], Tensor]) -> tuple[Tensor, Routings]:
    """What a function returns while selections wait, as an export sees them."""

    def run() -> tuple[Tensor, Routings]:
        with torch.no_grad(), Selections(), Packings(), Routings() as found, presumed():
            return value_of(function()), found

    return with_experts(run)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_experts_of_all_rows_are_those_of_the_selected_ones(
    spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    experts, rows = Experts(spelling).requires_grad_(False), numbers(2, 11, 16, seed=1)
    wanted = experts(rows)
    # nothing may be selected: in an export its length would depend on data
    monkeypatch.setattr(RoutedRows, "value", lambda self: pytest.fail("rows were selected"))
    found, routings = routed(lambda: experts(rows))
    routings.check()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows.mean(0),
        lambda rows: rows.softmax(0),
        lambda rows: rows @ rows.T,
        lambda rows: rows.flatten(),
        lambda rows: rows + torch.arange(len(rows))[:, None],
        lambda rows: rows[1:],
        lambda rows: F.layer_norm(rows, rows.shape),
        lambda rows: rows.cumsum(0),
    ],
)
def test_functions_that_mix_rows_get_the_selected_ones(
    function: Callable[[Tensor], Tensor],
) -> None:
    rows, mask = numbers(6, WIDTH, seed=2), torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    wanted = function(rows[mask])
    by_mask, _ = routed(lambda: function(rows[mask]))
    by_places, _ = routed(lambda: function(rows[torch.where(mask)[0]]))
    for found in (by_mask, by_places):
        torch.testing.assert_close(found, wanted)


def test_a_branch_on_numbers_is_no_choice_of_rows() -> None:
    """Only masks by which rows are written are presumed to select some."""
    rows = numbers(6, WIDTH, seed=3)
    _, routings = routed(lambda: rows * 2 if (rows > 9).any() else rows)
    with pytest.raises(CaptureError, match="not on rows of experts"):
        routings.check()
