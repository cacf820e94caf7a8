"""The picture's height and width among the integer arguments of a module over packed tokens.

A module that makes a picture of its tokens may read its height and width from such arguments, in
sites or in pixels. The tokens show how many pixels wide a site is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

Roles = tuple[str, ...]
AXES = ("frames", "y", "x")
PIXELS = (2, 4, 8, 16, 32, 64)  # the width of a site


def grid_numbers(paths: Sequence[str], values: Sequence[object], tokens: int) -> dict[str, Roles]:
    """Return the roles of the integers that are the picture's height and width, by their path.

    Height stands before width, and the frames of a video before both, in one list or among the
    arguments. Without a pair that has as many sites as there are tokens, the sides are in pixels
    if sites of some width are as many; else the only pair of all is the picture's, whose tokens
    have padding behind them.
    """
    numbers = {p: v for p, v in zip(paths, values, strict=True) if type(v) is int and v > 0}
    groups: dict[str, list[str]] = {}
    for path in numbers:
        groups.setdefault(path.rpartition(".")[0], []).append(path)
    found = [runs for paths in groups.values() for runs in grids_in(paths, numbers)]
    exact = [grid for grid in found if prod(numbers[path] for path in grid) == tokens]
    pairs = {grid[-2:] for grid in found}
    smaller = [grid for grid in found if prod(numbers[path] for path in grid) < tokens]
    if not exact:
        for grid in found:
            for width in PIXELS:
                sites = width**2 * tokens
                whole = all(numbers[path] % width == 0 for path in grid[-2:])
                if whole and prod(numbers[path] for path in grid) == sites:
                    return in_pixels(grid, width)
    chosen = exact[:1] or (smaller[:1] if len(pairs) == 1 else [])
    return {p: (axis,) for grid in chosen for p, axis in zip(grid, AXES[-len(grid) :], strict=True)}


def in_pixels(grid: Sequence[str], width: int) -> dict[str, Roles]:
    """Return the roles of a picture's sides, by path, if a site is this number of pixels wide."""
    scales = ("", f"*{width}", f"*{width}")[-len(grid) :]
    pairs = zip(grid, AXES[-len(grid) :], scales, strict=True)
    return {path: (f"{axis}{scale}",) for path, axis, scale in pairs}


def axis_of(role: str) -> tuple[str, int]:
    """Return the axis that an integer gives the size of, and how many of it a site is wide."""
    axis, _, width = role.partition("*")
    return axis, int(width or 1)


def side_of(role: str, number: int) -> tuple[str, int]:
    """Return the axis that an integer gives the size of, and that size in sites."""
    axis, width = axis_of(role)
    return axis, number // width


def grids_in(paths: Sequence[str], numbers: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return what may be the sides of a picture or a video among the integers of one place."""
    pairs = [pair for pair in pairwise(paths) if min(numbers[path] for path in pair) > 1]
    before = dict(zip(paths[1:], paths, strict=False))
    videos = [
        (before[pair[0]], *pair) for pair in pairs if numbers.get(before.get(pair[0], ""), 0) > 1
    ]
    return [*videos, *pairs]
