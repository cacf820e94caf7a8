"""Pixels as parts of messages: their bytes, and those that don't match their shape."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from maskfx.serve.workers.pixels import part_of, read

PICTURE = np.arange(20 * 30 * 3, dtype=np.uint32).astype(np.uint8).reshape(20, 30, 3)


@pytest.mark.parametrize("array", [PICTURE, PICTURE[::-1, ::2], PICTURE[:, :, 0] > 9])
def test_what_is_sent_is_what_is_read(array: NDArray[np.uint8]) -> None:
    found = read(array.shape, iter([part_of(array)]))
    assert np.array_equal(found.astype(array.dtype), array)


def test_contiguous_pixels_are_not_copied() -> None:
    assert np.shares_memory(read(PICTURE.shape, iter([part_of(PICTURE)])), PICTURE)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((2, 2, 3), [b"short"]),
        ((2, 2, 3), []),
        ((-2, -2, 3), [b"x" * 12]),
        ((0, 2, 3), [b"x"]),
        ((), []),
    ],
)
def test_what_isnt_of_its_shape_is_refused(shape: tuple[int, ...], parts: list[bytes]) -> None:
    with pytest.raises(ValueError, match="bytes of pixels came"):
        read(shape, iter(parts))
