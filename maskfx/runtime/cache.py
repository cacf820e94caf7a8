"""StepCache: what one recorded step keeps of one call.

Per batch element and image site: rows that a window or an attention will read, statistics per
group where only sums are needed, and the output. Everything stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maskfx.program import Tap


@dataclass(frozen=True)
class SiteStats:
    """Group statistics per site, around the group's own mean so that they add up exactly.

    offset, spread: (batch, sites, groups); centre, total_offset, total_spread: (batch, groups).
    `offset` is the site's mean less the centre; `spread` its summed squared deviation from it.
    """

    values: Tensor  # (batch, sites, 2 * groups): offset | spread
    centre: Tensor  # (batch, groups)
    total: Tensor  # (batch, 2 * groups), float64
    size: int

    def nbytes(self) -> int:
        return self.values.nbytes + self.centre.nbytes + self.total.nbytes


@dataclass
class StepCache:
    """One recorded step of one call; opaque to users but for `nbytes` and `bytes_by_kind`."""

    program: str
    sizes: dict[str, int]
    dtype: torch.dtype
    output: list[Any]
    step: dict[str, Tensor]
    rows: dict[str, Tensor] = field(default_factory=dict)
    stats: dict[str, SiteStats] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.sizes["batch"]

    def nbytes(self) -> int:
        """Bytes that this cache holds."""
        held = {t.data_ptr(): t.nbytes for t in self.rows.values()}
        rest = sum(s.nbytes() for s in self.stats.values()) + sum(t.nbytes for t in self.sums.values())
        return sum(held.values()) + rest + sum(t.nbytes for t in self.output if isinstance(t, Tensor))

    def total_of(self, tap: str) -> Tensor:
        """(batch, features), float64: the sum of a tap's rows, computed at its first use."""
        if tap not in self.sums:
            self.sums[tap] = self.rows[tap].flatten(2).double().sum(1)
        return self.sums[tap]


def site_stats(rows: Tensor, groups: int) -> SiteStats:
    """Statistics of (batch, sites, channels) rows."""
    batch, sites, channels = rows.shape
    size = channels // groups
    wide = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    grouped = wide.view(batch, sites, groups, size)
    centre = grouped.mean((1, 3))
    centred = grouped - centre.view(batch, 1, groups, 1)
    values = torch.cat([centred.mean(3), centred.square().sum(3)], 2)
    return SiteStats(values, centre, values.double().sum(1), size)


def keep_rows(
    cache: StepCache, taps: Iterable[Tap], emitted: Iterable[Tensor], parts: Iterable[list[Tensor]]
) -> None:
    """Fill a cache from emitted rows; `parts` are each tap's (batch, sites, ...) image rows."""
    for tap, _, pieces in zip(taps, emitted, parts, strict=True):
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        if tap.stats:
            cache.stats[tap.name] = site_stats(rows, tap.stats)
        else:
            cache.rows[tap.name] = rows
