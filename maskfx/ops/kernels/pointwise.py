"""Pointwise steps of blocks in one pass over the rows: gated halves, modulations and gates."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskfx.ops.kernels.activations import ACTIVATION_NUMBERS, activated
from maskfx.ops.kernels.launch import blocks
from maskfx.ops.kernels.tuning import Config, bucket, configured

CONFIGS: tuple[Config, ...] = (
    {"BLOCK_M": 4, "BLOCK_C": 512, "num_warps": 4},
    {"BLOCK_M": 1, "BLOCK_C": 2048, "num_warps": 4},
    {"BLOCK_M": 16, "BLOCK_C": 128, "num_warps": 4},
    {"BLOCK_M": 8, "BLOCK_C": 512, "num_warps": 8},
)


@triton.jit
def gated_kernel(
    rows,
    out,
    count,
    width,
    value_at,
    gate_at,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (line < count)[:, None] & (at < width)[None, :]
    source = rows + line.to(tl.int64)[:, None] * (2 * width) + at[None, :]
    value = tl.load(source + value_at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(source + gate_at, mask=inside, other=0.0).to(tl.float32)
    found = value * activated(gate, ACTIVATION)
    target = out + line.to(tl.int64)[:, None] * width + at[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def owner_kernel(
    base,
    rows,
    scale,
    shift,
    owner,
    out,
    count,
    width,
    ADDS_BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write base + rows * scale if ADDS_BASE, else rows * scale + shift, by each row's request."""
    line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = line < count
    inside = live[:, None] & (at < width)[None, :]
    request = tl.load(owner + line, mask=live, other=0).to(tl.int64)
    about = request[:, None] * width + at[None, :]
    place = line.to(tl.int64)[:, None] * width + at[None, :]
    values = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale + about, mask=inside, other=0.0).to(tl.float32)
    if ADDS_BASE:
        added = tl.load(base + place, mask=inside, other=0.0).to(tl.float32)
    else:
        added = tl.load(shift + about, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (values * factor + added).to(out.dtype.element_ty), mask=inside)


def gated(rows: Tensor, activation: str, gate_first: bool) -> Tensor:
    """Run the kernel; the arguments are those of `maskfx::gated`, along the last axis."""
    width = rows.shape[-1] // 2
    flat = rows.reshape(-1, 2 * width).contiguous()
    out = flat.new_empty(len(flat), width)
    if out.numel():
        run = partial(_gated, flat, out, activation, gate_first)
        shape = (str(rows.dtype), bucket(len(flat)), width)
        run(configured(rows.device, "gated", shape, CONFIGS, run))
    return out.view(*rows.shape[:-1], width)


def _gated(rows: Tensor, out: Tensor, activation: str, gate_first: bool, config: Config) -> None:
    count, width = out.shape
    grid = (blocks(count, config["BLOCK_M"]), blocks(width, config["BLOCK_C"]))
    gate_at = 0 if gate_first else width
    gated_kernel[grid](
        rows,
        out,
        count,
        width,
        width - gate_at,
        gate_at,
        ACTIVATION=ACTIVATION_NUMBERS[activation],
        **config,
    )


def modulate(rows: Tensor, scale: Tensor, shift: Tensor, owner: Tensor) -> Tensor:
    """Run the kernel; the arguments are those of `maskfx::modulate`."""
    return _by_owner("modulate", None, rows, scale, shift, owner)


def add_gated(base: Tensor, rows: Tensor, gate: Tensor, owner: Tensor) -> Tensor:
    """Run the kernel; the arguments are those of `maskfx::add_gated`."""
    return _by_owner("add_gated", base.contiguous(), rows, gate, None, owner)


def _by_owner(
    name: str, base: Tensor | None, rows: Tensor, scale: Tensor, shift: Tensor | None, owner: Tensor
) -> Tensor:
    rows, scale, owner = rows.contiguous(), scale.contiguous(), owner.contiguous()
    out = torch.empty_like(rows)
    if out.numel():
        other = shift.contiguous() if shift is not None else scale
        run = partial(_launch, base, rows, scale, other, owner, out)
        shape = (str(rows.dtype), bucket(len(rows)), rows.shape[1])
        run(configured(rows.device, name, shape, CONFIGS, run))
    return out


def _launch(
    base: Tensor | None,
    rows: Tensor,
    scale: Tensor,
    shift: Tensor,
    owner: Tensor,
    out: Tensor,
    config: Config,
) -> None:
    count, width = rows.shape
    grid = (blocks(count, config["BLOCK_M"]), blocks(width, config["BLOCK_C"]))
    owner_kernel[grid](
        rows if base is None else base,
        rows,
        scale,
        shift,
        owner,
        out,
        count,
        width,
        ADDS_BASE=base is not None,
        **config,
    )
