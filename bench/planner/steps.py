"""Steps of assumed denoisers on an assumed device: seconds and bytes from formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maskfx.runtime.planner.timeline import BlockChoice, BlockTimes

BYTES = 2  # bf16


@dataclass(frozen=True)
class Device:
    """What the formulas assume."""

    flops_per_second: float = 4e14
    fixed_seconds: float = 3e-5
    buffer_bytes: float = 2.0**29  # for each member of the batch


DEVICE = Device()


def attention_block(
    ratio: float, sites: int, text: int, width: int, dense: float, joint: bool, pending: float
) -> tuple[BlockChoice, ...]:
    """One transformer block of one member.

    dense: multiply-adds per site and width^2 outside attention; the keys' and values' are two of
    them. joint: the text's tokens run along. pending: bytes of skips that a full block needs later.
    """
    along = text if joint else 0
    rest, active = (1 - ratio) * sites, ratio * sites + along
    every = sites + along
    rows = rest * width * BYTES

    def seconds(queries: float, projected: float) -> float:
        """Two FLOPs a multiply-add; attention's two products over every key."""
        linear = 2 * width**2 * ((dense - 2) * queries + 2 * projected)
        products = 4 * queries * (every + (0 if joint else text)) * width
        return (linear + products) / DEVICE.flops_per_second

    whole = {"needs_full": True, "leaves_full": True, "extra_bytes": rows + pending}
    return (
        BlockChoice("all", compute_seconds=seconds(every, every), **whole),  # type: ignore[arg-type]
        BlockChoice("output", rows, 0.0, seconds(active, every), **whole),  # type: ignore[arg-type]
        BlockChoice("input", rows, 0.0, seconds(active, every)),
        BlockChoice("keys", 2 * rows, 0.0, seconds(active, active)),
    )


def resnet_block(
    ratio: float, sites: int, before: int, width: int, pending: float
) -> tuple[BlockChoice, ...]:
    """Two 3x3 convolutions of one member. The halo is the ring around a square mask."""
    full = 2 * 9 * sites * (before * width + width**2) / DEVICE.flops_per_second
    ring = 4 * math.sqrt(ratio * sites) * (before + width) * BYTES
    rest = (1 - ratio) * sites * BYTES
    extra = rest * before + pending
    return (
        BlockChoice("all", 0, 0, full, needs_full=True, leaves_full=True, extra_bytes=extra),
        BlockChoice("output", rest * width, 0, full * ratio, True, True, extra_bytes=extra),
        BlockChoice("rows", ring, 0, full * ratio),
    )


def flux_like(ratio: float) -> list[tuple[BlockChoice, ...]]:
    """19 double and 38 single blocks, 1024 x 1024: 12 width^2 a site in both, 512 text tokens."""
    return [attention_block(ratio, 4096, 512, 3072, 12, True, 0.0)] * 57


def unet_like(ratio: float) -> list[tuple[BlockChoice, ...]]:
    """SDXL's shape at 1024 x 1024: three levels, 17 residual and 70 transformer blocks.

    A transformer block has 18 width^2 a site (self-attention 4, cross-attention 2, gated MLP 12).
    """
    levels = ((128**2, 320, 0), (64**2, 640, 2), (32**2, 1280, 10))
    blocks: list[tuple[BlockChoice, ...]] = []
    skips = [(levels[0][0], 320)]
    before = 320

    def add(level: int, into: int) -> None:
        sites, width, depth = levels[level]
        pending = sum((1 - ratio) * s * w * BYTES for s, w in skips)
        blocks.append(resnet_block(ratio, sites, into, width, pending))
        blocks.extend([attention_block(ratio, sites, 77, width, 18, False, pending)] * depth)

    for level, (sites, width, _) in enumerate(levels):
        for _ in range(2):
            add(level, before)
            before = width
            skips.append((sites, width))
        if level < 2:
            skips.append((sites // 4, width))
    add(2, before)
    pending = sum((1 - ratio) * s * w * BYTES for s, w in skips)
    blocks.append(resnet_block(ratio, levels[2][0], 1280, 1280, pending))
    for level in (2, 1, 0):
        for _ in range(3):
            into = before + skips.pop()[1]
            add(level, into)
            before = levels[level][1]
    return blocks


SHAPES: dict[str, Callable[[float], list[tuple[BlockChoice, ...]]]] = {
    "flux-like": flux_like,
    "unet-like": unet_like,
}


def make_step(shape: str, ratios: Sequence[float], bandwidth: float) -> list[BlockTimes]:
    """The blocks of one step for a batch of masks."""
    members = [SHAPES[shape](ratio) for ratio in ratios]
    blocks = []
    for number, menus in enumerate(zip(*members, strict=True)):
        over = tuple(tuple(choice.over(bandwidth) for choice in menu) for menu in menus)
        blocks.append(BlockTimes(over, DEVICE.fixed_seconds, begins_step=number == 0))
    return blocks


def buffer_of(blocks: Sequence[BlockTimes]) -> float:
    return DEVICE.buffer_bytes * len(blocks[0].members)
