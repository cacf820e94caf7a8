"""RowWrites: collects what a step replaces in the buffers of a block, and writes it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from maskfx.ops import put_all, replace_all
from maskfx.runtime.cache.rolling.placement import RowPlacement


@dataclass
class RowWrites:
    """The rows of a step, with their places in the buffers.

    Rows whose changes are summed are written by one call, all others by another.
    """

    nbytes: int = 0
    _put: list[tuple[Tensor, ...]] = field(default_factory=list)
    _replaced: list[tuple[Tensor, ...]] = field(default_factory=list)

    def add(
        self, buffer: Tensor, place: RowPlacement, new: Tensor, sums: Sequence[Tensor] = ()
    ) -> None:
        """Add the rows of one buffer.

        Args:
            buffer: The buffer.
            place: Where the rows lie in it.
            new: The rows.
            sums: What `maskfx.ops.replace_all` takes after the rows, if changes are summed.
        """
        self.nbytes += new.nbytes
        (self._replaced if sums else self._put).append((buffer, place.target, new, *sums))
        if isinstance(place.source, Tensor):  # a copy of the rows, which isn't held for long
            self.run()

    def run(self) -> None:
        """Write the rows that were added."""
        if self._put:
            put_all(*map(list, zip(*self._put, strict=True)))
        if self._replaced:
            replace_all(*map(list, zip(*self._replaced, strict=True)))
        self._put, self._replaced = [], []
