"""The canvas: sizes a pipeline can take, and every byte outside the mask back."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from maskfx.serve.models.canvas import Canvas, scaled_mask
from tests.factories.served import picture, square


@pytest.mark.parametrize("size", [(32, 32), (29, 31), (33, 18)])
@pytest.mark.parametrize("made_at", [None, (64, 48)])
def test_whatever_a_pipeline_gives_the_outside_is_the_inputs(
    size: tuple[int, int], made_at: tuple[int, int] | None
) -> None:
    width, height = size
    given, mask = picture(1, width, height), square(width, height)
    canvas = Canvas.of(given, mask, None, 8)
    assert all(side % 8 == 0 for side in canvas.padded)
    assert canvas.image().size == canvas.mask_image().size == canvas.padded
    made = Image.new("RGB", made_at or canvas.padded, (1, 2, 3))
    found = canvas.finished(made)
    assert np.array_equal(found[~mask], given[~mask])
    assert (found[mask] == (1, 2, 3)).all()


def test_what_is_added_repeats_the_edge_and_is_not_edited() -> None:
    given, mask = picture(1, 29, 31), square(29, 31)
    canvas = Canvas.of(given, mask, None, 8)
    larger = np.asarray(canvas.image())
    assert np.array_equal(larger[:31, :29], given)
    assert np.array_equal(larger[:31, 29], given[:, -1])
    assert not np.asarray(canvas.mask_image())[31:].any()


def test_a_canvas_that_is_edited_whole_is_white_to_its_end() -> None:
    canvas = Canvas.of(picture(1, 29, 31), None, None, 8)
    assert canvas.whole
    assert np.asarray(canvas.mask_image()).min() == 255


def test_thin_strokes_survive_scaling() -> None:
    mask = np.zeros((40, 40), bool)
    mask[7] = True
    assert scaled_mask(mask, (10, 10)).any(0).all()
    canvas = Canvas.of(picture(1, 40, 40), mask, (10, 10), 2)
    assert canvas.size == (10, 10)
    assert canvas.mask.any()
