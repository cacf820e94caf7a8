"""Held-out edits under masks of real ratios and of no regular shape.

One thing of a held-out scene becomes another one. The mask covers the thing and grows around it as
a blob, until it has exactly the wanted share of the picture.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from bench.masks import fitted_ratio, production_ratios
from training.captions import caption_of
from training.edits import Edit
from training.paint import paint
from training.scenes import COLOURS, SHAPES, SIDE, Scene, Thing, draw_scene

Mask = NDArray[np.bool_]

FIRST_SCENE = 1_000_000  # other scenes than those of training.edits
TRIES = 60
ROOMY = 2.2  # a mask of this many times the thing's own area leaves no doubt what to draw


def draw_edit(index: int, ratio: float | None = None) -> Edit:
    """The edit of a number."""
    rng = np.random.default_rng((13, index))
    wanted = ratio_of(index) if ratio is None else ratio
    scene, at = fitting_scene(index, wanted)
    old = scene.things[at]
    shape = str(rng.choice([one for one in SHAPES if one != old.shape]))
    colour = str(rng.choice([one for one in COLOURS if one != old.colour]))
    changed = scene.replaced(at, shape=shape, colour=colour)
    new = changed.things[at]
    prompt = caption_of(new, changed, rng)
    mask = blob_around(old, wanted, rng)
    return Edit(paint(scene).pixels, mask, prompt, new, paint(changed).pixels)


def ratio_of(index: int) -> float:
    """The share of the picture that an edit's mask shall have."""
    draw = random.Random(7_000 + index)
    real = production_ratios()
    return draw.choice(real) if real is not None else fitted_ratio(draw)


def fitting_scene(index: int, wanted: float) -> tuple[Scene, int]:
    """A scene with a thing that such a mask suits: it covers the thing, and not far more."""
    best: tuple[float, Scene, int] | None = None
    for trial in range(TRIES):
        scene = draw_scene("held-out", FIRST_SCENE + TRIES * index + trial)
        for at, thing in enumerate(scene.things):
            room = wanted * SIDE**2 / cover_of(thing).sum()
            off = abs(np.log(room / 1.4)) if room >= 1 else 10 + 1 / room
            if best is None or off < best[0]:
                best = (float(off), scene, at)
        if best is not None and best[0] < np.log(ROOMY / 1.4):
            break
    assert best is not None, "no scene is without things"
    return best[1], best[2]


def cover_of(thing: Thing) -> Mask:
    """A disc that holds all of a thing, whatever its shape."""
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    return np.asarray(np.hypot(x - thing.x, y - thing.y) <= 1.12 * thing.radius + 2)


def blob_around(thing: Thing, ratio: float, rng: np.random.Generator) -> Mask:
    """The cover of a thing, and the pixels around it that are nearest in a bent measure."""
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    across, down = x - thing.x, y - thing.y
    far, angle = np.hypot(across, down), np.arctan2(down, across)
    bent = np.ones_like(far)
    for wave in range(1, 7):
        height = rng.normal(0, 0.22 / wave**0.5)
        bent += height * np.cos(wave * angle + rng.uniform(0, 2 * np.pi))
    near = far * np.clip(bent, 0.35, None)
    cover = cover_of(thing)
    near[cover] = -1.0
    count = max(round(ratio * SIDE**2), int(cover.sum()))
    mask = np.zeros(SIDE**2, bool)
    mask[np.argsort(near, axis=None, kind="stable")[:count]] = True
    return mask.reshape(SIDE, SIDE)
