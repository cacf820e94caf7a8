"""Where an edit may paint: around a thing, or anywhere. Masks never follow an outline.

A mask that shows the old shape would show the model what to draw there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.scenes import SIDE, Scene, Thing

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class EditMask:
    """True where the edit paints. `thing` is whom the mask was put around, if anyone."""

    mask: Mask
    thing: int | None


def masks_of(scene: Scene, seed: int) -> tuple[EditMask, EditMask]:
    """Two masks of a scene: around a thing, and around another one or anywhere."""
    rng = np.random.default_rng((5, seed))
    order = [int(i) for i in rng.permutation(len(scene.things))]
    first = EditMask(mask_around(scene.things[order[0]], rng), order[0])
    if len(order) > 1 and rng.random() < 0.5:
        return first, EditMask(mask_around(scene.things[order[1]], rng), order[1])
    return first, EditMask(mask_anywhere(rng), None)


def mask_around(thing: Thing, rng: np.random.Generator) -> Mask:
    """A box or an egg that holds a thing and its shadow, with a margin."""
    left, top, right, bottom = (thing.radius * 1.04 + rng.uniform(3, 16, 4)).tolist()
    y, x = np.mgrid[:SIDE, :SIDE]
    across, down = x + 0.5 - thing.x, y + 0.5 - thing.y
    wide = np.where(across < 0, left, right + thing.radius * 0.12)
    high = np.where(down < 0, top, bottom + thing.radius * 0.08)
    power = 2.0 if rng.random() < 0.4 else 24.0
    if power == 2.0:
        wide, high = wide * 1.12, high * 1.12
    return np.asarray((np.abs(across) / wide) ** power + (np.abs(down) / high) ** power < 1)


def mask_anywhere(rng: np.random.Generator) -> Mask:
    """A side of the picture, some boxes, or a thick line."""
    y, x = np.mgrid[:SIDE, :SIDE]
    kind = rng.random()
    if kind < 0.25:
        angle, cut = rng.uniform(0, 2 * np.pi), rng.uniform(-60, 60)
        side = (x - SIDE / 2) * np.cos(angle) + (y - SIDE / 2) * np.sin(angle) > cut
        return np.asarray(side)
    mask = np.zeros((SIDE, SIDE), bool)
    if kind < 0.7:
        for _ in range(int(rng.integers(1, 4))):
            high, wide = rng.integers(30, 140, size=2)
            top, left = rng.integers(SIDE - high), rng.integers(SIDE - wide)
            mask[top : top + high, left : left + wide] = True
        return mask
    points = rng.uniform(10, SIDE - 10, (int(rng.integers(2, 5)), 2))
    thick = rng.uniform(10, 26)
    for start, end in zip(points[:-1], points[1:], strict=True):
        step = end - start
        along = ((x - start[0]) * step[0] + (y - start[1]) * step[1]) / (step @ step + 1e-6)
        along = np.clip(along, 0, 1)
        off_x, off_y = x - start[0] - along * step[0], y - start[1] - along * step[1]
        mask |= np.hypot(off_x, off_y) < thick
    return mask
