"""Which devices of each block have a group at work, and until when: what executors keep of rounds.

A *block* is eight devices in a row, the most that a group may have; no group spans two. Each block
has a round of its own, which ends at the block's *border*, when all of its groups have made their
steps. A block without a group at work is *open*. Pure: no clock, no devices; the simulator and
`elastic.py` keep one, and `rounds.py` reads it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from maskfx.scheduling.rounds.placement import BLOCK, Devices, FreeDevices
from maskfx.scheduling.rounds.round_plan import DeviceGroup

SOON = 1e-6  # seconds until devices are expected that should be free already


class BlockState:
    """Free devices, and the borders of the blocks in which groups are at work."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.free = FreeDevices(devices)
        self.blocks = -(-devices // BLOCK)
        self.borders: dict[int, float] = {}  # by block, as predicted
        self.open = list(range(self.blocks))  # blocks without a group at work, ascending
        self.partial: set[int] = set()  # blocks with free devices beside a group at work
        self._homes: dict[str, Devices] = {}
        self._residents: dict[int, list[str]] = {}  # requests with a home, by block
        self._vacated: set[int] = set()  # blocks without a group at work, with residents
        self._done: dict[Devices, float] = {}  # when the requests of each group are done
        self._later: list[tuple[float, int]] = []  # the same, ascending, with numbers of devices

    @property
    def running(self) -> list[Devices]:
        """The devices of each group at work."""
        return list(self._done)

    def size(self, block: int) -> int:
        return min(BLOCK, self.devices - block * BLOCK)

    def home(self, id: str) -> Devices | None:
        """Return the devices of a request in the round of their block, or in the one that ended."""
        return self._homes.get(id)

    def later(self, now: float, most: int) -> list[float]:
        """Return when devices that are busy are free of their requests, the soonest first.

        Args:
            most: Number of devices, after which the others are left out.
        """
        found: list[float] = []
        for at, size in self._later:
            if len(found) >= most:
                break
            found += [max(at, now + SOON)] * size
        return found

    def begin(self, now: float, groups: Sequence[DeviceGroup]) -> None:
        """Note that these groups start; requests that an open block didn't keep lose their home."""
        for block in self._vacated:
            for id in self._residents.pop(block, ()):
                self._homes.pop(id, None)
        self._vacated.clear()
        for group in groups:
            at = group.devices
            block = at.start // BLOCK
            self.free.take(at)
            end = now + group.seconds
            if block not in self.borders:
                self.open.remove(block)
            self.borders[block] = max(end, self.borders.get(block, end))
            self._done[at] = end + group.further
            insort(self._later, (end + group.further, at.size))
            for id in group.steps:
                self._leave(id)
                self._homes[id] = at
                self._residents.setdefault(block, []).append(id)
            self._note(block)

    def end(self, at: Devices) -> None:
        """Note that the group on these devices has ended."""
        self.free.give(at)
        done = self._done.pop(at), at.size
        del self._later[bisect_left(self._later, done)]
        block = at.start // BLOCK
        if self.free.count_in(block * BLOCK, self.size(block)) == self.size(block):
            del self.borders[block]
            insort(self.open, block)
            self._vacated.add(block)
        self._note(block)

    def _leave(self, id: str) -> None:
        home = self._homes.pop(id, None)
        if home is not None:
            self._residents[home.start // BLOCK].remove(id)

    def _note(self, block: int) -> None:
        free = self.free.count_in(block * BLOCK, self.size(block))
        if free and block in self.borders:
            self.partial.add(block)
        else:
            self.partial.discard(block)
