"""PNG files written here are what Pillow reads."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from maskfx.serve.png import png


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
