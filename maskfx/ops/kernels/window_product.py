"""The product of each window's rows and one matrix, without gathering the windows in memory."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskfx.ops.base import plain_of
from maskfx.ops.kernels.activations import ACTIVATION_NUMBERS, activated
from maskfx.ops.kernels.launch import blocks, needs_wide_products, power
from maskfx.ops.kernels.serves import interpreted
from maskfx.ops.kernels.tuning import Config, bucket, configured

CONFIGS: tuple[Config, ...] = (
    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
)
# the plain operator: windows are gathered in memory, and the matrix library, which splits the sums
# over features where few rows leave too little to do, multiplies them
GATHERED: Config = {"GATHERED": 1}


@triton.jit
def window_product_kernel(
    rows,
    halo,
    table,
    weight,
    bias,
    out,
    count,
    row_count,
    halo_count,
    channels,
    outputs,
    PLACES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # neighbouring programs share the windows' rows, which stay in the second-level cache
    columns = tl.cdiv(outputs, BLOCK_N)
    windows = (tl.program_id(0) // columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = (tl.program_id(0) % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, wanted = windows < count, features < outputs
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for place in range(PLACES):
        index = tl.load(
            table + windows.to(tl.int64) * PLACES + place, mask=live, other=row_count + halo_count
        ).to(tl.int64)
        fresh = index < row_count
        cached = (index >= row_count) & (index < row_count + halo_count)
        own = rows + tl.where(fresh, index, 0) * channels
        near = halo + tl.where(cached, index - row_count, 0) * channels
        matrix = weight + features.to(tl.int64) * (PLACES * channels) + place * channels
        for first in range(0, channels, BLOCK_K):
            at = first + tl.arange(0, BLOCK_K)
            inside = at < channels
            a = tl.load(
                own[:, None] + at[None, :], mask=fresh[:, None] & inside[None, :], other=0.0
            )
            b = tl.load(
                near[:, None] + at[None, :], mask=cached[:, None] & inside[None, :], other=0.0
            )
            w = tl.load(
                matrix[None, :] + at[:, None], mask=wanted[None, :] & inside[:, None], other=0.0
            )
            x = tl.where(fresh[:, None], a, b)
            if WIDE:
                x, w = x.to(tl.float32), w.to(tl.float32)
            total = tl.dot(x, w, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + features, mask=wanted, other=0.0).to(tl.float32)[None, :]
    total = activated(total, ACTIVATION)
    place_out = out + windows.to(tl.int64)[:, None] * outputs + features[None, :]
    tl.store(place_out, total.to(out.dtype.element_ty), mask=live[:, None] & wanted[None, :])


def window_product(
    rows: Tensor, halo: Tensor, table: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """Run the kernel; the arguments are those of `maskfx::window_product`."""
    rows, halo, table, weight = (x.contiguous() for x in (rows, halo, table, weight))
    count, places = table.shape
    channels, outputs = rows.shape[1], weight.shape[0]
    out = rows.new_empty(count, outputs)
    if not out.numel():
        return out
    gathered = partial(plain_of("window_product"), rows, halo, table, weight, bias, activation)
    launch = partial(_launch, rows, halo, table, weight, bias, out, activation)

    def run(config: Config) -> Tensor:
        if config == GATHERED:
            found: Tensor = gathered()
            return found
        launch(config)
        return out

    shape = (str(rows.dtype), bucket(count), places, channels, outputs)
    configs = CONFIGS if interpreted() else (GATHERED, *CONFIGS)
    return run(configured(rows.device, "window_product", shape, configs, run))


def _launch(
    rows: Tensor,
    halo: Tensor,
    table: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: str,
    config: Config,
) -> None:
    count, outputs = out.shape
    channels = rows.shape[1]
    grid = (blocks(count, config["BLOCK_M"]) * blocks(outputs, config["BLOCK_N"]),)
    small = {**config, "BLOCK_K": min(config["BLOCK_K"], power(channels))}
    window_product_kernel[grid](
        rows if len(rows) else out,  # a place to point to, never read
        halo if len(halo) else out,
        table,
        weight,
        weight if bias is None else bias.contiguous(),
        out,
        count,
        len(rows),
        len(halo),
        channels,
        outputs,
        PLACES=table.shape[1],
        HAS_BIAS=bias is not None,
        ACTIVATION=ACTIVATION_NUMBERS[activation],
        WIDE=needs_wide_products(rows.dtype),
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        **small,
    )
