"""Group knapsack: one option per group, the greatest total value within a capacity. Pure.

Exact, by dynamic programming over the capacity: time proportional to options times capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskfx.runtime.planner.least_squares import Floats


class Option(NamedTuple):
    """One choice of a group: what it occupies, and what it is worth."""

    weight: int
    value: float


def choose_options(groups: Sequence[Sequence[Option]], capacity: int) -> list[int]:
    """Return the index of the chosen option of each group, of greatest total value.

    Each group needs an option of weight 0, so that a choice within the capacity exists. Among equal
    values the earlier option of a group is chosen.
    """
    best: Floats = np.zeros(capacity + 1)  # of the groups so far, by devices at most occupied
    choices: list[NDArray[np.intp]] = []
    for group in groups:
        assert any(option.weight == 0 for option in group), "a group has no option of weight 0"
        table = np.full((len(group), capacity + 1), -inf)
        for row, (weight, value) in enumerate(group):
            if weight <= capacity:
                table[row, weight:] = best[: capacity + 1 - weight] + value
        choice = table.argmax(0)
        choices.append(choice)
        best = table[choice, np.arange(capacity + 1)]
    found, left = [], capacity
    for group, choice in zip(reversed(groups), reversed(choices), strict=True):
        option = int(choice[left])
        found.append(option)
        left -= group[option].weight
    return found[::-1]
