"""Lines of a picture or a video, such as rows of sites or frames, and the tables of a batch.

NumPy alone, since the hosts of exported graphs make these tables too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

APART = ("y", "frames")  # axes along whose lines sites don't follow each other
Index = NDArray[np.int64]
Numbered = tuple[Index, int]  # the line of each row of one request, and the number of its lines


def lines_of(axis: str, sites: Index, grid: tuple[int, int]) -> Index:
    """Return the line of each site along an axis, see `sources.Lines`.

    Args:
        axis: "x", "y", "frames" or "picture".
        sites: Numbers of sites; those of a frame count before the next frame's.
        grid: Height and width of the level.
    """
    height, width = grid
    frame, place = np.divmod(sites, height * width)
    y, x = np.divmod(place, width)
    lines: dict[str, Index] = {
        "x": frame * height + y,
        "y": frame * width + x,
        "frames": place,
        "picture": frame,
    }
    return lines[axis]


def places_of(axis: str, sites: Index, grid: tuple[int, int]) -> Index:
    """Return the place of each site in its line."""
    height, width = grid
    frame, place = np.divmod(sites, height * width)
    y, x = np.divmod(place, width)
    places: dict[str, Index] = {"x": x, "y": y, "frames": frame, "picture": place}
    return places[axis]


def line_count(axis: str, grid: tuple[int, int], frames: int) -> int:
    """Return the number of lines of one request along an axis."""
    height, width = grid
    across = {"x": height, "y": width, "frames": height * width, "picture": 1}
    return across[axis] if axis == "frames" else frames * across[axis]


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
