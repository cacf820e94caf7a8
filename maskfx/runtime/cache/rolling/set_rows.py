"""SetRows: copies the rows of a batch from and to the buffers of a block by its sets of sites.

In host memory, where the sites of all stretches are known, one call reads the rows of many inputs,
and another one replaces those of all taps, without a table of places for each (`places.py`, which
serves everywhere).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from maskfx.ir.programs.program import Interface
from maskfx.ir.programs.sources import Loaded, Rest
from maskfx.ops import ChosenRows, serves_chosen
from maskfx.runtime.cache.rolling.places import ALL, NONE, Group, Regions, RowPlaces

AHEAD = 4 << 20  # bytes that are read at once


@dataclass(frozen=True)
class SetReads:
    """Inputs that read rows of one group's taps by its sets, in the order of the graph's inputs.

    All rows are of one shape and dtype.
    """

    group: Group
    row_bytes: int
    names: list[str] = field(default_factory=list)
    taps: list[str] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    without: list[int] = field(default_factory=list)


class SetTaps:
    """What the inputs of a program read, and its taps have, of row sets with one segment of sites.

    Args:
        interface: The interface of the program.
        regions: Its regions.
        rows: The buffers of the taps whose rows are kept.
    """

    def __init__(self, interface: Interface, regions: Regions, rows: Mapping[str, Tensor]) -> None:
        self.written: dict[str, tuple[Group, int]] = {}  # of taps that have rows of sites alone
        for tap in interface.taps.values():
            group = regions.group_of(tap.segments)
            if tap.name in rows and len(group) == len(tap.segments) == 1:
                self.written[tap.name] = group, regions.of(tap.segments[0])[1]
        reads: dict[object, SetReads] = {}
        for name, source in interface.inputs.items():
            if not isinstance(source, Rest | Loaded) or source.tap not in rows:
                continue
            own, buffer = regions.read_by(source), rows[source.tap]
            if len(own.group) == len(own.sets) == 1:
                [read] = own.sets
                before, after = (read, ALL) if isinstance(read, int) else read
                row_bytes = buffer.nbytes // max(len(buffer), 1)
                kind = own.group, buffer.shape[1:], buffer.dtype
                part = reads.setdefault(kind, SetReads(own.group, row_bytes))
                part.names.append(name)
                part.taps.append(source.tap)
                part.wanted.append(after)
                part.without.append(before)
        self.reads = list(reads.values())


class RowsAhead:
    """Reads rows of one step, those of several inputs at once where they are small.

    Args:
        rows: The buffers by tap.
        taps: What the inputs of the program read.
        places: The rows of the batch.
    """

    def __init__(self, rows: Mapping[str, Tensor], taps: SetTaps, places: RowPlaces) -> None:
        self._parts: dict[str, _Reading] = {}
        for reads in taps.reads if places.are_known else ():
            chosen = places.chosen(reads.group, reads.wanted, reads.without)
            self._parts |= dict.fromkeys(reads.names, _Reading(rows, reads, chosen))

    def take(self, name: str) -> Tensor | None:
        """Return the rows of an input; None if they have to be read by themselves."""
        part = self._parts.get(name)
        return None if part is None else part.take(name)


class _Reading:
    """Reads rows of one group and kind."""

    def __init__(self, rows: Mapping[str, Tensor], reads: SetReads, chosen: ChosenRows) -> None:
        self._rows, self._reads, self._chosen = rows, reads, chosen
        self._counts = chosen.counts()
        self._ends = self._counts.cumsum() * reads.row_bytes
        self._next = 0  # the first input that wasn't looked at
        self._ready: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor | None:
        if name not in self._ready and name in self._reads.names[self._next :]:
            self._read(self._reads.names.index(name))
        return self._ready.pop(name, None)

    def _read(self, first: int) -> None:
        """Read the rows of as many inputs as may be held, from this one on."""
        room = AHEAD + (self._ends[first - 1] if first else 0)
        self._next = max(first + 1, int(self._ends.searchsorted(room, "right")))
        part = slice(first, self._next)
        buffers = [self._rows[tap] for tap in self._reads.taps[part]]
        if len(buffers) > 1 and serves_chosen(buffers):
            rows = self._chosen.part(part).take(buffers, self._counts[part].tolist())
            self._ready |= zip(self._reads.names[part], rows, strict=True)


class SetWrites:
    """The rows that a step replaces by sets.

    Args:
        rows: The buffers by tap.
        taps: The taps of the program.
        places: The rows of the batch.
        emitted: All rows that the batch computed.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        taps: SetTaps,
        places: RowPlaces,
        emitted: Sequence[Tensor],
    ) -> None:
        self._rows, self._places = rows, places
        serves = places.complete and places.device.type == "cpu" and serves_chosen(emitted)
        self._taps = taps.written if serves else {}
        self._new: dict[Group, list[tuple[str, Tensor, int]]] = {}
        self.nbytes = 0

    def add(self, tap: str, rows: Tensor) -> bool:
        """Add the rows of a tap; return False if they have to be written by themselves."""
        if tap not in self._taps or rows.dtype != self._rows[tap].dtype:
            return False
        group, region = self._taps[tap]
        self._new.setdefault(group, []).append((tap, rows, region))
        self.nbytes += rows.nbytes
        return True

    def run(self) -> None:
        """Write the rows that were added."""
        for group, new in self._new.items():
            taps, rows, regions = zip(*new, strict=True)
            chosen = self._places.chosen(group, regions, [NONE] * len(new))
            chosen.put([self._rows[tap] for tap in taps], rows)
        self._new = {}
