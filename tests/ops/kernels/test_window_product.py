"""The product of windows against a gather and a linear layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from maskfx.ops.base import plain_of
from tests.ops.kernels.tools import Draw, check, dtypes, needs_kernels

pytestmark = needs_kernels
PLAIN = plain_of("window_product")


def kernel(*arguments: Any) -> Any:
    from maskfx.ops.kernels.window_product import window_product

    return window_product(*arguments)


def arguments(
    seed: int, dtype: torch.dtype, windows: int, rows: int, halo: int, channels: int, outputs: int
) -> list[Any]:
    draw = Draw(seed)
    table = draw.index(windows * 9, rows + halo + 1).view(windows, 9)
    return [
        draw.values(rows, channels, dtype=dtype),
        draw.values(halo, channels, dtype=dtype),
        table,
        draw.values(outputs, 9 * channels, dtype=dtype) / (3 * channels**0.5),
        draw.values(outputs, dtype=dtype),
    ]


@dtypes
@pytest.mark.parametrize("seed", range(3))
def test_random_windows(dtype: torch.dtype, seed: int) -> None:
    draw = Draw(seed + 100)
    sizes = draw.size(1, 90), draw.size(1, 60), draw.size(0, 20), draw.size(1, 50), draw.size(1, 80)
    check(kernel, PLAIN, *arguments(seed, dtype, *sizes), "none")


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", "gelu_tanh"])
def test_activations(activation: str) -> None:
    check(kernel, PLAIN, *arguments(1, torch.float32, 20, 9, 5, 4, 8), activation)


def test_without_bias_halo_rows_or_windows() -> None:
    own = arguments(2, torch.float32, 5, 4, 0, 20, 3)
    check(kernel, PLAIN, *own[:4], None, "silu")
    rows, _, table, weight, bias = own
    check(kernel, PLAIN, rows[:0], rows, table, weight, bias, "none")  # all of them are cached
    check(kernel, PLAIN, rows[:0], rows[:0], table * 0, weight, bias, "none")  # all are padding
    assert kernel(rows, rows[:0], table[:0], weight, bias, "none").shape == (0, 3)


def test_rows_that_no_window_reads_dont_matter() -> None:
    rows, halo, table, weight, bias = arguments(3, torch.float32, 6, 7, 3, 5, 4)
    table = torch.where(table == 2, 0, table)
    clean = kernel(rows, halo, table, weight, bias, "none")
    rows = rows.clone()
    rows[2] = float("nan")
    assert torch.equal(kernel(rows, halo, table, weight, bias, "none"), clean)
