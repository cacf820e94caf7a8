"""Row addresses: where the rows of a recording begin in the memory of a device.

They are found once per recording; a step that copies rows by address only adds them up.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.ir.programs.program import Interface
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, StatsKey
from maskfx.runtime.cache.rows import Rows, RowSubset
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.hardware.devices import current_stream, read_here

STATS = ("values", "total", "centre")  # what a recording keeps of the norms of a row set
ALIGNED = 16  # bytes: rows that begin elsewhere have another form


@dataclass(frozen=True)
class Entry:
    """Rows of a recording.

    Args:
        rows: (batch, sites, ...) rows; None if they aren't plain rows on the device.
        subset: The rows with their sites, if only those of some sites were kept.
    """

    rows: Tensor | None
    subset: RowSubset | None

    @property
    def form(self) -> Hashable:
        """Return what decides how the rows are copied."""
        if self.rows is None:
            return None
        rows, sites = self.rows, b"" if self.subset is None else self.subset.key
        aligned = rows.data_ptr() % ALIGNED == 0
        return rows.dtype, len(rows), rows.shape[2:], aligned, sites


@dataclass
class RowAddresses:
    """The addresses of one recording's rows.

    Args:
        form: A number that recordings share whose rows are copied alike.
        entries: The rows.
        starts: Addresses of the first element's rows, by entry; 0 without plain rows.
        strides: Bytes from one batch element to the next, by entry.
        held: The values of the recording that these addresses are of.
        streams: Those on which the rows are known to be read.
    """

    form: int
    entries: list[Entry]
    starts: NDArray[np.int64]
    strides: NDArray[np.int64]
    held: list[object]
    streams: set[int] = field(default_factory=set)

    @cached_property
    def all_here(self) -> bool:
        """Whether all are plain rows on the device."""
        return all(entry.rows is not None for entry in self.entries)

    def are_of(self, cache: StepCache) -> bool:
        """Return True if the recording still holds these rows."""
        now = values_of(cache)
        return len(now) == len(self.held) and all(map(is_, now, self.held))

    def read(self) -> None:
        """Record that this thread's stream reads the rows."""
        stream = current_stream()
        if stream not in self.streams:
            self.streams.add(stream)
            for entry in self.entries:
                if entry.rows is not None:
                    read_here(entry.rows)


class AddressBook:
    """The addresses of the recordings of one program on one device.

    Its entries are the taps of the program that keep rows, then `STATS` of each row set.
    """

    def __init__(self, interface: Interface, device: torch.device) -> None:
        self.device = device
        taps = interface.taps.values()
        self._taps = [tap.name for tap in taps if not tap.stats]
        self._stats: list[StatsKey] = list(
            dict.fromkeys((tap.segments, tap.stats) for tap in taps if tap.stats)
        )
        keys: list[Hashable] = [*self._taps]
        keys += [(key, part) for key in self._stats for part in STATS]
        self._places = {key: place for place, key in enumerate(keys)}
        self._forms: dict[Hashable, int] = {}
        self._known: MutableMapping[StepCache, RowAddresses] = WeakIdKeyDictionary()

    def place(self, key: Hashable) -> int:
        """Return the entry of a tap's name, or of a row set's key and one of `STATS`."""
        return self._places[key]

    def of(self, cache: StepCache) -> RowAddresses:
        """Return the addresses of a recording."""
        known = self._known.get(cache)
        if known is None or not known.are_of(cache):
            known = self._known[cache] = self._found(cache)
        known.read()
        return known

    def _found(self, cache: StepCache) -> RowAddresses:
        own = not isinstance(cache, RollingCache)  # its rows are replaced, and may be in a block
        values: list[Rows | None] = [cache.rows.get(tap) if own else None for tap in self._taps]
        for key in self._stats:
            kept = cache.stats.get(key) if own else None
            values += (
                [None] * len(STATS)
                if kept is None
                else [kept.values, kept.total.unsqueeze(1), kept.centre.flatten(1).unsqueeze(1)]
            )
        entries = [self._entry(rows) for rows in values]
        form = tuple(entry.form for entry in entries)
        plain = [entry.rows for entry in entries]
        return RowAddresses(
            self._forms.setdefault(form, len(self._forms)),
            entries,
            np.array([0 if r is None else r.data_ptr() for r in plain], dtype=np.int64),
            np.array([0 if r is None else r.stride(0) * r.element_size() for r in plain]),
            values_of(cache),
        )

    def _entry(self, rows: Rows | None) -> Entry:
        subset = rows if isinstance(rows, RowSubset) else None
        inner = rows if subset is None else subset.rows
        if not isinstance(inner, Tensor) or inner.device != self.device:
            return Entry(None, subset)
        return Entry(inner if inner.is_contiguous() else None, subset)


def values_of(cache: StepCache) -> list[object]:
    return [*cache.rows.values(), *cache.stats.values()]
