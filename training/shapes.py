"""Each shape as a field over its own square: how far inside, and which way the surface looks.

A field is made on coordinates u (right) and v (down) from -1 to 1, where 1 is the thing's radius.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
# how far inside (below zero: outside), and the surface's normal (right, down, towards us)
Field = tuple[Array, Array, Array, Array]


def ball(u: Array, v: Array) -> Field:
    inside = 1 - np.hypot(u, v)
    return inside, u, v, rounded(u * u + v * v)


def cube(u: Array, v: Array) -> Field:
    """Seen from a corner: three faces that meet in the middle."""
    side, slope = 0.866, 0.577
    inside = np.minimum(side - np.abs(u), (1 - np.abs(v) - np.abs(u) * slope) * side)
    top = v < -np.abs(u) * slope
    left = u < 0
    nx = np.where(top, 0.0, np.where(left, -0.75, 0.8))
    ny = np.where(top, -0.95, 0.25)
    return inside, as_array(nx), as_array(ny), as_array(np.where(top, 0.35, 0.6))


def cone(u: Array, v: Array) -> Field:
    width = 0.85
    half = np.clip((v + 1) / 1.75 * width, 1e-3, None)
    sides = np.minimum((half - np.abs(u)) * 0.9, 0.75 - v)
    foot = (1 - np.hypot(u / width, (v - 0.75) / 0.2)) * 0.2
    inside = np.maximum(sides, foot)
    across = np.clip(u / half, -1, 1)
    return inside, across, as_array(np.full_like(u, -0.2)), rounded(across * across)


def cylinder(u: Array, v: Array) -> Field:
    width, height, tilt = 0.72, 0.74, 0.24
    lid = (1 - np.hypot(u / width, (v + height) / tilt)) * tilt
    foot = (1 - np.hypot(u / width, (v - height) / tilt)) * tilt
    sides = np.minimum(width - np.abs(u), height - np.abs(v))
    inside = np.maximum(np.maximum(sides, foot), lid)
    across = np.clip(u / width, -1, 1)
    top = lid > 0
    nx = np.where(top, 0.0, across)
    ny = np.where(top, -0.95, 0.1)
    return inside, as_array(nx), as_array(ny), as_array(np.where(top, 0.3, rounded(across**2)))


def star(u: Array, v: Array) -> Field:
    fifth = np.pi / 5
    distance = np.hypot(u, v)
    angle = np.abs((np.arctan2(u, -v) + fifth) % (2 * fifth) - fifth)
    x, y = distance * np.cos(angle), distance * np.sin(angle)
    # from the tip (1, 0) to the notch between two tips
    edge_x, edge_y = 0.47 * np.cos(fifth) - 1, 0.47 * np.sin(fifth)
    inside = (edge_y * (1 - x) + edge_x * y) / np.hypot(edge_x, edge_y)
    return bevelled(as_array(inside), u)


def heart(u: Array, v: Array) -> Field:
    scale = 1.74
    x, y = np.abs(u) / scale, (0.95 - v) / scale  # the tip is at 0, 0
    round_part = np.hypot(x - 0.25, y - 0.75) - np.sqrt(2) / 4
    along = 0.5 * np.maximum(x + y, 0)
    straight = np.minimum(np.hypot(x, y - 1), np.hypot(x - along, y - along)) * np.sign(x - y)
    inside = -scale * np.where(x + y > 1, round_part, straight)
    return bevelled(as_array(inside), u)


def ring(u: Array, v: Array) -> Field:
    middle, thick = 0.68, 0.32
    distance = np.hypot(u, v) + 1e-6
    across = (distance - middle) / thick
    inside = thick - np.abs(distance - middle)
    flat = np.clip(across, -1, 1)
    return inside, flat * u / distance, flat * v / distance, rounded(flat * flat)


def cross(u: Array, v: Array) -> Field:
    arm, reach = 0.34, 0.96
    a, b = np.abs(u), np.abs(v)
    inside = np.maximum(np.minimum(arm - a, reach - b), np.minimum(arm - b, reach - a))
    return bevelled(as_array(inside), u)


FIELDS: dict[str, Callable[[Array, Array], Field]] = {
    "ball": ball,
    "cube": cube,
    "cone": cone,
    "cylinder": cylinder,
    "star": star,
    "heart": heart,
    "ring": ring,
    "cross": cross,
}


def bevelled(inside: Array, u: Array) -> Field:
    """A flat front whose edges fall off."""
    step = float(abs(u[0, 1] - u[0, 0])) if u.shape[1] > 1 else 1.0
    height = np.sqrt(np.clip(1 - (1 - np.clip(inside / 0.22, 0, 1)) ** 2, 0, 1)) * 0.22
    down, right = np.gradient(height, step)
    length = np.sqrt(right * right + down * down + 1)
    return inside, as_array(-right / length), as_array(-down / length), as_array(1 / length)


def rounded(square: Array) -> Array:
    """What is left for the normal towards us."""
    return as_array(np.sqrt(np.clip(1 - square, 0, 1)))


def as_array(values: NDArray[np.floating]) -> Array:  # type: ignore[type-arg]
    return np.asarray(values, np.float32)
