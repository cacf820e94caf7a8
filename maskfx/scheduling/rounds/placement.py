"""Placement: which devices each group of a round gets, so that as few groups as possible move.

A group of 1, 2, 4 or 8 devices starts at a multiple of its size; one of 3 at a multiple of 4, and
leaves the fourth device to a group of 1. So a group never spans two blocks of eight, and blocks are
independent but for the numbers of groups that each of them gets. A group stays where it is if its
devices contain the previous ones or are contained in them: then the ranks that have its rows keep
them. Pure; knows sizes and places, nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskfx.scheduling.degree_costs import DEGREES

BLOCK = 8  # devices: the largest group
HALF = 4
EXACT = 64  # devices up to which the fewest moves are found; on more few moves, in little time
Counts = tuple[int, ...]  # of groups, by size in the order of DEGREES
BITS, MOST = 8, 127  # of a packed count
GUARDS = sum(1 << BITS * place + BITS - 1 for place in range(len(DEGREES)))  # their highest bits


class Devices(NamedTuple):
    """A range of device numbers."""

    start: int
    size: int

    @property
    def numbers(self) -> range:
        return range(self.start, self.start + self.size)

    def nests(self, other: Devices) -> bool:
        """Return True if one of the two ranges contains the other."""
        after, end, other_end = self.start - other.start, sum(self), sum(other)
        return not after or (end <= other_end if after > 0 else other_end <= end)


class PlacedGroup(NamedTuple):
    """A group to be placed: its size, and its devices in the previous round, if any."""

    size: int
    home: Devices | None = None


def footprint(size: int, devices: int = BLOCK) -> int:
    """Return the devices that a group of a size occupies where groups are counted by sum alone.

    It is 4 for a group of 3, unless there are 3 devices only: groups whose footprints fit into the
    number of devices can be placed.
    """
    return min(HALF, devices) if size == 3 else size


def place(groups: Sequence[PlacedGroup], devices: int) -> list[Devices] | None:
    """Return the devices of each group, with the fewest moves; None if the groups don't fit.

    On more than `EXACT` devices, with few moves.
    """
    kept = _keep_all(groups, devices)
    if kept is not None:
        return kept
    if devices > EXACT:
        return _few_moves(groups, devices)
    return _fewest_moves(groups, devices)


def moves(groups: Sequence[PlacedGroup], placed: Sequence[Devices]) -> int:
    """Return the number of groups that leave their devices."""
    pairs = zip(groups, placed, strict=True)
    return sum(g.home is not None and not g.home.nests(at) for g, at in pairs)


def positions(size: int, first: int, devices: int) -> Iterator[Devices]:
    """Yield the places for a group of a size in a block or half that starts at `first`."""
    span, step = min(max(size, HALF), BLOCK), footprint(size)
    for start in range(first, first + span, step):
        if start + size <= devices:
            yield Devices(start, size)


# No move: each group at home, the new ones in what is left.


def _keep_all(groups: Sequence[PlacedGroup], devices: int) -> list[Devices] | None:
    """Return a placement without moves if taking places in one pass finds one; else None."""
    free = FreeDevices(devices)
    placed: dict[int, Devices] = {}
    order = sorted(range(len(groups)), key=lambda n: (groups[n].home is None, -groups[n].size))
    for number in order:
        at = free.first(groups[number])
        if at is None:
            return None
        placed[number] = at
        free.take(at)
    return [placed[number] for number in range(len(groups))]


def _few_moves(groups: Sequence[PlacedGroup], devices: int) -> list[Devices] | None:
    """Place the largest first, each at home if that is free; None if the footprints don't fit."""
    if sum(footprint(group.size, devices) for group in groups) > devices:
        return None
    free = FreeDevices(devices)
    placed: dict[int, Devices] = {}
    for number in sorted(range(len(groups)), key=lambda n: (-groups[n].size, not groups[n].home)):
        at = free.near(groups[number])
        if at is None:
            return None
        placed[number] = at
        free.take(at)
    return [placed[number] for number in range(len(groups))]


class FreeDevices:
    """Which devices no group has yet, a bit of a number for each."""

    def __init__(self, devices: int, taken: Iterable[Devices] = ()) -> None:
        self._devices = devices
        self._bits = (1 << devices) - 1
        for at in taken:
            self.take(at)

    def copy(self) -> FreeDevices:
        found = FreeDevices(0)
        found._devices, found._bits = self._devices, self._bits
        return found

    @property
    def count(self) -> int:
        return self._bits.bit_count()

    def count_in(self, start: int, size: int) -> int:
        return (self._bits >> start & (1 << size) - 1).bit_count()

    def only(self, start: int, size: int) -> FreeDevices:
        """Return the free ones of a range."""
        found = FreeDevices(0)
        found._devices, found._bits = self._devices, self._bits & ((1 << size) - 1) << start
        return found

    def give(self, at: Devices) -> None:
        self._bits |= ((1 << at.size) - 1) << at.start

    def take(self, at: Devices) -> None:
        self._bits &= ~(((1 << at.size) - 1) << at.start)

    def fits(self, at: Devices) -> bool:
        wanted = ((1 << at.size) - 1) << at.start
        return self._bits & wanted == wanted

    def first(self, group: PlacedGroup) -> Devices | None:
        """Return the first free place of a group, one that nests with its home if it has one."""
        size, bits = group.size, self._bits
        if group.home is not None:
            wanted = (1 << size) - 1
            for at in _nested_positions(size, group.home, self._devices):
                if bits >> at.start & wanted == wanted:
                    return at
            return None
        starts = bits & _starts(size, self._devices)
        for further in range(1, size):
            if not starts:
                break
            starts &= bits >> further
        return Devices((starts & -starts).bit_length() - 1, size) if starts else None

    def near(self, group: PlacedGroup) -> Devices | None:
        """Return a free place that nests with the group's home, or else the first one."""
        return self.first(group) or self.first(PlacedGroup(group.size))


@cache
def _starts(size: int, devices: int) -> int:
    """Return the devices at which a group of a size may start, as bits."""
    return sum(1 << start for start in range(0, devices - size + 1, footprint(size)))


@cache
def _nested_positions(size: int, home: Devices, devices: int) -> tuple[Devices, ...]:
    first = home.start // BLOCK * BLOCK
    starts = range(first, min(first + BLOCK, devices - size + 1), footprint(size))
    return tuple(at for at in (Devices(s, size) for s in starts) if home.nests(at))


# Fewest moves: per block, the most groups that stay for each count of sizes; then over blocks.


class GroupLayout(NamedTuple):
    """Places of groups in a block, and how many of them a group that stays can take."""

    stays: int
    places: tuple[Devices, ...]


def _fewest_moves(groups: Sequence[PlacedGroup], devices: int) -> list[Devices] | None:
    if sum(group.size for group in groups) > devices:
        return None
    wanted: Counts = tuple(sum(g.size == size for g in groups) for size in DEGREES)
    blocks = [
        _block_layouts(first, min(first + BLOCK, devices), groups, wanted)
        for first in range(0, devices, BLOCK)
    ]
    shape = tuple(n + 1 for n in wanted)
    best: NDArray[np.float64] = np.full(shape, -np.inf)
    best[(0,) * len(shape)] = 0.0
    tables = [best]
    for layouts in blocks:
        after = np.full(shape, -np.inf)
        for counts, layout in layouts.items():
            to = tuple(slice(n, None) for n in counts)
            since = tuple(slice(0, size - n) for size, n in zip(shape, counts, strict=True))
            np.maximum(after[to], best[since] + layout.stays, out=after[to])
        best = after
        tables.append(best)
    if np.isneginf(best[wanted]):
        return None
    return _assign(groups, _trace(blocks, tables, wanted))


def _trace(
    blocks: Sequence[Mapping[Counts, GroupLayout]],
    tables: Sequence[NDArray[np.float64]],
    wanted: Counts,
) -> list[Devices]:
    """Return the places of the best layouts, from the last block to the first."""
    places: list[Devices] = []
    left = wanted
    for layouts, before, after in zip(
        reversed(blocks), reversed(tables[:-1]), reversed(tables[1:]), strict=True
    ):
        for counts, layout in layouts.items():
            rest = tuple(a - b for a, b in zip(left, counts, strict=True))
            if min(rest) >= 0 and before[rest] + layout.stays == after[left]:
                places += layout.places
                left = rest
                break
    return places


def _block_layouts(
    first: int, end: int, groups: Sequence[PlacedGroup], wanted: Counts
) -> dict[Counts, GroupLayout]:
    """Return the best layout of a block for each count of sizes that it can get."""
    here = [g for g in groups if g.home is not None and first <= g.home.start < first + BLOCK]
    halves = [_half_layouts(at, end, here, wanted) for at in (first, first + HALF)]
    whole = next((g for g in here if g.home is not None and g.home.size == BLOCK), None)
    limit = packed(wanted) | GUARDS
    leaves = 0 if whole is None else packed([size == whole.size for size in DEGREES]) * MOST
    found: dict[int, GroupLayout] = {}
    for (left, one), (right, two) in product(halves[0].items(), halves[1].items()):
        code = left + right
        if (limit - code) & GUARDS == GUARDS:
            # a group that leaves the whole block stays wherever it is in it, and in one half only
            stays = one[0] + two[0] + (code & leaves > 0)
            if code not in found or found[code].stays < stays:
                found[code] = GroupLayout(stays, one[1] + two[1])
    for at in positions(BLOCK, first, end):
        if wanted[-1]:
            stays = int(any(g.size == BLOCK for g in here))
            _improve(found, packed([size == BLOCK for size in DEGREES]), GroupLayout(stays, (at,)))
    return {unpacked(code): layout for code, layout in found.items()}


def _half_layouts(
    first: int, end: int, here: Sequence[PlacedGroup], wanted: Counts
) -> dict[int, GroupLayout]:
    homes = [g for g in here if g.home is not None and g.home.size < BLOCK]
    limit = packed(wanted) | GUARDS
    staying: dict[Devices, int] = {}  # the groups that may stay at a place, as bits
    found: dict[int, GroupLayout] = {}
    for places, code in _half_places(first, end):
        if (limit - code) & GUARDS != GUARDS:
            continue
        left, stays = -1, 0  # as `_matched` does
        for at in places:
            if at not in staying:
                staying[at] = sum(_stays(group, at) << n for n, group in enumerate(homes))
            here_too = staying[at] & left
            if here_too:
                left &= ~(here_too & -here_too)
                stays += 1
        _improve(found, code, GroupLayout(stays, places))
    return found


def _improve(found: dict[int, GroupLayout], code: int, layout: GroupLayout) -> None:
    if code not in found or found[code].stays < layout.stays:
        found[code] = layout


@cache
def _half_places(first: int, end: int) -> tuple[tuple[tuple[Devices, ...], int], ...]:
    """Return all sets of disjoint places in the half from `first`, with their counts, packed."""
    every = [at for size in (1, 2, 3, 4) for at in positions(size, first, end)]
    return tuple(
        (places, packed([sum(at.size == size for at in places) for size in DEGREES]))
        for places in _disjoint_sets(every, 0)
    )


def _disjoint_sets(every: Sequence[Devices], taken: int) -> Iterator[tuple[Devices, ...]]:
    yield ()
    for number, at in enumerate(every):
        bits = sum(1 << n for n in at.numbers)
        if not taken & bits:
            for rest in _disjoint_sets(every[number + 1 :], taken | bits):
                yield (at, *rest)


# Counts as one number, a byte for each size: they are added and compared all at once.


def packed(counts: Sequence[int]) -> int:
    """Return counts, each at most `MOST`, as one number."""
    return sum(n << BITS * place for place, n in enumerate(counts))


def unpacked(code: int) -> Counts:
    return tuple(code >> BITS * place & MOST for place in range(len(DEGREES)))


def _matched(places: Iterable[Devices], groups: Sequence[PlacedGroup]) -> list[int | None]:
    """Return for each place the index of a group that stays there.

    Homes are disjoint, so the groups that may stay at a place either all grow, and only there, or
    are one alone: taking the first that is left gives the most.
    """
    taken: set[int] = set()
    found: list[int | None] = []
    for at in places:
        number = next((n for n, g in enumerate(groups) if n not in taken and _stays(g, at)), None)
        if number is not None:
            taken.add(number)
        found.append(number)
    return found


def _stays(group: PlacedGroup, at: Devices) -> bool:
    return group.size == at.size and group.home is not None and group.home.nests(at)


def _assign(groups: Sequence[PlacedGroup], places: Sequence[Devices]) -> list[Devices]:
    """Give each group a place of its size: the groups that stay first."""
    matched = _matched(places, groups)
    placed = {number: at for number, at in zip(matched, places, strict=True) if number is not None}
    open_places = [at for number, at in zip(matched, places, strict=True) if number is None]
    for number, group in enumerate(groups):
        if number not in placed:
            at = next(at for at in open_places if at.size == group.size)
            open_places.remove(at)
            placed[number] = at
    return [placed[number] for number in range(len(groups))]
