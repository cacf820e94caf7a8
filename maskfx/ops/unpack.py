"""Widens rows that are packed to 8 or 4 bits.

8-bit values are int8 steps of float32 scales. 4-bit values are two steps to a uint8 byte, the first
in its lower half, with 8 added, and float16 scales. `maskfx.runtime.cache.quantize` packs them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from maskfx.ops.base import wide

CACHED = 1 << 16  # values processed at a time


def widen(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return packed rows, (..., features), in full precision.

    Args:
        stored: (..., features) in int8, or (..., features / 2) in uint8.
        scale: (..., parts of a row): each part shares a scale.
        dtype: The dtype of the result.
    """
    steps = two_of_each(stored) if stored.dtype == torch.uint8 else stored
    return multiplied(steps, scale, dtype)


def two_of_each(stored: Tensor) -> Tensor:
    """Return the 4-bit steps that are two to a byte."""
    return torch.stack([stored & 15, stored >> 4], -1).flatten(-2).to(torch.int8) - 8


def multiplied(steps: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply steps by the scales of their parts."""
    part = steps.shape[-1] // scale.shape[-1]
    rows = torch.empty(steps.shape, dtype=dtype, device=steps.device)
    flat = rows.view(-1, part), steps.reshape(-1, part), scale.reshape(-1, 1)
    for values, its_steps, its_scale in in_pieces(*flat):
        values.copy_(its_steps.to(wide(dtype)) * its_scale)
    return rows


def in_pieces(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of each tensor, on a CPU few enough that intermediates fit its cache."""
    count = max(1, len(rows[0]))
    if rows[0].device.type == "cpu":
        count = max(1, CACHED // max(tensor.shape[1] for tensor in rows))
    return zip(*(tensor.split(count) for tensor in rows), strict=True)
