"""Sites that are chosen region by region are those of a request with all regions given."""

from __future__ import annotations

import pytest
import torch

from maskfx.ir.geometry.lanes import grid_segment
from maskfx.ir.geometry.pyramid import Level, Pyramid, Window
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.stretch_sites import StretchSites

SIZES = {"batch": 1, "y": 8, "x": 12}


def pyramid() -> Pyramid:
    found = Pyramid(batch=2, base=(8, 12))
    found.derive(Level(parent=0, divide=(2, 2)))
    for region in (1, 2, 3):
        for level in (0, 1):
            found.level_in(region, level)
    return found


def test_tables_are_those_of_regions_that_are_known_before() -> None:
    levels, draw = pyramid(), torch.Generator().manual_seed(0)
    masks = [Mask(torch.rand(8, 12, generator=draw) < share) for share in (0.3, 0.6)]
    chosen = dict(zip((1, 2, 3), (*masks, masks[0]), strict=True))
    known = ActiveSites(levels, SIZES, masks[0], chosen)
    sites = StretchSites(levels, SIZES, Mask(torch.ones(8, 12, dtype=torch.bool)))
    before = None
    for region in (1, 2, 3, 0):
        sites.choose(region, chosen.get(region, masks[0]))
        for level in (0, 1):
            own = levels.level_in(region, level) if region else level
            segment = grid_segment(own)
            assert torch.equal(sites.active(segment), known.active(segment))
            assert torch.equal(sites.rest(segment), known.rest(segment))
            window = Window(own, own, (3, 3), (1, 1), (1, 1))
            pairs = zip(sites.window(window), known.window(window), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
            if level == 0 and before is not None:
                entered = zip(
                    sites.enter(before, segment), known.enter(before, segment), strict=True
                )
                assert all(torch.equal(one, other) for one, other in entered)
            before = segment if level == 0 else before
    assert sites.place(grid_segment(levels.level_in(3, 0))) == (0, 1)  # as the first region


def test_sites_are_chosen_once_and_read_only_then() -> None:
    levels = pyramid()
    whole = Mask(torch.ones(8, 12, dtype=torch.bool))
    sites = StretchSites(levels, SIZES, whole)
    assert not sites.full
    assert sites.counts == tuple(SIZES.values())
    with pytest.raises(AssertionError, match="region 1 are read before"):
        sites.active(grid_segment(levels.level_in(1, 0)))
    sites.choose(1, whole)
    assert sites.active_count(grid_segment(levels.level_in(1, 0))) == 96
    with pytest.raises(AssertionError, match="chosen before"):
        sites.choose(1, whole)
