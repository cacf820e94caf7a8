"""Gathers rows of two sources, scatters rows in place, and copies those of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
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


LINES, WORDS = 8, 256  # of a block of `copy_kernel`
WORD = 8  # bytes
ALIGNED = 16  # bytes: of the first row and of a row's length


@triton.jit
def copy_kernel(jobs, first_blocks, table, LINES: tl.constexpr, WORDS: tl.constexpr):
    """Copy the rows of many tensors; addresses of rows are numbers in a table."""
    job = tl.load(table + tl.program_id(0)).to(tl.int64)
    line = (tl.program_id(0) - tl.load(first_blocks + job)) * LINES + tl.arange(0, LINES)
    about = jobs + job * 5
    source = tl.multiple_of(tl.load(about), 16).to(tl.pointer_type(tl.int64))
    index = tl.load(about + 1).to(tl.pointer_type(tl.int64))
    target = tl.multiple_of(tl.load(about + 2), 16).to(tl.pointer_type(tl.int64))
    count, width = tl.load(about + 3), tl.multiple_of(tl.load(about + 4), 2)
    live = line < count
    place = tl.load(index + line, mask=live, other=0)
    for start in range(0, width, WORDS):
        at = start + tl.arange(0, WORDS)
        inside = live[:, None] & (at < width)[None, :]
        found = tl.load(source + place[:, None] * width + at[None, :], mask=inside, other=0)
        tl.store(target + line.to(tl.int64)[:, None] * width + at[None, :], found, mask=inside)


class RowCopies:
    """Copies chosen rows of many tensors to fixed places, in one launch for all.

    Args:
        targets: Where the rows go, (rows, ...) each.
        indices: Which rows of its source go to each, on the device.
    """

    def __init__(self, targets: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
        self.targets, self.indices = targets, indices  # held
        jobs = [
            (0, index.data_ptr(), target.data_ptr(), len(target), words(target))
            for target, index in zip(targets, indices, strict=True)
        ]
        counts = [blocks(len(target), LINES) for target in targets]
        owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        firsts = torch.tensor([0, *accumulate(counts)][:-1])
        self.device = targets[0].device
        self._table, self._firsts = (x.to(self.device, torch.int32) for x in (owners, firsts))
        self._jobs = torch.tensor(jobs, dtype=torch.int64)

    def run(self, sources: NDArray[np.int64]) -> None:
        """Copy rows of the tensors at these addresses."""
        jobs = torch.empty_like(self._jobs, pin_memory=self.device.type == "cuda")
        jobs.copy_(self._jobs)
        jobs.numpy()[:, 0] = sources
        table = jobs.to(self.device, non_blocking=True)
        with torch.cuda.device_of(table):
            copy_kernel[(len(self._table),)](
                table, self._firsts, self._table, LINES=LINES, WORDS=WORDS
            )


def words(rows: Tensor) -> int:
    """Return the length of a row in words."""
    return rows[0].numel() * rows.element_size() // WORD


def can_copy(source: Tensor, target: Tensor) -> bool:
    """Return True if `RowCopies` copies rows of a (batch, sites, ...) tensor to a target."""
    each = target.stride(0) * target.element_size()
    return (
        source.dtype == target.dtype
        and source.shape[2:] == target.shape[1:]
        and source.is_contiguous()
        and each % ALIGNED == 0
        and source.data_ptr() % ALIGNED == 0
    )
