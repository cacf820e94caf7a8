"""The dtypes of the inputs of a rewritten graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from maskfx.ir.programs.program import Tap
from maskfx.ir.programs.sources import (
    Given,
    Halo,
    Kept,
    LinePairs,
    Loaded,
    Pairs,
    PairTable,
    Rest,
    RestStats,
    RestSum,
    Source,
    Table,
    Weights,
)
from maskfx.ops import wide


def dtype_of(source: Source, taps: Mapping[str, Tap], value: object) -> torch.dtype:
    """Return the dtype of an input.

    Args:
        source: What the input is.
        taps: The program's taps by name.
        value: The full value at capture that the input is made from, if it is made from one.
    """
    match source:
        case Given() | Pairs() | LinePairs() if isinstance(value, Tensor):
            return value.dtype
        case Halo(tap) | Rest(tap) | Loaded(tap) | Kept(tap):
            return taps[tap].dtype
        case RestStats(tap) | RestSum(tap):
            return wide(taps[tap].dtype)
        case PairTable():
            return source.dtype
        case Weights():
            return torch.float32
        case _ if isinstance(source, Table):
            return torch.int64
    raise AssertionError(f"an input without a tensor: {source}")
