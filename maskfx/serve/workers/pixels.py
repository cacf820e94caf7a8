"""Pixels between front end and workers: parts of ZeroMQ messages, copied neither in nor out.

A message has the shapes of its arrays, and their bytes follow it in the same order, one part each.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray

from maskfx.serve.messages import Shape

Bytes = NDArray[np.uint8]
Part = memoryview | bytes  # of a message


def part_of(array: NDArray[np.uint8 | np.bool_]) -> memoryview:
    """Return an array's bytes, without a copy if it is contiguous; don't change it afterwards."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read(shape: Shape, parts: Iterator[Part]) -> Bytes:
    """Return the next part's pixels, read-only; ValueError if their number isn't the shape's."""
    got = np.frombuffer(next(parts, b""), np.uint8)
    if min(shape, default=0) < 0 or got.size != prod(shape):
        raise ValueError(f"{got.size} bytes of pixels came, not the {prod(shape)} of {shape}")
    return got.reshape(shape)
