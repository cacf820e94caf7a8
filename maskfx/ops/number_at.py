"""Reads a size from a small tensor of an argument, such as a side of the picture."""

from __future__ import annotations

from torch import Tensor


def number_at(value: Tensor, place: int, width: int) -> int:
    """Return the number at a place of a flattened tensor, in units of `width`."""
    return int(value.reshape(-1)[place]) // width
