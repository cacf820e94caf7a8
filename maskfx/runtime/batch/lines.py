"""Tables of the lines of a picture or a video: rows of sites, for example, that attend in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from maskfx.ir.geometry.lanes import grid_level, of_each
from maskfx.ir.geometry.lines import (
    Index,
    Numbered,
    by_count,
    is_apart,
    line_count,
    line_table,
    lines_of,
    lines_of_each,
    places_of,
)
from maskfx.ir.programs.sources import Lines
from maskfx.runtime.sites.active import ActiveSites


def lines_table(source: Lines, owners: Sequence[ActiveSites]) -> Tensor:
    """Return a table of the lines of a batch; there is one owner for each batch element."""
    return torch.from_numpy(line_table(source.part, [numbered(source, s) for s in owners]))


def numbered(source: Lines, sites: ActiveSites) -> Numbered:
    """Return the line of each active site, or of each site of the rest, and how many lines are."""
    (segment,) = source.segments
    rest, each = source.part.startswith("rest_"), of_each(segment)
    if each is not None:  # each token has a row for each frame, one after the other
        return lines_of_each(each[0], 0 if rest else sites.count(each[1]))
    grid, count = grid_of(segment, sites), count_lines(source.segments, source.axis, sites)
    found = lines_of(source.axis, sites_of(source, sites), grid)
    if not is_apart(source.axis):
        return found, count
    # queries and keys may have other active sites, but lines have one number for both
    masked = sites.active(*sites.pyramid.base_segments(source.segments)).numpy()
    return by_count((lines_of(source.axis, masked, grid), count), found), count


def sites_of(source: Lines, sites: ActiveSites) -> Index:
    """Return the active sites whose lines a table is about, or those of the rest."""
    (segment,) = source.segments
    if not source.part.startswith("rest_"):
        return sites.active(segment).numpy()
    index = sites.rest(segment) if source.window is None else sites.window(source.window)[1]
    return index.numpy()


def places(source: Lines, sites: ActiveSites) -> list[Index]:
    """Return, for each line, the places of its rows in it, in their order."""
    lines, count = numbered(source, sites)
    (segment,) = source.segments
    found = places_of(source.axis, sites_of(source, sites), grid_of(segment, sites))
    order = lines.argsort(kind="stable")
    ends = np.bincount(lines, minlength=count).cumsum()
    return np.split(found[order], ends[:-1])


def count_lines(segments: Sequence[str], axis: str, sites: ActiveSites) -> int:
    """Return the number of lines of one batch element along an axis."""
    (segment,) = segments
    each = of_each(segment)
    if each is not None:
        return each[0]
    return line_count(axis, grid_of(segment, sites), sites.pyramid.frames)


def grid_of(segment: str, sites: ActiveSites) -> tuple[int, int]:
    level = grid_level(segment)
    assert level is not None, segment
    return sites.grid(level)
