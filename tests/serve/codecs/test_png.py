"""PNG files written here are what Pillow reads."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from maskfx.serve.codecs.png import png
from maskfx.serve.request import Pixels


def lettering() -> Pixels:
    page = Image.new("RGB", (320, 240), "white")
    for line in range(14):
        ImageDraw.Draw(page).text((10, 17 * line), "a quick brown fox jumps over it", fill="black")
    return np.array(page)


def patches() -> Pixels:
    colours = np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return colours.repeat(16, 0).repeat(16, 1)


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5, 1), (17, 33), (300, 200)])
def test_pixels_come_back(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = png(pixels)
    Image.open(io.BytesIO(file)).verify()
    seen = Image.open(io.BytesIO(file))
    assert (seen.format, seen.mode) == ("PNG", "RGB")
    assert np.array_equal(np.asarray(seen), pixels)


def test_slow_changes_take_little_room() -> None:
    slope = np.linspace(0, 255, 128).astype(np.uint8)
    pixels = (slope[:, None, None] // 2 + slope[:, None] // 2).repeat(3, 2)
    assert len(png(pixels)) < pixels.nbytes / 50


@pytest.mark.parametrize(("pixels", "share"), [(lettering(), 0.9), (patches(), 1.0)])
def test_a_drawing_takes_less_room_than_quickly_by_pillow(pixels: Pixels, share: float) -> None:
    """Letters are shorter as they are, patches as differences from the row above."""
    file, theirs = png(pixels), io.BytesIO()
    Image.fromarray(pixels).save(theirs, "png", compress_level=3)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(file))), pixels)
    assert len(file) < share * len(theirs.getvalue())
