"""Draw an edit as one image to look at: panels side by side, each with a title and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SIDE = 288
GAP = 16
LINE = 20
INK, FAINT, PAPER = (20, 20, 20), (95, 95, 95), (255, 255, 255)
TINT = np.array((255, 0, 160), np.float32)


@dataclass(frozen=True)
class Panel:
    """An image with a title and notes of a line each."""

    pixels: NDArray[np.uint8]
    title: str
    notes: tuple[str, ...] = ()


def sheet(heading: str, panels: Sequence[Panel]) -> Image.Image:
    """Draw all panels in a row under a heading."""
    notes = max(len(panel.notes) for panel in panels)
    top = GAP + 2 * LINE
    size = (
        GAP + len(panels) * (SIDE + GAP),
        top + LINE + 6 + SIDE + 6 + notes * LINE + GAP,
    )
    made = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(made)
    draw.text((GAP, GAP), heading, INK, ImageFont.load_default(19))
    for index, panel in enumerate(panels):
        left = GAP + index * (SIDE + GAP)
        draw.text((left, top), panel.title, INK, ImageFont.load_default(16))
        image = Image.fromarray(panel.pixels)
        made.paste(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS), (left, top + LINE + 6))
        for line, note in enumerate(panel.notes):
            below = top + LINE + 6 + SIDE + 6 + line * LINE
            draw.text((left, below), note, FAINT, ImageFont.load_default(14))
    return made


def masked(pixels: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return an image with its masked part tinted and outlined."""
    mixed = pixels.astype(np.float32)
    mixed[mask] = 0.45 * mixed[mask] + 0.55 * TINT
    edge = mask & ~(
        np.roll(mask, 1, 0) & np.roll(mask, -1, 0) & np.roll(mask, 1, 1) & np.roll(mask, -1, 1)
    )
    mixed[edge] = 255
    return mixed.astype(np.uint8)


def difference(one: NDArray[np.uint8], other: NDArray[np.uint8], times: int) -> NDArray[np.uint8]:
    """Return the difference of two images, `times` times as bright; black where they are equal."""
    apart = np.abs(one.astype(np.int32) - other.astype(np.int32)) * times
    return apart.clip(0, 255).astype(np.uint8)
