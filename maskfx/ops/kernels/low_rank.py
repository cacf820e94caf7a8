"""Low-rank terms of groups of rows: one launch narrows all groups, and one widens them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskfx.ops.base import kept_table
from maskfx.ops.kernels.launch import Spans, blocks, needs_wide_products, on_device, power
from maskfx.ops.kernels.tuning import Config, bucket, configured

RANKS = 128  # of a group, at most
CONFIGS: tuple[Config, ...] = (
    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 32, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4},
)


@triton.jit
def narrow_kernel(rows, down, table, narrow, inputs, WIDE: tl.constexpr, PRECISION: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Write a block's rows times the transposed `down` of its group, zero beyond its ranks."""
    about = table + tl.program_id(0) * 4
    start, stop, low, high = (
        tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3),
    )  # fmt: skip
    line = start + tl.arange(0, BLOCK_M)
    rank = tl.arange(0, BLOCK_R)
    live, used = line < stop, low + rank < high
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    if low < high:
        for first in range(0, inputs, BLOCK_K):
            at = first + tl.arange(0, BLOCK_K)
            inside = at < inputs
            x = tl.load(
                rows + line.to(tl.int64)[:, None] * inputs + at[None, :],
                mask=live[:, None] & inside[None, :],
                other=0.0,
            )
            w = tl.load(
                down + (low + rank).to(tl.int64)[None, :] * inputs + at[:, None],
                mask=used[None, :] & inside[:, None],
                other=0.0,
            )
            if WIDE:
                x, w = x.to(tl.float32), w.to(tl.float32)
            total = tl.dot(x, w, total, input_precision=PRECISION)
    place = narrow + line.to(tl.int64)[:, None] * BLOCK_R + rank[None, :]
    tl.store(place, total.to(narrow.dtype.element_ty), mask=live[:, None] & (rank >= 0)[None, :])


@triton.jit
def widen_kernel(
    base,
    narrow,
    up,
    table,
    out,
    outputs,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write a block's base plus its narrow rows times the `up` of its group."""
    about = table + tl.program_id(0) * 4
    start, stop, low, high = (
        tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3),
    )  # fmt: skip
    line = start + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, BLOCK_R)
    live, wanted, used = line < stop, at < outputs, low + rank < high
    inside = live[:, None] & wanted[None, :]
    place = line.to(tl.int64)[:, None] * outputs + at[None, :]
    total = tl.load(base + place, mask=inside, other=0.0).to(tl.float32)
    if low < high:
        x = tl.load(
            narrow + line.to(tl.int64)[:, None] * BLOCK_R + rank[None, :],
            mask=live[:, None] & used[None, :],
            other=0.0,
        )
        w = tl.load(
            up + (low + rank).to(tl.int64)[:, None] * outputs + at[None, :],
            mask=used[:, None] & wanted[None, :],
            other=0.0,
        )
        if WIDE:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@kept_table
def group_blocks(groups: Spans, rows: int, size: int, device: torch.device) -> Tensor:
    """Return (blocks, 4): first row, end, first rank and end of ranks, covering all rows."""
    found: list[list[int]] = []
    done = 0
    for start, stop, low, high in (*groups, (rows, rows, 0, 0)):
        for first, last, ranks in ((done, start, (0, 0)), (start, stop, (low, high))):
            found += [[at, min(at + size, last), *ranks] for at in range(first, last, size)]
        done = max(done, stop)
    return on_device(found, 4, device)


def serves_ranks(table: Sequence[Sequence[int]]) -> bool:
    """Return True if the kernels compute groups of these ranks."""
    return all(0 <= high - low <= RANKS for *_, low, high in table)


def add_low_rank(
    base: Tensor, rows: Tensor, down: Tensor, up: Tensor, table: Sequence[Sequence[int]]
) -> Tensor:
    """Run the kernels on (rows, features); groups are those of `maskfx::add_low_rank`."""
    base, rows, down, up = (value.contiguous() for value in (base, rows, down, up))
    out = torch.empty_like(base)
    if not out.numel():
        return out
    most = power(max((high - low for *_, low, high in table), default=0))
    narrow = rows.new_empty(len(rows), most)
    groups = tuple(map(tuple, table))
    run = partial(_launch, base, rows, down, up, narrow, out, groups)
    shape = (str(rows.dtype), bucket(len(rows)), rows.shape[1], up.shape[1], most)
    run(configured(rows.device, "add_low_rank", shape, CONFIGS, run))
    return out


def _launch(
    base: Tensor,
    rows: Tensor,
    down: Tensor,
    up: Tensor,
    narrow: Tensor,
    out: Tensor,
    groups: Spans,
    config: Config,
) -> None:
    size = config["BLOCK_M"]
    table = group_blocks(groups, len(rows), size, rows.device)
    inputs, outputs = rows.shape[1], up.shape[1]
    shared = {
        "WIDE": needs_wide_products(rows.dtype),
        "PRECISION": "ieee" if rows.dtype == torch.float32 else "tf32",
        "BLOCK_M": size,
        "BLOCK_R": narrow.shape[1],
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
    }
    block_k = min(config["BLOCK_K"], power(inputs))
    narrow_kernel[(len(table),)](rows, down, table, narrow, inputs, BLOCK_K=block_k, **shared)
    widen_kernel[(len(table), blocks(outputs, config["BLOCK_N"]))](
        base, narrow, up, table, out, outputs, BLOCK_N=config["BLOCK_N"], **shared
    )
