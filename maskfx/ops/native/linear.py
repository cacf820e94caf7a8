"""Products of few rows in C, in single precision on a CPU with AVX-512; else PyTorch's."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from maskfx.ops.base import plain_of
from maskfx.ops.native.build import wide_functions

MOST = 2048  # rows


def few_rows_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    values = (rows, weight) if bias is None else (rows, weight, bias)
    served = all(x.dtype == torch.float32 and x.is_contiguous() for x in values)
    served = served and rows.numel() <= MOST * rows.shape[-1]
    lib = wide_functions() if served else None
    if lib is None:
        found: Tensor = plain_of("few_rows_linear")(rows, weight, bias)
        return found
    depth, outputs = rows.shape[-1], weight.shape[0]
    assert weight.shape == (outputs, depth), "a weight of as many numbers as a row has"
    assert bias is None or bias.shape == (outputs,), "a number of the bias for each output"
    out = rows.new_empty(*rows.shape[:-1], outputs)
    given = (
        *(rows.data_ptr(), rows.numel() // max(depth, 1), depth),
        *(weight.data_ptr(), outputs),
        *(0 if bias is None else bias.data_ptr(), out.data_ptr()),
        torch.get_num_threads(),
    )
    if lib.few_rows_linear((ctypes.c_int64 * len(given))(*given)):
        raise MemoryError(f"few_rows_linear: no memory for rows of {depth} numbers")
    return out
