"""What a scene is: a backdrop and a few things in it, drawn by chance from a seed.

Knows nothing of pixels (`paint.py`) or of words beyond the names of its parts (`captions.py`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

SIDE = 256

SHAPES = ("ball", "cube", "cone", "cylinder", "star", "heart", "ring", "cross")
COLOURS = (
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "white",
    "black",
)
MATERIALS = ("matte", "shiny", "metal", "striped", "dotted")
SIZES = ("small", "medium", "large")
RADII = {"small": (19, 24), "medium": (30, 36), "large": (43, 52)}

SKIES = ("clear", "cloudy", "sunset", "night")
GROUNDS = ("grass", "sand", "snow", "stone", "sea")
WALLS = ("plain", "brick", "striped")
FLOORS = ("wood", "tiles", "carpet")

# which scenes a seed may give: training and held-out scenes never meet
SPLITS = {"train": 1, "probe": 2, "held-out": 3}


@dataclass(frozen=True)
class Thing:
    """One object. `x` and `y` are its middle in pixels, `radius` half its height."""

    shape: str
    colour: str
    material: str
    size: str
    x: float
    y: float
    radius: float
    turn: float
    floating: bool


@dataclass(frozen=True)
class Backdrop:
    """What is behind the things: a sky over a ground, or a wall over a floor."""

    indoors: bool
    above: str
    below: str
    hills: int
    horizon: int
    look: int  # seed of everything that has no name: tints, clouds, ridges


@dataclass(frozen=True)
class Scene:
    """A backdrop and its things, the farthest first."""

    backdrop: Backdrop
    things: tuple[Thing, ...]

    def replaced(self, index: int, **changes: str) -> Scene:
        """The same scene with another shape, colour or material at one place."""
        things = list(self.things)
        things[index] = dataclasses.replace(things[index], **changes)
        return Scene(self.backdrop, tuple(things))


@lru_cache(maxsize=1 << 15)
def draw_scene(split: str, seed: int) -> Scene:
    """The scene of a seed. A training asks for the same ones again and again."""
    rng = np.random.default_rng((SPLITS[split], seed))
    backdrop = draw_backdrop(rng)
    count = int(rng.choice((1, 2, 3, 4), p=(0.3, 0.35, 0.23, 0.12)))
    things: list[Thing] = []
    for _ in range(count * 8):
        if len(things) == count:
            break
        thing = draw_thing(rng, backdrop.horizon)
        if all(is_apart(thing, other) for other in things):
            things.append(thing)
    return Scene(backdrop, tuple(sorted(things, key=lambda thing: thing.y + thing.radius)))


def draw_backdrop(rng: np.random.Generator) -> Backdrop:
    indoors = bool(rng.random() < 0.4)
    above = str(rng.choice(WALLS if indoors else SKIES))
    below = str(rng.choice(FLOORS if indoors else GROUNDS))
    hills = 0 if indoors else int(rng.choice((0, 1, 2, 3), p=(0.4, 0.2, 0.2, 0.2)))
    horizon = int(rng.integers(95, 160))
    return Backdrop(indoors, above, below, hills, horizon, int(rng.integers(2**31)))


def draw_thing(rng: np.random.Generator, horizon: int) -> Thing:
    shape = str(rng.choice(SHAPES))
    size = str(rng.choice(SIZES))
    radius = float(rng.uniform(*RADII[size]))
    floating = shape in ("star", "heart", "ring", "ball") and bool(rng.random() < 0.15)
    if floating:
        y = rng.uniform(radius + 4, max(radius + 6, horizon - radius))
    else:  # it stands on the ground
        y = rng.uniform(max(horizon + 8, 2 * radius + 6), SIDE - 6) - radius
    return Thing(
        shape=shape,
        colour=str(rng.choice(COLOURS)),
        material=str(rng.choice(MATERIALS, p=(0.3, 0.2, 0.16, 0.17, 0.17))),
        size=size,
        x=float(rng.uniform(radius + 4, SIDE - radius - 4)),
        y=float(y),
        radius=radius,
        turn=float(rng.uniform(-0.25, 0.25)),
        floating=floating,
    )


def is_apart(one: Thing, other: Thing) -> bool:
    """Things may touch, but neither hides much of the other."""
    distance = np.hypot(one.x - other.x, one.y - other.y)
    return bool(distance > 0.95 * (one.radius + other.radius))
