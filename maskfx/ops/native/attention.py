"""Attention in C, for rows in single precision on a CPU with AVX-512; else PyTorch's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from maskfx.ops.base import plain_of
from maskfx.ops.native.build import BEYOND, wide_functions


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_v: Tensor,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    bias: Tensor | None,
    bias_heads: int,
    pairwise: bool,
    scale: float | None,
) -> Tensor:
    rows, spans = (q, k, v, rest_k, rest_v), (q_spans, k_spans, rest_spans)
    lib = None if bias is not None else serving(rows, spans)
    if lib is None:
        found: Tensor = plain_of("attend")(*rows, *spans, bias, bias_heads, pairwise, scale)
        return found
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    run(lib, rows, spans, scale, out, None)
    return out


def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_v: Tensor,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    rows, spans = (q, k, v, rest_k, rest_v), (q_spans, k_spans, rest_spans)
    lib = serving(rows, spans)
    if lib is None:
        found: tuple[Tensor, Tensor] = plain_of("attend_part")(*rows, *spans, scale)
        return found
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    weights = q.new_full((*q.shape[:2], 1), -torch.inf)
    run(lib, rows, spans, scale, out, weights)
    return out, weights


def serving(rows: Sequence[Tensor], spans: Sequence[Tensor]) -> ctypes.CDLL | None:
    """Return the C functions if they serve these values, in this precision."""
    if any(x.dtype != torch.float32 or x.dim() != 3 or x.stride(2) != 1 for x in rows):
        return None
    if any(span.dtype != torch.int64 or not span.is_contiguous() for span in spans):
        return None
    return None if torch.is_autocast_enabled("cpu") else wide_functions()


def run(
    lib: ctypes.CDLL,
    rows: Sequence[Tensor],
    spans: Sequence[Tensor],
    scale: float | None,
    out: Tensor,
    weights: Tensor | None,
) -> None:
    """Call the C function; see `Call` in attention.c."""
    q, k, v, *_ = rows
    given = (
        *(x.data_ptr() for x in rows),
        *(rows[n].shape[0] for n in (0, 1, 3)),
        *(step for x in rows for step in x.stride()[:2]),
        *(q.shape[1], k.shape[1], q.shape[2], v.shape[2]),
        *(len(spans[0]), *(x.data_ptr() for x in spans), *(x.shape[1] // 2 for x in spans)),
        *(out.data_ptr(), 0 if weights is None else weights.data_ptr()),
        torch.get_num_threads(),
    )
    factor = q.shape[2] ** -0.5 if scale is None else scale
    failed = lib.attend((ctypes.c_int64 * len(given))(*given), factor)
    if failed == BEYOND:
        tables = [span.tolist() for span in spans]
        raise IndexError(f"spans of requests, {tables}, point beyond the rows")
    if failed:
        raise MemoryError(f"attend: no memory for heads of {q.shape[2]} and {v.shape[2]} numbers")
