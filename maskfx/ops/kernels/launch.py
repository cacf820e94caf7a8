"""What kernels share: block sizes, tables of row blocks on the device, and products' dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from maskfx.ops.base import kept_table, numbers, ranges
from maskfx.ops.kernels.serves import interpreted

Spans = tuple[tuple[int, ...], ...]


def power(number: int, least: int = 16) -> int:
    """Return the least power of two that isn't smaller; products need blocks of 16 or more."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def blocks(count: int, size: int) -> int:
    return -(-count // size)


def spans_of(table: Tensor) -> Spans:
    """Return a table on the host as numbers, by which tables made from it are kept."""
    return tuple(map(tuple, table.tolist()))


def needs_wide_products(dtype: torch.dtype) -> bool:
    """Return True where products of this dtype are computed in float32.

    Triton's interpreter multiplies bfloat16 as if it were integers.
    """
    return interpreted() and dtype == torch.bfloat16


@kept_table
def row_blocks(spans: Spans, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the blocks of each request's rows, and where each request's blocks end.

    Returns:
        (blocks, 4) start, end, request, and the number of the request's rows before the block; and
        (requests + 1,), the first block of each request.
    """
    found: list[list[int]] = []
    firsts = [0]
    for request, span in enumerate(spans):
        before = 0
        for start, stop in ranges(span):
            for at in range(start, stop, size):
                found.append([at, min(at + size, stop), request, before + at - start])
            before += stop - start
        firsts.append(len(found))
    return on_device(found, 4, device), numbers(firsts, torch.int32, device)


def on_device(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Return a table of numbers on a device, (rows, width)."""
    return numbers(rows, torch.int32, device).view(-1, width)


def count_rows(spans: Spans) -> list[int]:
    """Return the number of rows of each request."""
    return [sum(span[1::2]) - sum(span[::2]) for span in spans]
