"""Attention of each request's rows over that request's fresh and cached keys, in one launch.

Keys and values come from two sources, without being concatenated: fresh rows, and cached rows in
full precision or packed to 8 or 4 bits, which are widened while they are loaded. Softmax is
computed online: products and weights of a block of keys never leave the processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e as EULER
from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskfx.ops.kernels.attend_tables import AttendTables, attend_tables
from maskfx.ops.kernels.launch import Spans, needs_wide_products, power, spans_of
from maskfx.ops.kernels.tuning import Config, bucket, configured

CONFIGS: tuple[Config, ...] = (
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
)
LOG2E = log2(EULER)


@triton.jit
def load_keys(rows, scales, keys, there, row_step, head_at, depth, part, BITS: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    """Load (keys, BLOCK_D) features of one head; packed ones become float32."""
    at = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (at < depth)[None, :]
    place = head_at + at
    line = keys.to(tl.int64)[:, None] * row_step
    if BITS == 0:
        found = tl.load(rows + line + place[None, :], mask=inside, other=0.0)
    else:
        if BITS == 8:
            steps = tl.load(rows + line + place[None, :], mask=inside, other=0).to(tl.float32)
        else:
            both = tl.load(rows + line + (place // 2)[None, :], mask=inside, other=0).to(tl.int32)
            half = (both >> ((place % 2) * 4)[None, :]) & 15
            steps = (half - 8).to(tl.float32)
        features = row_step
        if BITS == 4:
            features = row_step * 2
        parts = features // part
        scale = tl.load(
            scales + keys.to(tl.int64)[:, None] * parts + (place // part)[None, :],
            mask=inside,
            other=0.0,
        )
        found = steps * scale.to(tl.float32)
    return found


@triton.jit
def attend_block(query, key, value, total, top, mixed, there, live, bias, line, column, scale,
                 BIAS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one block of keys to the running maxima, sums and mixtures of the queries."""
    kind = query.dtype
    key, value = key.to(kind), value.to(kind)
    if WIDE:
        query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    products = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if BIAS > 0:
        added = tl.load(
            bias + line[:, None] + column[None, :],
            mask=live[:, None] & there[None, :],
            other=0,
        )
        if BIAS == 1:
            products += added.to(tl.float32) * 1.4426950408889634
        else:
            products = tl.where(added != 0, products, float("-inf"))
    products = tl.where(there[None, :], products, float("-inf"))
    higher = tl.maximum(top, tl.max(products, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no key is allowed so far
    weights = tl.exp2(products - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    if not WIDE:
        weights = weights.to(kind)
    mixed = tl.dot(weights, value, mixed * fade[:, None], input_precision=PRECISION)
    return total, higher, mixed


@triton.jit
def attend_kernel(
    q,
    k,
    v,
    rest_k,
    rest_v,
    k_scales,
    v_scales,
    bias,
    out,
    block_table,
    request_table,
    range_table,
    offsets,
    scale,
    heads,
    shared,
    depth,
    depth_v,
    q_step,
    k_step,
    v_step,
    rest_k_step,
    rest_v_step,
    part_k,
    part_v,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_HEADS: tl.constexpr,
    PAIRWISE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = block_table + tl.program_id(0) * 4
    head = tl.program_id(1)
    start, stop, request = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    rows = start + tl.arange(0, BLOCK_M)
    live = rows < stop
    about = request_table + request * 5
    first, fresh_end, rest_end = tl.load(about), tl.load(about + 1), tl.load(about + 2)
    key_head = head // shared
    at = tl.arange(0, BLOCK_D)
    query = tl.load(
        q + rows.to(tl.int64)[:, None] * q_step + (head * depth + at)[None, :],
        mask=live[:, None] & (at < depth)[None, :],
        other=0.0,
    )
    line = tl.zeros((BLOCK_M,), dtype=tl.int64)
    if BIAS > 0:
        width = tl.load(about + 3).to(tl.int64)
        line += tl.load(offsets + request)
        each = width
        if PAIRWISE:
            each = width * tl.load(about + 4)
            line += (tl.load(block + 3) + tl.arange(0, BLOCK_M)).to(tl.int64) * width
        if BIAS_HEADS:
            line += head * each
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    for number in range(first, fresh_end):
        begin, end = tl.load(range_table + number * 3), tl.load(range_table + number * 3 + 1)
        before = tl.load(range_table + number * 3 + 2)
        for at_key in range(begin, end, BLOCK_N):
            keys = at_key + tl.arange(0, BLOCK_N)
            there = keys < end
            key = load_keys(k, k, keys, there, k_step, key_head * depth, depth, 1, 0, BLOCK_D)
            value = load_keys(v, v, keys, there, v_step, key_head * depth_v, depth_v, 1, 0, BLOCK_V)
            total, top, mixed = attend_block(
                query, key, value, total, top, mixed, there, live, bias, line,
                before + keys - begin, scale, BIAS, WIDE, PRECISION,
            )  # fmt: skip
    for number in range(fresh_end, rest_end):
        begin, end = tl.load(range_table + number * 3), tl.load(range_table + number * 3 + 1)
        before = tl.load(range_table + number * 3 + 2)
        for at_key in range(begin, end, BLOCK_N):
            keys = at_key + tl.arange(0, BLOCK_N)
            there = keys < end
            key = load_keys(
                rest_k, k_scales, keys, there, rest_k_step, key_head * depth, depth, part_k, BITS,
                BLOCK_D,
            )  # fmt: skip
            value = load_keys(
                rest_v, v_scales, keys, there, rest_v_step, key_head * depth_v, depth_v, part_v,
                BITS, BLOCK_V,
            )  # fmt: skip
            total, top, mixed = attend_block(
                query, key, value, total, top, mixed, there, live, bias, line,
                before + keys - begin, scale, BIAS, WIDE, PRECISION,
            )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    at_v = tl.arange(0, BLOCK_V)
    place = out + rows.to(tl.int64)[:, None] * (heads * depth_v) + (head * depth_v + at_v)[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=live[:, None] & (at_v < depth_v)[None, :])


@dataclass(frozen=True)
class CachedOperand:
    """Cached rows of keys or values: (rows, heads, depth), or packed rows and their scales."""

    rows: Tensor
    scales: Tensor | None = None

    @property
    def bits(self) -> int:
        if self.scales is None:
            return 0
        return 4 if self.rows.dtype == torch.uint8 else 8

    @property
    def step(self) -> int:
        """The numbers from one row to the next."""
        return self.rows[0].numel() if len(self.rows) else 1

    def part(self) -> int:
        """Return the number of values that share a scale."""
        if self.scales is None:
            return 1
        return self.step * (2 if self.bits == 4 else 1) // self.scales.shape[1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest_k: CachedOperand,
    rest_v: CachedOperand,
    q_spans: Tensor,
    k_spans: Tensor,
    rest_spans: Tensor,
    bias: Tensor | None,
    bias_heads: int,
    pairwise: bool,
    scale: float | None,
) -> Tensor:
    """Run the kernel; the arguments are those of `maskfx::attend`, the cached rows as objects."""
    spans = tuple(map(spans_of, (q_spans, k_spans, rest_spans)))
    q, k, v = (value.contiguous() for value in (q, k, v))
    rest_k, rest_v = (
        CachedOperand(r.rows.contiguous(), None if r.scales is None else r.scales.contiguous())
        for r in (rest_k, rest_v)
    )
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    if not out.numel():
        return out
    masked = None if bias is None else (bias.contiguous(), bias_heads, pairwise)
    call = AttendCall(q, k, v, rest_k, rest_v, spans, masked, scale, out)
    run = call.launch
    keys = call.tables(CONFIGS[0]["BLOCK_M"]).most
    shape = (str(q.dtype), bucket(len(q)), bucket(keys), *q.shape[1:], v.shape[2], rest_k.bits)
    run(configured(q.device, "attend", shape, CONFIGS, run))
    return out


@dataclass(frozen=True)
class AttendCall:
    """The arguments of one call; `masked` is the mask, its heads, and whether it is per query."""

    q: Tensor
    k: Tensor
    v: Tensor
    rest_k: CachedOperand
    rest_v: CachedOperand
    spans: tuple[Spans, ...]
    masked: tuple[Tensor, int, bool] | None
    scale: float | None
    out: Tensor

    def tables(self, size: int) -> AttendTables:
        _, heads, pairwise = self.masked or (None, 1, False)
        return attend_tables(*self.spans, heads, pairwise, size, self.q.device)

    def launch(self, config: Config) -> None:
        q, v = self.q, self.v
        heads, depth, depth_v = q.shape[1], q.shape[2], v.shape[2]
        tables = self.tables(config["BLOCK_M"])
        if not len(tables.blocks):
            return
        bias, bias_heads, pairwise = self.masked or (None, 1, False)
        scale = depth**-0.5 if self.scale is None else self.scale
        rest = [r.rows if len(r.rows) else q for r in (self.rest_k, self.rest_v)]
        scales = [
            q if r.scales is None or not len(r.scales) else r.scales
            for r in (self.rest_k, self.rest_v)
        ]
        attend_kernel[(len(tables.blocks), heads)](
            q,
            self.k if len(self.k) else q,
            self.v if len(self.v) else q,
            *rest,
            *scales,
            q if bias is None else bias.view(torch.uint8) if bias.dtype == torch.bool else bias,
            self.out,
            tables.blocks,
            tables.requests,
            tables.ranges if len(tables.ranges) else tables.requests,
            tables.offsets,
            scale * LOG2E,
            heads,
            heads // self.k.shape[1],
            depth,
            depth_v,
            heads * depth,
            self.k.shape[1] * depth,
            self.k.shape[1] * depth_v,
            self.rest_k.step,
            self.rest_v.step,
            self.rest_k.part(),
            self.rest_v.part(),
            BITS=self.rest_k.bits,
            BIAS=0 if bias is None else 2 if bias.dtype == torch.bool else 1,
            BIAS_HEADS=bias_heads > 1,
            PAIRWISE=pairwise,
            WIDE=needs_wide_products(q.dtype),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            BLOCK_D=power(depth),
            BLOCK_V=power(depth_v),
            **config,
        )


__all__ = ["CachedOperand", "attend"]
