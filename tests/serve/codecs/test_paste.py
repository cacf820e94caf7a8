"""Outside the mask nothing changes; inside, the seam is soft and thin strokes still show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskfx.serve.codecs.paste import feather, paste, width_of_feather
from tests.serve.served import picture


def boxed(shape: tuple[int, int], top: int, left: int, bottom: int, right: int):
    mask = np.zeros(shape, np.bool_)
    mask[top:bottom, left:right] = True
    return mask


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.sampled_from([(40, 30), (300, 260)]))
def test_pixels_outside_are_the_originals(seed: int, share: float, size: tuple[int, int]) -> None:
    original, result = picture(*size, seed=1), picture(*size, seed=2)
    mask = np.random.default_rng(seed).random((size[1], size[0])) < share
    pasted = paste(result, original, mask)
    assert np.array_equal(pasted[~mask], original[~mask])


def test_the_inside_is_the_results_beyond_the_feather() -> None:
    original, result = np.zeros((600, 600, 3), np.uint8), np.full((600, 600, 3), 200, np.uint8)
    mask = boxed((600, 600), 100, 100, 400, 400)
    pasted = paste(result, original, mask)[..., 0]
    width = width_of_feather(mask.shape)
    assert width == 4
    row = pasted[250, 98:108]
    assert list(row[:2]) == [0, 0]
    assert all(0 < one < 200 for one in row[2:5])
    assert sorted(row) == list(row)
    assert (row[2 + width - 1 :] == 200).all()


def test_a_stroke_of_one_pixel_is_wholly_the_results() -> None:
    original, result = np.zeros((1024, 1024, 3), np.uint8), np.full((1024, 1024, 3), 200, np.uint8)
    mask = boxed((1024, 1024), 500, 0, 501, 1024)
    assert (paste(result, original, mask)[500] == 200).all()


def test_the_border_of_a_picture_is_no_seam() -> None:
    mask = boxed((512, 512), 0, 0, 256, 512)
    weight = feather(mask, 4)
    assert (weight[0] == 1).all()
    assert (weight[:, 0] == weight[:, 256]).all()
    assert 0 < weight[255, 256] < 1


@pytest.mark.parametrize("fill", [True, False])
def test_all_or_nothing(fill: bool) -> None:
    original, result = picture(seed=1), picture(seed=2)
    mask = np.full(original.shape[:2], fill)
    assert np.array_equal(paste(result, original, mask), result if fill else original)
