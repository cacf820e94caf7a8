"""Copies rows that are chosen by flags from and to many buffers, by one call of a C function.

No table of places is made, which costs more than copying where rows are few and small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ops.native.build import BEYOND, c_functions
from maskfx.ops.native.cpu import serving

Ints = NDArray[np.int64]
Kind = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class ChosenRows:
    """The rows of several buffers that are in one set and not in another.

    Args:
        flags: (sets, rows), one byte each: whether a row is in a set.
        places: The place of each row in the buffers.
        wanted, without: By buffer, the number of the set that has the rows, and of the other one.
    """

    flags: NDArray[np.bool_]
    places: Ints
    wanted: Ints
    without: Ints

    def counts(self) -> Ints:
        """Return the number of rows by buffer."""
        pairs, numbers = np.unique(
            self.wanted * len(self.flags) + self.without, return_inverse=True
        )
        wanted, without = np.divmod(pairs, len(self.flags))
        found = np.count_nonzero(self.flags[wanted] & ~self.flags[without], axis=1)
        return np.asarray(found[numbers])

    def part(self, chosen: slice | Ints) -> ChosenRows:
        """Return the rows of some of the buffers."""
        return ChosenRows(self.flags, self.places, self.wanted[chosen], self.without[chosen])

    def take(self, buffers: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Return the rows of each buffer, which have rows of one shape and dtype.

        They lie in one memory, which is released with the last of them.
        """
        rows = buffers[0].new_empty(sum(counts), *buffers[0].shape[1:])
        each = list(rows.split(list(counts)))
        self._copy(buffers, each, writes=False)
        return each

    def put(self, buffers: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Replace the rows of each buffer; `rows` are of its shape and dtype, and contiguous."""
        self._copy(buffers, rows, writes=True)

    def _copy(self, buffers: Sequence[Tensor], rows: Sequence[Tensor], writes: bool) -> None:
        size = self.flags.shape[1]
        totals = np.array([buffer.size(0) for buffer in buffers])
        columns = (
            [buffer.data_ptr() for buffer in buffers],
            totals,
            np.array([buffer.nbytes for buffer in buffers]) // np.maximum(totals, 1),
            self.flags.ctypes.data + self.wanted * size,
            self.flags.ctypes.data + self.without * size,
            [own.data_ptr() for own in rows],
            [own.size(0) for own in rows],
        )
        table = np.array(columns, np.int64).T.copy()
        lib = c_functions()
        assert lib is not None, "serves() is asked first"
        failed = lib.copy_chosen(
            table.ctypes.data, len(table), self.places.ctypes.data, size, writes
        )
        if failed == BEYOND:
            raise IndexError(
                f"{len(buffers)} buffers have other places or numbers of rows than are chosen"
            )
        if failed:
            raise MemoryError(f"no memory to choose from {size} rows")


def serves(rows: Sequence[Tensor]) -> bool:
    """Return True if C copies rows of these buffers, on one thread."""
    return serving(list(rows)) is not None and all(own.is_contiguous() for own in rows)
