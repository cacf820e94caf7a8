"""Tables of the lines of a picture or a video: rows of sites, for example, that attend in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ir.lanes import grid_level, of_each
from maskfx.ir.sources import Lines
from maskfx.runtime.sites.active import ActiveSites

Index = NDArray[np.int64]


def line_table(source: Lines, owners: Sequence[ActiveSites]) -> Tensor:
    """Return a table of the lines of a batch; there is one owner for each batch element."""
    part = source.part.removeprefix("rest_")
    rest = part != source.part
    lines = [line_numbers(source, sites, rest) for sites in owners]
    if part == "spans":
        counts = [np.bincount(own, minlength=number) for own, number in lines]
        stops = np.cumsum(np.concatenate(counts))
        return torch.from_numpy(np.stack([stops - np.concatenate(counts), stops], 1))
    if part == "owner":
        firsts = np.cumsum([0, *(number for _, number in lines)])
        return torch.from_numpy(
            np.concatenate([own + first for (own, _), first in zip(lines, firsts, strict=False)])
        )
    ends = np.cumsum([len(own) for own, _ in lines])
    order = np.concatenate(
        [
            own.argsort(kind="stable") + end - len(own)
            for (own, _), end in zip(lines, ends, strict=True)
        ]
    )
    if part == "back":
        order = order.argsort()
    return torch.from_numpy(order)


def line_numbers(source: Lines, sites: ActiveSites, rest: bool) -> tuple[Index, int]:
    """Return the line of each active site, or of each site of the rest, and how many lines are."""
    (segment,) = source.segments
    each = of_each(segment)
    if each is not None:  # each token has a row for each frame, one after the other
        frames, inner = each
        count = 0 if rest else frames * sites.count(inner)
        return np.arange(count) % frames, frames
    level = grid_level(segment)
    assert level is not None
    height, width = sites.grid(level)
    pick: Callable[[str], Tensor] = sites.rest if rest else sites.active
    frame, place = np.divmod(pick(segment).numpy(), height * width)
    y, x = np.divmod(place, width)
    lines = {"x": frame * height + y, "y": frame * width + x, "frames": place, "picture": frame}
    return lines[source.axis], line_count(source.axis, level, sites)


def line_count(axis: str, level: int, sites: ActiveSites) -> int:
    """Return the number of lines of one batch element along an axis."""
    (height, width), frames = sites.grid(level), sites.pyramid.frames
    across = {"x": height, "y": width, "frames": height * width, "picture": 1}
    return across[axis] if axis == "frames" else frames * across[axis]
