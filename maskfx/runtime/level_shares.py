"""Counts which share of a denoiser's FLOPs is computed at each level of its pyramid."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from maskfx import ops
from maskfx.ir.geometry.lanes import grid_level
from maskfx.ir.geometry.level_shares import LevelShare
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.flops import capture_sizes, count_rows, square_sites
from maskfx.runtime.sites.active import ActiveSites

ByLevel = defaultdict[int, float]


def level_shares(program: Program, height: int, width: int) -> tuple[LevelShare, ...]:
    """Return the levels and their shares, for pictures of about this many sites.

    Empty where all sites are on one level, such as tokens without rows and columns.
    """
    pyramid = program.interface.pyramid
    if pyramid.base is None:
        return ()
    sizes = {**capture_sizes(pyramid), "y": height, "x": width}
    sites = square_sites(pyramid, sizes, 1.0)
    plain, attention = flops_by_level(program, sites)
    whole = height * width
    every, pairs = sum(plain.values()), sum(attention.values())
    if not every:
        return ()
    numbers, shares = own_levels(pyramid)
    found = []
    for level, share in zip(numbers, shares, strict=True):
        count = sites.count(f"grid{level}")
        per_site = plain[level] / every * whole / count
        per_pair = attention[level] / pairs * whole**2 / count**2 if pairs else 0.0
        found.append(replace(share, per_site=per_site, per_pair=per_pair))
    return tuple(found)


def flops_by_level(program: Program, sites: ActiveSites) -> tuple[ByLevel, ByLevel]:
    """Return the FLOPs of products with weights, and of attention, by the level of their rows.

    Those of rows that aren't the picture's, such as the text's, are the same for every mask.
    """
    pyramid = program.interface.pyramid
    plain, attention = defaultdict[int, float](float), defaultdict[int, float](float)
    for node, (rows, flops) in count_rows(program, sites, 1).by_node.items():
        whole = sum(map(sites.count, rows)) or 1
        for segment in rows:
            level = grid_level(segment)
            if level is not None:
                kind = attention if node.target in (ops.attend, ops.site_pair_sum) else plain
                kind[without_region(pyramid, level)] += flops * sites.count(segment) / whole
    return plain, attention


def own_levels(pyramid: Pyramid) -> tuple[list[int], list[LevelShare]]:
    """Return the levels that aren't another one's sites in a region: their numbers, and them."""
    numbers = [n for n, level in enumerate(pyramid.levels) if not level.region]
    shares = []
    for number in numbers:
        own = pyramid.levels[number]
        above = own.parent
        parent = None if above is None else numbers.index(without_region(pyramid, above))
        names = [*("grow", "divide", "extra", "times", "offset"), *("roll", "fill")]
        names += ["roll_part", "fill_front", "turn"]
        shares.append(LevelShare(parent, **{name: getattr(own, name) for name in names}))
    return numbers, shares


def without_region(pyramid: Pyramid, level: int) -> int:
    own = pyramid.levels[level]
    return own.parent if own.region and own.parent is not None else level
