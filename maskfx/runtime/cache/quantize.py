"""Quantizes rows of a recorded step, and restores any of their sites to full precision.

8-bit rows are steps of float32 scales: one scale per row or, since an outlier coarsens all values
that share its scale, several for a long row. 4-bit rows are steps of float16 scales, two values to
a byte. Owns the formats and their rounding; knows nothing of programs, files and tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod

import torch
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.ops import wide
from maskfx.ops.unpack import in_pieces, widen

WORTH_SCALE = 16  # sites with fewer values are smaller in 16 bits than with a scale each


class Format(Enum):
    """The storage format of a tensor's values."""

    KEEP = "keep"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # 8-bit steps of a float32 scale
    INT4 = "int4"  # 4-bit steps of a float16 scale


@dataclass(frozen=True)
class Steps:
    """The quantization of a format: values become integer steps of a scale."""

    most: int  # the largest step in both directions
    over: int  # the most values that share a scale, where they divide evenly
    scale: torch.dtype


STEPS = {
    Format.INT8: Steps(127, 128, torch.float32),
    Format.INT4: Steps(7, 64, torch.float16),
}
STORED = {
    Format.FP16: torch.float16,
    Format.BF16: torch.bfloat16,
    Format.INT8: torch.int8,
    Format.INT4: torch.uint8,
}
OTHER = {Format.FP16: Format.BF16, Format.BF16: Format.FP16}


@dataclass(frozen=True)
class Encoding:
    """The format of each kind of tensor.

    Args:
        rows: The format of rows.
        output: The format of outputs.
        taps: The formats of taps whose rows differ from `rows`.
        stats: The format of statistics per site and group: an edit reads their sums over many
            sites, in which rounding errors mostly cancel. Sums over all sites are never rounded.
    """

    rows: Format = Format.KEEP
    output: Format = Format.KEEP
    taps: Mapping[str, Format] = field(default_factory=dict)
    stats: Format = Format.KEEP

    def of(self, tap: str) -> Format:
        return self.taps.get(tap, self.rows)

    @property
    def lossless(self) -> bool:
        return {self.rows, self.output, self.stats, *self.taps.values()} == {Format.KEEP}


LOSSLESS = Encoding()


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of one tap in a smaller format: (batch, sites, ...) in full precision."""

    stored: Tensor  # (batch, sites, features), or half the features if two share a byte
    scale: Tensor | None  # (batch, sites, parts of a row), if the format has scales
    format: Format
    dtype: torch.dtype  # in full precision
    shape: tuple[int, ...]  # of one site's features

    def __post_init__(self) -> None:
        known = self.stored.dim() == 3 and self.stored.dtype == STORED.get(self.format)
        if not known or self._features != prod(self.shape) or not self._has_its_scales():
            scales = None if self.scale is None else tuple(self.scale.shape)
            raise CacheError(
                f"rows of {tuple(self.stored.shape)} in {self.stored.dtype} with scales of "
                f"{scales} are no {self.format.value} rows of {self.shape}; record the step again"
            )

    @property
    def _features(self) -> int:
        return self.stored.shape[2] * (2 if self.format is Format.INT4 else 1)

    def _has_its_scales(self) -> bool:
        steps = STEPS.get(self.format)
        if self.scale is None or steps is None:
            return self.scale is None and steps is None
        parts = self.scale.shape[2] if self.scale.dim() == 3 else 0
        return (
            self.scale.dtype == steps.scale
            and self.scale.shape[:2] == self.stored.shape[:2]
            and parts > 0
            and self._features % parts == 0
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the stored values, and the scales if there are any."""
        return (self.stored,) if self.scale is None else (self.stored, self.scale)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """Return the rows with each tensor changed, e.g. moved."""
        scale = None if self.scale is None else change(self.scale)
        return replace(self, stored=change(self.stored), scale=scale)

    def whole(self) -> Tensor:
        """Return all rows, (batch, sites, ...), in full precision."""
        stored, scale = self.stored, self.scale
        rows = stored.to(self.dtype) if scale is None else widen(stored, scale, self.dtype)
        return rows.reshape(*stored.shape[:2], *self.shape)


def select(value: Tensor, index: Tensor) -> Tensor:
    """Return these sites of a tensor, (batch, picked, ...)."""
    if value.shape[0] == 1:  # rows are contiguous: each is copied whole, without strides
        return value[0].index_select(0, index).unsqueeze(0)
    return value.index_select(1, index)


# Conversion to a format, and back.


def pack(value: Tensor, wanted: Format) -> Tensor | Packed:
    """Convert rows (batch, sites, ...) to a format.

    Return them unchanged if they aren't floating point, are as small already, or don't fit into
    the format.
    """
    if wanted is Format.KEEP or not value.is_floating_point():
        return value
    if value.dim() < 2 or not value.numel():
        return value
    rows = value.detach().reshape(*value.shape[:2], -1).contiguous()
    found = _shrink(rows, wanted)
    return Packed(*found, value.dtype, tuple(value.shape[2:])) if found else value


def _shrink(rows: Tensor, wanted: Format) -> tuple[Tensor, Tensor | None, Format] | None:
    """Return stored values, scales, and the format used, or None if rows stay unchanged."""
    if wanted is Format.INT4 and rows.shape[2] % 2:
        wanted = Format.INT8
    if wanted in STEPS and rows.shape[2] < WORTH_SCALE:
        wanted = Format.FP16
    if wanted in STEPS and rows.element_size() > 1:
        return _divided(rows, wanted)
    if wanted in OTHER and rows.element_size() > 2:
        for format in (wanted, OTHER[wanted]):
            stored = rows.to(STORED[format])
            if torch.equal(stored.isfinite(), rows.isfinite()):
                return stored, None, format
    return None


def _divided(rows: Tensor, format: Format) -> tuple[Tensor, Tensor, Format] | None:
    """Quantize rows to steps of their scales."""
    steps = STEPS[format]
    part = _values_of_a_scale(rows.shape[2], steps.over)
    parts = rows.shape[2] // part
    scale = torch.empty(*rows.shape[:2], parts, dtype=steps.scale, device=rows.device)
    stored = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    flat = rows.view(-1, part), scale.view(-1, 1), stored.view(-1, part)
    for values, its_scale, its_steps in in_pieces(*flat):
        exact = values.to(wide(rows.dtype))
        its_scale.copy_(exact.abs().amax(-1, keepdim=True) / steps.most)
        its_scale.masked_fill_(its_scale == 0, 1)
        its_steps.copy_((exact / its_scale).round_().clamp_(-steps.most, steps.most))
    if not scale.isfinite().all():  # inf, nan and a huge scale can't be represented
        return _divided(rows, Format.INT8) if format is Format.INT4 else None
    return _two_in_one(stored) if format is Format.INT4 else stored, scale, format


def _two_in_one(steps: Tensor) -> Tensor:
    """Pack 4-bit steps, two neighbours to a byte."""
    above = (steps + 8).to(torch.uint8)
    return above[..., ::2] | above[..., 1::2] << 4


def _values_of_a_scale(features: int, over: int) -> int:
    """Return the largest divisor of a site's features up to `over`, or all features if small."""
    part = max(n for n in range(1, min(features, over) + 1) if features % n == 0)
    return part if 2 * part >= over else features
