"""Windows around things: much for little, where a denoiser learns shapes and colours."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from training.latents import GRID

WINDOW = 16  # sites along a crop: a quarter of the picture
CROPPED = 5  # of six steps this many are of crops, four times as many of them


def is_cropped(step: int) -> bool:
    return step % 6 < CROPPED


def around_a_thing(rows: dict[str, Tensor], rng: np.random.Generator) -> tuple[int, int]:
    """One of a scene's two masks that is around a thing, and which thing."""
    which = int(rng.integers(2))
    if rows["around"][which] < 0:
        which = 0  # that one is around a thing, always
    return which, int(rows["around"][which])


def window_around(mask: Tensor, rng: np.random.Generator) -> tuple[Any, ...]:
    """Where to crop latents, (…, row, column): the mask is within, or its middle is."""
    starts = []
    for axis in (1, 0):
        taken = mask.any(axis).nonzero()
        first, last = (int(taken[0]), int(taken[-1])) if len(taken) else (0, GRID - 1)
        low, high = sorted((last + 1 - WINDOW, first))
        start = int(rng.integers(low, high + 1))
        starts.append(min(max(start, 0), GRID - WINDOW))
    row, column = starts
    return ..., slice(row, row + WINDOW), slice(column, column + WINDOW)
