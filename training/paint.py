"""A scene as pixels, and where each of its things can be seen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from training.backdrops import paint_backdrop
from training.scenes import SIDE, Scene, Thing
from training.shapes import FIELDS, Array

RGB = {
    "red": (0.86, 0.10, 0.10),
    "orange": (0.98, 0.50, 0.05),
    "yellow": (0.98, 0.86, 0.10),
    "green": (0.10, 0.62, 0.18),
    "blue": (0.10, 0.28, 0.88),
    "purple": (0.48, 0.12, 0.68),
    "pink": (1.00, 0.52, 0.74),
    "brown": (0.45, 0.25, 0.10),
    "white": (0.95, 0.95, 0.95),
    "black": (0.08, 0.08, 0.09),
}
LIGHT = np.array((-0.5, -0.62, 0.6), np.float32)
# what the light of the hour does to the things
TINTS = {"sunset": (1.05, 0.93, 0.84), "night": (0.74, 0.77, 0.88)}


@dataclass(frozen=True)
class Picture:
    """`pixels` is (side, side, 3) in 0..255; `masks` has the visible part of each thing."""

    pixels: NDArray[np.uint8]
    masks: NDArray[np.bool_]


def paint(scene: Scene) -> Picture:
    canvas = paint_backdrop(scene.backdrop)
    tint = np.array(TINTS.get(scene.backdrop.above, (1, 1, 1)), np.float32)
    covers = np.zeros((len(scene.things), SIDE, SIDE), np.float32)
    for thing in scene.things:
        if not thing.floating:
            paint_shadow(canvas, thing)
    for index, thing in enumerate(scene.things):
        window, u, v = window_of(thing)
        alpha, colours = paint_thing(thing, u, v)
        part = canvas[window]
        part += alpha[..., None] * (colours * tint - part)
        covers[(slice(index), *window)] *= 1 - alpha
        covers[(index, *window)] = alpha
    pixels = (np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8)
    return Picture(pixels, covers > 0.5)


@cache
def grid() -> tuple[Array, Array]:
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    return rows + 0.5, columns + 0.5


def window_of(thing: Thing, reach: float = 1.05) -> tuple[tuple[slice, slice], Array, Array]:
    """The pixels around a thing, and their places in its own coordinates."""
    span = thing.radius * reach * (1 + 0.3 * abs(thing.turn)) + 2
    rows = slice(max(0, int(thing.y - span)), min(SIDE, int(thing.y + span) + 1))
    columns = slice(max(0, int(thing.x - span)), min(SIDE, int(thing.x + span) + 1))
    y, x = grid()
    u = (x[rows, columns] - np.float32(thing.x)) / np.float32(thing.radius)
    v = (y[rows, columns] - np.float32(thing.y)) / np.float32(thing.radius)
    return (rows, columns), u, v


def paint_shadow(canvas: Array, thing: Thing) -> None:
    """A soft ellipse at the foot, a little to the right: the light comes from the left."""
    foot = thing.y + thing.radius * 0.9
    rows = slice(
        max(0, int(foot - thing.radius * 0.6)), min(SIDE, int(foot + thing.radius * 0.6) + 1)
    )
    y, x = grid()
    across = (x[rows] - thing.x - 0.25 * thing.radius) / (0.95 * thing.radius)
    down = (y[rows] - foot) / (0.27 * thing.radius)
    canvas[rows] *= (1 - 0.5 * np.exp(-1.3 * (across**2 + down**2)))[..., None]


def paint_thing(thing: Thing, u: Array, v: Array) -> tuple[Array, Array]:
    """How much each pixel is the thing's, and its colours."""
    turn = 0.0 if thing.shape in ("cone", "cylinder") else thing.turn
    turned_u = np.float32(np.cos(turn)) * u + np.float32(np.sin(turn)) * v
    turned_v = np.float32(np.cos(turn)) * v - np.float32(np.sin(turn)) * u
    inside, nx, ny, nz = FIELDS[thing.shape](turned_u, turned_v)
    alpha = np.clip(inside * thing.radius + 0.5, 0, 1).astype(np.float32)
    lit = np.clip(nx * LIGHT[0] + ny * LIGHT[1] + nz * LIGHT[2], 0, 1)
    base = np.array(RGB[thing.colour], np.float32)
    surface = patterned(thing, base, turned_u, turned_v)
    colours = surface * (0.5 + 0.62 * lit)[..., None]
    if thing.material == "shiny":
        gleam = np.clip(2 * lit * nz - LIGHT[2], 0, 1) ** 12
        streak = 0.5 * np.exp(-(((turned_u + 0.5 * turned_v + 0.42) / 0.13) ** 2))
        colours += np.clip(0.8 * gleam + streak, 0, 0.9)[..., None] * (1 - colours)
    elif thing.material == "metal":
        band = np.sin(5.5 * (turned_v + 0.45 * turned_u) + 3 * ny)
        colours = colours * (0.85 + 0.38 * band)[..., None] + 0.16 * np.clip(band, 0, 1)[..., None]
    return alpha, colours.astype(np.float32)


def patterned(thing: Thing, base: Array, u: Array, v: Array) -> Array:
    """The colour of each pixel before light falls on it."""
    if thing.material == "striped":
        where = np.clip(2.2 * np.sin(9.5 * (u * 0.5 + v * 0.87)) - 0.4, 0, 1)
    elif thing.material == "dotted":
        cell_u, cell_v = (u * 2.3) % 1 - 0.5, (v * 2.3) % 1 - 0.5
        where = np.clip((0.3 - np.hypot(cell_u, cell_v)) * 12, 0, 1)
    else:
        return np.broadcast_to(base, (*u.shape, 3))
    light = thing.colour in ("white", "pink", "yellow")
    other = np.float32(0.28) if light else np.float32(0.96)
    return base + (where * 0.9)[..., None] * (other - base)
