"""Backdrops as pixels: skies, hills and grounds, walls and floors."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from training.scenes import SIDE, Backdrop

Array = NDArray[np.float32]
Colour = tuple[float, float, float]

SKY = {  # at the top, at the horizon
    "clear": ((0.25, 0.52, 0.90), (0.74, 0.87, 0.98)),
    "cloudy": ((0.48, 0.62, 0.80), (0.80, 0.86, 0.92)),
    "sunset": ((0.30, 0.26, 0.52), (0.98, 0.62, 0.36)),
    "night": ((0.02, 0.03, 0.10), (0.10, 0.13, 0.28)),
}
GROUND = {  # far, near
    "grass": ((0.46, 0.60, 0.34), (0.28, 0.47, 0.20)),
    "sand": ((0.86, 0.76, 0.56), (0.76, 0.63, 0.42)),
    "snow": ((0.84, 0.88, 0.94), (0.90, 0.93, 0.97)),
    "stone": ((0.58, 0.57, 0.56), (0.44, 0.43, 0.43)),
    "sea": ((0.32, 0.52, 0.64), (0.12, 0.34, 0.50)),
}
FLOOR = {
    "wood": ((0.62, 0.47, 0.33), (0.70, 0.53, 0.36)),
    "tiles": ((0.72, 0.72, 0.70), (0.80, 0.80, 0.78)),
    "carpet": ((0.52, 0.50, 0.56), (0.60, 0.57, 0.64)),
}
WALL_TINTS: tuple[Colour, ...] = (
    (0.78, 0.78, 0.76),
    (0.66, 0.74, 0.78),
    (0.80, 0.72, 0.62),
    (0.70, 0.76, 0.66),
    (0.58, 0.58, 0.64),
)
HOUR = {"clear": 1.0, "cloudy": 0.92, "sunset": 0.8, "night": 0.42}


def paint_backdrop(backdrop: Backdrop) -> Array:
    rng = np.random.default_rng(backdrop.look)
    canvas = np.empty((SIDE, SIDE, 3), np.float32)
    if backdrop.indoors:
        paint_wall(canvas, backdrop, rng)
        paint_floor(canvas, backdrop, rng)
    else:
        paint_sky(canvas, backdrop, rng)
        paint_hills(canvas, backdrop, rng)
        paint_ground(canvas, backdrop, rng)
    return canvas


@cache
def noises(kind: str) -> Array:
    """Six fields of noise that repeat at their borders, from 0 to 1: soft clouds or fine grain."""
    rng = np.random.default_rng(7 if kind == "cloud" else 8)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE))) * SIDE
    if kind == "cloud":
        weight = 1 / np.maximum(frequency, 1.5) ** 2.0
    else:
        weight = np.exp(-((frequency / 26) ** 2)) * np.sqrt(frequency)
    fields = []
    for _ in range(6):
        spectrum = np.fft.fft2(rng.standard_normal((SIDE, SIDE))) * weight
        field = np.fft.ifft2(spectrum).real
        fields.append(np.clip(0.5 + field / (5 * field.std()), 0, 1))
    return np.asarray(fields, np.float32)


def some_noise(kind: str, rng: np.random.Generator, rows: int = SIDE) -> Array:
    """A part of a field, moved and mirrored by chance."""
    field = noises(kind)[rng.integers(6)]
    field = np.roll(field, tuple(rng.integers(SIDE, size=2)), (0, 1))[:rows]
    return field[:, ::-1] if rng.random() < 0.5 else field


def fade(top: Colour, bottom: Colour, rows: int, rng: np.random.Generator) -> Array:
    """(rows, 1, 3): from one colour to another, both a little off."""
    ends = np.array((top, bottom)) + rng.uniform(-0.05, 0.05, (2, 3))
    along = np.linspace(0, 1, rows)[:, None, None]
    return ((1 - along) * ends[0] + along * ends[1]).astype(np.float32)


def paint_sky(canvas: Array, backdrop: Backdrop, rng: np.random.Generator) -> None:
    rows = backdrop.horizon + 12
    sky = canvas[:rows]
    sky[:] = fade(*SKY[backdrop.above], rows, rng)
    y, x = np.mgrid[:rows, :SIDE].astype(np.float32)
    if backdrop.above != "cloudy":  # a sun or a moon
        at_x, at_y = rng.uniform(20, SIDE - 20), rng.uniform(18, backdrop.horizon * 0.6)
        if backdrop.above == "sunset":
            at_y = backdrop.horizon - rng.uniform(5, 35)
        distance = np.hypot(x - at_x, y - at_y)
        disc = np.clip(rng.uniform(9, 14) - distance, 0, 1)
        glow = 0.35 * np.exp(-distance / 26) if backdrop.above != "night" else 0.0
        light = np.clip(disc + glow, 0, 1)[..., None]
        sky += light * (np.array((1.0, 0.96, 0.80), np.float32) - sky)
    if backdrop.above in ("cloudy", "clear", "sunset"):
        cover = {"cloudy": 0.42, "clear": 0.62, "sunset": 0.55}[backdrop.above]
        cloud = np.clip((some_noise("cloud", rng, rows) - cover) * 4, 0, 0.85)[..., None]
        white = (1.0, 0.80, 0.68) if backdrop.above == "sunset" else (0.97, 0.97, 0.98)
        sky += cloud * (np.array(white, np.float32) - sky)
    if backdrop.above == "night":
        for _ in range(int(rng.integers(12, 30))):
            row, column = rng.integers(2, rows - 2), rng.integers(2, SIDE - 2)
            sky[row : row + 2, column : column + 2] += rng.uniform(0.3, 0.8)


def paint_hills(canvas: Array, backdrop: Backdrop, rng: np.random.Generator) -> None:
    """Ridges, the farthest first and palest."""
    x = np.arange(SIDE, dtype=np.float32)
    y = np.arange(backdrop.horizon + 12, dtype=np.float32)[:, None]
    light = HOUR[backdrop.above]
    for index in range(backdrop.hills):
        nearness = (index + 1) / backdrop.hills
        ridge = np.full(SIDE, backdrop.horizon - (1 - nearness) * 34 - 8, np.float32)
        for waves in (1, 2, 4, 7):
            ridge += rng.uniform(2, 12) / waves * np.sin(x * waves / 41 + rng.uniform(0, 6.28))
        near, far = np.array((0.30, 0.42, 0.26)), np.array((0.55, 0.62, 0.72))
        tone = (nearness * near + (1 - nearness) * far + rng.uniform(-0.05, 0.05, 3)) * light
        cover = np.clip(y - ridge, 0, 1)[..., None]
        shade = tone.astype(np.float32) * (1 + 0.003 * np.clip(y - ridge, 0, 40))[..., None]
        part = canvas[: len(y)]
        part += cover * (shade - part)


def paint_ground(canvas: Array, backdrop: Backdrop, rng: np.random.Generator) -> None:
    rows = SIDE - backdrop.horizon
    light = HOUR[backdrop.above]
    ground = fade(*GROUND[backdrop.below], rows, rng) * np.float32(light)
    near = np.linspace(0.25, 1, rows, dtype=np.float32)[:, None]
    rough = {"grass": 0.26, "sand": 0.10, "snow": 0.07, "stone": 0.18, "sea": 0.0}
    texture = (some_noise("grain", rng, rows) - 0.5) * near * rough[backdrop.below]
    texture += (some_noise("cloud", rng, rows) - 0.5) * 0.16
    if backdrop.below == "sea":
        y, x = np.mgrid[:rows, :SIDE].astype(np.float32)
        depth = 1 / (y / rows + 0.12)
        wave = np.sin(14 * depth + 0.35 * np.sin(x / rng.uniform(9, 20)) * near + rng.uniform(0, 6))
        texture = texture * 0.6 + 0.10 * wave * near
    canvas[backdrop.horizon :] = ground * (1 + texture[..., None])


def paint_wall(canvas: Array, backdrop: Backdrop, rng: np.random.Generator) -> None:
    rows = backdrop.horizon
    tint = np.array(WALL_TINTS[rng.integers(len(WALL_TINTS))]) + rng.uniform(-0.05, 0.05, 3)
    y, x = np.mgrid[:rows, :SIDE].astype(np.float32)
    tone = np.ones((rows, SIDE), np.float32)
    if backdrop.above == "brick":
        tint = np.array((0.62, 0.36, 0.28)) + rng.uniform(-0.06, 0.06, 3)
        high, wide = 14, 34
        row = y // high
        along = x + (row % 2) * (wide / 2) + rng.integers(wide)
        brick = np.sin(row * 12.9 + (along // wide) * 78.2)
        joint = np.clip(1.6 - np.minimum(y % high, along % wide), 0, 1)
        tone = 1 + 0.10 * brick + joint * 0.38
    elif backdrop.above == "striped":
        wide = rng.uniform(5, 11)
        tone = 1 + 0.07 * np.clip(3 * np.sin(x / wide + rng.uniform(0, 6)), -1, 1)
    light = 1.08 - 0.3 * np.hypot((x - rng.uniform(40, 216)) / SIDE, (y - 30) / SIDE)
    tone = tone * light + 0.06 * (some_noise("cloud", rng, rows) - 0.5)
    canvas[:rows] = tint.astype(np.float32) * tone[..., None]


def paint_floor(canvas: Array, backdrop: Backdrop, rng: np.random.Generator) -> None:
    rows = SIDE - backdrop.horizon
    floor = fade(*FLOOR[backdrop.below], rows, rng)
    y, x = np.mgrid[:rows, :SIDE].astype(np.float32)
    near = y / rows
    depth = 1 / (near + 0.35)
    across = (x - SIDE / 2) * depth
    clear = np.clip(0.2 + near * 1.4, 0, 1)  # lines fade with distance
    if backdrop.below == "wood":
        plank = np.floor(across / 34)
        joint = np.clip(1 - np.abs(across % 34 - 1) / 1.2, 0, 1)
        grain = some_noise("cloud", rng, rows)[:, (np.arange(SIDE) * 3) % SIDE] - 0.5
        tone = 1 + 0.12 * np.sin(plank * 37.7) - 0.35 * joint * clear + 0.22 * grain
    elif backdrop.below == "tiles":
        size = rng.uniform(34, 46)
        odd = np.sin(np.pi * across / size) * np.sin(np.pi * (depth - 0.7) * 5.2)
        tone = 0.88 + 0.2 * np.clip(odd * 9, -1, 1) * clear
    else:
        tone = 1 + 0.16 * (some_noise("grain", rng, rows) - 0.5)
    canvas[backdrop.horizon :] = floor * (tone * (0.85 + 0.2 * near))[..., None]
    canvas[backdrop.horizon - 4 : backdrop.horizon] *= 0.72  # the skirting board
