"""Gathers rows from two sources without joining them first, and scatters rows in place."""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from maskfx.ops.kernels.launch import blocks
from maskfx.ops.kernels.tuning import Config, bucket, configured

CONFIGS: tuple[Config, ...] = (
    {"BLOCK_M": 4, "BLOCK_C": 512, "num_warps": 4},
    {"BLOCK_M": 1, "BLOCK_C": 2048, "num_warps": 4},
    {"BLOCK_M": 16, "BLOCK_C": 128, "num_warps": 4},
    {"BLOCK_M": 8, "BLOCK_C": 1024, "num_warps": 8},
)


@triton.jit
def pick_kernel(rows, more, table, out, count, row_count, more_count, width,
                BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Copy rows of [rows | more | zeros] by a table of their indices."""
    line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live, inside = line < count, at < width
    index = tl.load(table + line, mask=live, other=0).to(tl.int64)
    first = live & (index < row_count)
    second = live & (index >= row_count) & (index < row_count + more_count)
    own = tl.load(
        rows + tl.where(first, index, 0)[:, None] * width + at[None, :],
        mask=first[:, None] & inside[None, :],
        other=0.0,
    )
    other = tl.load(
        more + tl.where(second, index - row_count, 0)[:, None] * width + at[None, :],
        mask=second[:, None] & inside[None, :],
        other=0.0,
    )
    found = tl.where(first[:, None], own, other)
    target = out + line.to(tl.int64)[:, None] * width + at[None, :]
    tl.store(target, found, mask=live[:, None] & inside[None, :])


@triton.jit
def put_kernel(target, index, rows, count, width, BLOCK_M: tl.constexpr,
               BLOCK_C: tl.constexpr):  # fmt: skip
    line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = line < count
    inside = live[:, None] & (at < width)[None, :]
    place = tl.load(index + line, mask=live, other=0).to(tl.int64)
    found = tl.load(rows + line.to(tl.int64)[:, None] * width + at[None, :], mask=inside, other=0.0)
    kept = found.to(tl.float32).to(target.dtype.element_ty)
    tl.store(target + place[:, None] * width + at[None, :], kept, mask=inside)


def pick_rows(rows: Tensor, more: Tensor, table: Tensor) -> Tensor:
    """Return the rows of [rows | more | a row of zeros] at these indices, (indices, ...)."""
    rows, more, table = rows.contiguous(), more.contiguous(), table.reshape(-1).contiguous()
    out = rows.new_empty(len(table), *rows.shape[1:])
    if out.numel():
        run = partial(_pick, rows, more, table, out)
        width = out[0].numel()
        shape = (str(rows.dtype), bucket(len(table)), width)
        run(configured(rows.device, "pick_rows", shape, CONFIGS, run))
    return out


def _pick(rows: Tensor, more: Tensor, table: Tensor, out: Tensor, config: Config) -> None:
    count, width = len(out), out[0].numel()
    grid = (blocks(count, config["BLOCK_M"]), blocks(width, config["BLOCK_C"]))
    pick_kernel[grid](
        rows if len(rows) else out,
        more if len(more) else out,
        table,
        out,
        count,
        len(rows),
        len(more),
        width,
        **config,
    )


def put_rows(target: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write rows to these places of a contiguous target, which are distinct."""
    index, rows = index.contiguous(), rows.contiguous()
    if rows.numel():
        run = partial(_put, target, index, rows)
        shape = (str(rows.dtype), str(target.dtype), bucket(len(rows)), rows[0].numel())
        run(configured(rows.device, "put_rows", shape, CONFIGS, run))


def _put(target: Tensor, index: Tensor, rows: Tensor, config: Config) -> None:
    count, width = len(rows), rows[0].numel()
    grid = (blocks(count, config["BLOCK_M"]), blocks(width, config["BLOCK_C"]))
    put_kernel[grid](target, index, rows, count, width, **config)
