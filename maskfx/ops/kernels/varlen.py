"""Attention over sequences of different lengths, by PyTorch's kernel: one sequence per request.

Where a request's keys are fresh and cached rows, or lie in several segments, they are brought into
the order of the sequences by one gather, and results back by one scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from maskfx.ops.kernels.attend_tables import SequenceTables, sequence_tables
from maskfx.ops.kernels.launch import spans_of

DEEPEST = 256  # features of a head
HALF = (torch.float16, torch.bfloat16)
Product = Callable[..., Any]


@cache
def torch_product() -> Product | None:
    """Return PyTorch's attention over sequences, or None if this version has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Product = varlen_attn
    return found


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if PyTorch's kernel computes this attention."""
    return (
        q.device.type == "cuda"
        and torch.cuda.is_available()
        and not torch.version.hip
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and q.dtype == k.dtype == v.dtype
        and q.dtype in HALF
        and q.shape[2] == v.shape[2] <= DEEPEST
        and q.shape[2] % 8 == 0
        and torch_product() is not None
    )


def tables(
    q: Tensor, k: Tensor, q_spans: Tensor, k_spans: Tensor, rest_spans: Tensor
) -> tuple[SequenceTables, SequenceTables]:
    """Return the tables of the queries and of the keys."""
    queries = sequence_tables(spans_of(q_spans), None, len(q), q.device)
    keys = sequence_tables(spans_of(k_spans), spans_of(rest_spans), len(k), q.device)
    return queries, keys


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: Tensor,
    rest_v: Tensor,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    scale: float | None,
    product: Product | None = None,
) -> Tensor:
    """Attend as `maskfx::attend` does, without a mask; `product` is PyTorch's by default."""
    queries, keys = tables(q, k, q_spans, k_spans, rest_spans)
    query, key, value = q, k, v
    if queries.order is not None:
        query = q.index_select(0, queries.order)
    if keys.order is not None:
        key, value = (
            (torch.cat([x, more]) if len(more) else x).index_select(0, keys.order)
            for x, more in ((k, rest_k), (v, rest_v))
        )
    out = q.new_zeros(len(q), q.shape[1], v.shape[2])
    if not len(query) or not len(key):
        return out
    attention = product or torch_product()
    assert attention is not None, "serves() is asked first"
    # versions of PyTorch before 2.13 can't be asked for shared keys, and the call fails
    shared = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    mixed: Tensor = attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        queries.ends,
        keys.ends,
        queries.longest,
        keys.longest,
        scale=scale,
        **shared,
    )
    if queries.order is None:
        return mixed
    return out.index_copy_(0, queries.order, mixed)
