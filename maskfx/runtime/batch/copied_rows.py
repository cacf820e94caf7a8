"""CopiedRows: rows of recordings that each step of a capture copies to fixed memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from torch import Tensor

from maskfx.runtime.batch.row_addresses import AddressBook, RowAddresses
from maskfx.runtime.cache.rows import RowTables


class CopiedRows:
    """Copies rows by their addresses, all in one launch.

    Args:
        book: Of the program.
        known: The addresses of the members' recordings in the first step; the recordings of later
            steps have the same forms.
        tables: Copies of index tables on devices.
    """

    def __init__(
        self, book: AddressBook, known: Sequence[RowAddresses | None], tables: RowTables
    ) -> None:
        self._book, self._known, self._tables = book, known, tables
        self._targets: list[Tensor] = []  # of each batch element of each part
        self._indices: list[Tensor] = []  # the sites that it reads
        self._origins: list[tuple[int, int, int]] = []  # member, entry, batch element

    def add(self, key: Hashable, picks: Sequence[Tensor], some: bool = False) -> Tensor | None:
        """Return memory for the rows of an entry, (rows, ...); None if they can't be copied there.

        Args:
            key: The entry in the address book.
            picks: The sites that are read, by member.
            some: Leave out sites whose rows weren't kept, instead of raising CacheError.
        """
        from maskfx.ops.kernels.rows import can_copy

        place, parts = self._book.place(key), []
        for number, (own, index) in enumerate(zip(self._known, picks, strict=True)):
            if own is None or not len(index):
                continue
            entry = own.entries[place]
            if entry.rows is None:
                return None
            if entry.subset is not None:
                index = self._tables.places(entry.subset, index, some)
            if len(index):
                parts.append((number, entry.rows, self._tables.on(index, self._book.device)))
        if not parts:
            return None
        first = parts[0][1]
        count = sum(len(rows) * len(index) for _, rows, index in parts)
        room = first.new_empty(count, *first.shape[2:])
        if not all(can_copy(rows, room) for _, rows, _ in parts):
            return None
        start = 0
        for number, rows, index in parts:
            for element in range(len(rows)):
                self._targets.append(room[start : start + len(index)])
                self._indices.append(index)
                self._origins.append((number, place, element))
                start += len(index)
        return room

    def end(self) -> None:
        """Prepare the copies; nothing is added afterwards."""
        if self._targets:
            from maskfx.ops.kernels.rows import RowCopies

            self._copies = RowCopies(self._targets, self._indices)
            members, places, elements = np.array(self._origins).T
            self._of = [
                (number, own := np.flatnonzero(members == number), places[own], elements[own])
                for number in np.unique(members).tolist()
            ]
        self._known = ()

    def run(self, known: Sequence[RowAddresses | None]) -> None:
        """Copy the rows of a step's recordings."""
        if not self._targets:
            return
        sources = np.empty(len(self._targets), dtype=np.int64)
        for number, own, places, elements in self._of:
            found = known[number]
            assert found is not None, "recordings of the same forms"
            sources[own] = found.starts[places] + elements * found.strides[places]
        self._copies.run(sources)
