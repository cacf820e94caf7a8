"""Arrays of the types that a manifest names. NumPy has no bfloat16: its bits are held as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DType = np.dtype[Any]
Bools = NDArray[np.bool_]
Index = NDArray[np.int64]

BITS = np.dtype(np.uint16)  # bfloat16: the upper half of a float32


def dtype_of(name: str) -> DType:
    """Return the NumPy type that holds values of a type of the manifest."""
    return BITS if name == "bfloat16" else np.dtype(name)


def name_of(dtype: DType) -> str:
    return "bfloat16" if dtype == BITS else dtype.name


def is_float(value: Array) -> bool:
    return value.dtype == BITS or bool(np.issubdtype(value.dtype, np.floating))


def widened(value: Array) -> Array:
    """Return bfloat16 bits as float32, and other values as they are."""
    if value.dtype != BITS:
        return value
    return (value.astype(np.uint32) << 16).view(np.float32)


def wide(value: Array) -> Array:
    """Return a value in the type in which sums over sites are made: float32, or float64."""
    value = widened(value)
    return value if value.dtype == np.float64 else value.astype(np.float32, copy=False)


def converted(value: Array, dtype: DType) -> Array:
    """Return values in another type; to bfloat16 they are rounded to the nearest, ties to even."""
    if value.dtype == dtype:
        return value
    value = widened(value)
    if dtype != BITS:
        return value.astype(dtype)
    exact = np.ascontiguousarray(value, dtype=np.float32)
    bits = exact.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(BITS)
    return np.where(np.isnan(exact), np.asarray(0x7FC0, BITS), rounded)
