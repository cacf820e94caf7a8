"""Group norm of each request's rows: moments, merged with those of the rest, then scale and shift.

The rows' moments are computed block by block, each block's around its own mean, and merged per
request, so no large squares are subtracted and no block waits for another.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskfx.ops.kernels.activations import ACTIVATION_NUMBERS, activated
from maskfx.ops.kernels.launch import blocks, power, row_blocks, spans_of
from maskfx.ops.kernels.tuning import Config, bucket, configured

NUMBERS, ROWS = 8192, 128  # of a block whose moments are computed together, at most
CONFIGS: tuple[Config, ...] = (
    {"BLOCK_M": 16, "BLOCK_C": 128, "num_warps": 4},
    {"BLOCK_M": 8, "BLOCK_C": 256, "num_warps": 4},
    {"BLOCK_M": 32, "BLOCK_C": 64, "num_warps": 4},
    {"BLOCK_M": 4, "BLOCK_C": 1024, "num_warps": 8},
)


@triton.jit
def moments_kernel(rows, table, found, channels, groups, size, BLOCK_M: tl.constexpr,
                   BLOCK_C: tl.constexpr):  # fmt: skip
    """Write count, mean and sum of squared deviations of one block and group."""
    block, group = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(table + block * 4), tl.load(table + block * 4 + 1)
    line = start + tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_C)
    inside = (line < stop)[:, None] & (at < size)[None, :]
    place = rows + line.to(tl.int64)[:, None] * channels + (group * size + at)[None, :]
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    count = ((stop - start) * size).to(tl.float32)
    mean = tl.sum(tl.sum(values, 1), 0) / count
    around = tl.where(inside, values - mean, 0.0)
    target = found + (block * groups + group) * 3
    tl.store(target, count)
    tl.store(target + 1, mean)
    tl.store(target + 2, tl.sum(tl.sum(around * around, 1), 0))


@triton.jit
def merge_kernel(
    found,
    firsts,
    rest,
    weight,
    bias,
    out,
    channels,
    groups,
    size,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Merge the moments of one request's blocks and its rest, and write scale and shift."""
    request, group = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(firsts + request), tl.load(firsts + request + 1)
    about = rest + (request * groups + group) * 3
    count = tl.load(about).to(tl.float32)
    mean = tl.load(about + 1).to(tl.float32)
    spread = tl.load(about + 2).to(tl.float32)
    for begin in range(first, last, BLOCK_T):
        number = begin + tl.arange(0, BLOCK_T)
        there = number < last
        place = found + (number * groups + group) * 3
        counts = tl.load(place, mask=there, other=0.0)
        means = tl.load(place + 1, mask=there, other=0.0)
        spreads = tl.load(place + 2, mask=there, other=0.0)
        own = tl.sum(counts, 0)
        middle = tl.sum(counts * means, 0) / own
        around = means - middle
        within = tl.sum(spreads, 0) + tl.sum(counts * around * around, 0)
        delta = middle - mean
        share = own / (count + own)
        spread += within + delta * delta * count * share
        mean += delta * share
        count += own
    scale = 1.0 / tl.sqrt(spread / tl.maximum(count, 1.0) + eps)
    at = tl.arange(0, BLOCK_C)
    inside = at < size
    scales = tl.zeros((BLOCK_C,), dtype=tl.float32) + scale
    shifts = -mean * scales
    if HAS_WEIGHT:
        factor = tl.load(weight + group * size + at, mask=inside, other=0.0).to(tl.float32)
        scales, shifts = scales * factor, shifts * factor
    if HAS_BIAS:
        shifts += tl.load(bias + group * size + at, mask=inside, other=0.0).to(tl.float32)
    target = out + request.to(tl.int64) * 2 * channels + group * size + at
    tl.store(target, scales, mask=inside)
    tl.store(target + channels, shifts, mask=inside)


@triton.jit
def apply_kernel(
    rows,
    scales,
    owner,
    out,
    count,
    channels,
    ACTIVATION: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = line < count
    inside = live[:, None] & (at < channels)[None, :]
    request = tl.zeros((BLOCK_M,), dtype=tl.int64)
    if not ONE:
        request = tl.load(owner + line, mask=live, other=0).to(tl.int64)
    about = scales + request[:, None] * (2 * channels) + at[None, :]
    place = line.to(tl.int64)[:, None] * channels + at[None, :]
    values = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(about, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(about + channels, mask=inside, other=0.0).to(tl.float32)
    found = activated(values * factor + shift, ACTIVATION)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


def group_scale(
    rows: Tensor,
    rest: Tensor,
    spans: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Run the kernels; the arguments are those of `maskfx::group_scale`."""
    requests, channels = rest.shape[0], rows.shape[1]
    size = channels // groups
    wide = power(size, 1)
    tall = min(ROWS, NUMBERS // wide)
    table, firsts = row_blocks(spans_of(spans), tall, rows.device)
    out = torch.empty(requests, 2, channels, dtype=torch.float32, device=rows.device)
    found = torch.empty(max(len(table), 1), groups, 3, dtype=torch.float32, device=rows.device)
    if not requests:
        return out
    rows = rows.contiguous()
    if len(table):
        moments_kernel[(len(table), groups)](
            rows, table, found, channels, groups, size, BLOCK_M=tall, BLOCK_C=wide
        )
    merge_kernel[(requests, groups)](
        found,
        firsts,
        rest.contiguous(),
        found if weight is None else weight.contiguous(),
        found if bias is None else bias.contiguous(),
        out,
        channels,
        groups,
        size,
        eps,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK_T=64,
        BLOCK_C=wide,
    )
    return out


def norm_activation(rows: Tensor, scales: Tensor, owner: Tensor, activation: str) -> Tensor:
    """Run the kernel; the arguments are those of `maskfx::norm_activation`."""
    rows, scales, owner = rows.contiguous(), scales.contiguous(), owner.contiguous()
    out = torch.empty_like(rows)
    if not out.numel():
        return out
    run = partial(_apply, rows, scales, owner, out, activation)
    shape = (str(rows.dtype), bucket(len(rows)), rows.shape[1])
    run(configured(rows.device, "norm_activation", shape, CONFIGS, run))
    return out


def _apply(
    rows: Tensor, scales: Tensor, owner: Tensor, out: Tensor, activation: str, config: Config
) -> None:
    count, channels = rows.shape
    grid = (blocks(count, config["BLOCK_M"]), blocks(channels, config["BLOCK_C"]))
    apply_kernel[grid](
        rows,
        scales,
        owner,
        out,
        count,
        channels,
        ACTIVATION=ACTIVATION_NUMBERS[activation],
        ONE=scales.shape[0] == 1,
        **config,
    )
