"""The picture's height and width among the integer arguments of a module over packed tokens.

A module that makes a picture of its tokens may read its height and width from such arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

Roles = tuple[str, ...]
AXES = ("frames", "y", "x")


def grid_numbers(paths: Sequence[str], values: Sequence[object], tokens: int) -> dict[str, Roles]:
    """Return the roles of the integers that are the picture's height and width, by their path.

    Height stands before width, and the frames of a video before both, in one list or among the
    arguments. Without a pair that has as many sites as there are tokens, the only pair of all is
    the picture's, whose tokens have padding behind them.
    """
    numbers = {p: v for p, v in zip(paths, values, strict=True) if type(v) is int and v > 0}
    groups: dict[str, list[str]] = {}
    for path in numbers:
        groups.setdefault(path.rpartition(".")[0], []).append(path)
    found = [runs for paths in groups.values() for runs in grids_in(paths, numbers)]
    exact = [grid for grid in found if prod(numbers[path] for path in grid) == tokens]
    pairs = {grid[-2:] for grid in found}
    smaller = [grid for grid in found if prod(numbers[path] for path in grid) < tokens]
    chosen = exact[:1] or (smaller[:1] if len(pairs) == 1 else [])
    return {p: (axis,) for grid in chosen for p, axis in zip(grid, AXES[-len(grid) :], strict=True)}


def grids_in(paths: Sequence[str], numbers: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return what may be the sides of a picture or a video among the integers of one place."""
    pairs = [pair for pair in pairwise(paths) if min(numbers[path] for path in pair) > 1]
    before = dict(zip(paths[1:], paths, strict=False))
    videos = [
        (before[pair[0]], *pair) for pair in pairs if numbers.get(before.get(pair[0], ""), 0) > 1
    ]
    return [*videos, *pairs]
