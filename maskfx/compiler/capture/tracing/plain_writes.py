"""Writes to a diagonal during a capture as writes to all places: a graph can't hold the others.

The export of PyTorch refuses `fill_diagonal_` of a part of a tensor, because it is a view by
strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def plain_writes() -> Iterator[None]:
    """Let `fill_diagonal_` of a matrix write all of its places within the context."""
    own = Tensor.fill_diagonal_

    def fill_diagonal_(matrix: Tensor, value: float, wrap: bool = False) -> Tensor:
        if matrix.dim() != 2 or wrap:
            return own(matrix, value, wrap)
        rows, columns = (torch.arange(size, device=matrix.device) for size in matrix.shape)
        return matrix.copy_(matrix.masked_fill(rows[:, None] == columns, value))

    Tensor.fill_diagonal_ = fill_diagonal_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.fill_diagonal_ = own  # type: ignore[method-assign]
