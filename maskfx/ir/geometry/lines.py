"""Lines of a picture or a video, such as rows of sites or frames, and the tables of a batch.

NumPy alone, since the hosts of exported graphs make these tables too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
Numbered = tuple[Index, int]  # the line of each row of one request, and the number of its lines
WHOLE = {"x": "x", "y": "y", "frames": "frames", "picture": "y_x"}
WORD = re.compile(r"(frames|y|x)(?:(\d+)(far|near))?")


@dataclass(frozen=True)
class Along:
    """What a line has of one axis: none of it, all of it, or of its parts.

    `far`: a place in each of the parts; else all places in one of the parts.
    """

    parts: int | None = None  # None: none of the axis
    far: bool = False

    def split(self, at: Index, size: int) -> tuple[Index, int, Index, int]:
        """Return which of how many lines a position is in, and at which of how many places."""
        if self.parts is None:
            return at, size, 0 * at, 1
        part, place = np.divmod(at, size // self.parts)
        if self.far:
            return place, size // self.parts, part, self.parts
        return part, self.parts, place, size // self.parts


def along(axis: str) -> dict[str, Along]:
    """Return what a line along `axis`, see `sources.Lines`, has of each axis of sites."""
    found = dict.fromkeys(("frames", "y", "x"), Along())
    for word in WHOLE.get(axis, axis).split("_"):
        match = WORD.fullmatch(word)
        assert match is not None, axis
        found[match[1]] = Along(int(match[2] or 1), match[3] == "far")
    return found


def is_apart(axis: str) -> bool:
    """Return True if the sites of a line don't follow each other."""
    return axis not in ("x", "picture")


def lines_of(axis: str, sites: Index, grid: tuple[int, int]) -> Index:
    """Return the line of each site along an axis, see `sources.Lines`.

    Args:
        axis: "x", "y", "frames", "picture", or parts such as "y4far_x4far".
        sites: Numbers of sites; those of a frame count before the next frame's.
        grid: Height and width of the level.
    """
    return numbers_of(axis, sites, grid, 0)


def places_of(axis: str, sites: Index, grid: tuple[int, int]) -> Index:
    """Return the place of each site in its line."""
    return numbers_of(axis, sites, grid, 2)


def numbers_of(axis: str, sites: Index, grid: tuple[int, int], which: int) -> Index:
    """Return one of the numbers of `Along.split` for all axes together, frames first."""
    height, width = grid
    frame, place = np.divmod(sites, height * width)
    y, x = np.divmod(place, width)
    own = along(axis)
    # frames come first, so that their number doesn't matter; none of a line's are cut into parts
    found: Index = frame if (own["frames"].parts is None) == (which == 0) else 0 * frame
    for name, at, size in (("y", y, height), ("x", x, width)):
        split = own[name].split(at, size)
        found = found * split[which + 1] + split[which]
    return found


def line_count(axis: str, grid: tuple[int, int], frames: int) -> int:
    """Return the number of lines of one request along an axis."""
    own, none = along(axis), np.arange(0)
    sizes = {"frames": frames, "y": grid[0], "x": grid[1]}
    return prod(own[name].split(none, size)[1] for name, size in sizes.items())


def by_count(masked: Numbered, rows: Index) -> Index:
    """Return the lines of rows, renumbered by how many masked sites they have."""
    lines, count = masked
    rank: Index = np.bincount(lines, minlength=count).argsort(kind="stable").argsort()
    return rank[rows]


def lines_of_each(frames: int, tokens: int) -> Numbered:
    """Return the frames of rows that each token has, one for each frame."""
    return np.arange(frames * tokens) % frames, frames


def line_table(part: str, numbered: Sequence[Numbered]) -> Index:
    """Return a table of the lines of a batch, request by request; `part` as in `sources.Lines`."""
    part = part.removeprefix("rest_")
    total = sum(count for _, count in numbered)
    if part == "numbers":
        return np.arange(total)
    if part == "spans":
        counts = np.concatenate([np.bincount(own, minlength=count) for own, count in numbered])
        stops = np.cumsum(counts)
        return np.stack([stops - counts, stops], 1)
    if part.endswith("owner"):
        firsts = np.cumsum([0, *(count for _, count in numbered)])
        pairs = zip(numbered, firsts, strict=False)
        each = [own + first for (own, _), first in pairs]
        return np.concatenate([np.sort(own) for own in each] if part != "owner" else each)
    ends = np.cumsum([len(own) for own, _ in numbered])
    order: Index = np.concatenate(
        [
            own.argsort(kind="stable") + end - len(own)
            for (own, _), end in zip(numbered, ends, strict=True)
        ]
    )
    return order.argsort() if part == "back" else order
