"""RowPlacement: which rows of a row set a batch writes, and where they lie in shared buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.runtime.hardware.devices import moved


@dataclass(frozen=True)
class RowPlacement:
    """Which rows of a row set a batch writes, and where.

    Args:
        source: The rows among those that the batch computed.
        target: Their places in the buffers, on the device of the buffers.
        sizes: The number of rows of each range; ranges lie by segment, member and batch element.
        batches: The number of batch elements of each written member.
        totals: The number of rows of a batch element of each member, written or not.
    """

    source: slice | Tensor
    target: Tensor
    sizes: list[int]
    batches: list[int]
    totals: list[int]

    @cached_property
    def elements(self) -> list[int]:
        """Return the batch element of each range, counted over the written members."""
        count = sum(self.batches)
        return list(range(count)) * (len(self.sizes) // count)

    @cached_property
    def complete(self) -> list[bool]:
        """Return, by batch element, whether all of its sites are written."""
        found = np.bincount(self.elements, weights=self.sizes)
        return [bool(n) for n in found == np.repeat(self.totals, self.batches)]

    @cached_property
    def owner(self) -> Tensor:
        """Return the batch element of each row."""
        each = np.repeat(self.elements, self.sizes)
        return moved(torch.from_numpy(each), self.target.device)

    def of(self, rows: Tensor) -> Tensor:
        """Return the rows that are written."""
        if isinstance(self.source, Tensor):
            return rows.index_select(0, self.source)
        return rows if rows.shape[0] == self.target.shape[0] else rows[self.source]

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of the rows of each batch element in float64."""
        out = values.new_zeros(sum(self.batches), *values.shape[1:], dtype=torch.float64)
        return out.index_add_(0, self.owner, values.double())


def spans_of(counts: Sequence[int], chosen: Collection[int], first: int) -> list[tuple[int, int]]:
    """Return the spans of the chosen members among rows that lie one after another; joined."""
    out: list[tuple[int, int]] = []
    for number, count in enumerate(counts):
        if number in chosen:
            start = out.pop()[0] if out and out[-1][1] == first else first
            out.append((start, first + count))
        first += count
    return out


def placed(sites: Sequence[Tensor], counts: Sequence[int], starts: NDArray[np.int64]) -> Tensor:
    """Return the sites of each batch element behind the start of its rows, one after another."""
    return torch.cat(list(sites)).add_(torch.from_numpy(np.repeat(starts, counts)))
