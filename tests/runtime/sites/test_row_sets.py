"""Rows of many sets at once are those that each member's sites give one by one."""

import itertools

import pytest
import torch
from torch import Tensor

from maskfx.ir.geometry.pyramid import Level, Pyramid
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.row_sets import FoundRows, RowSets
from maskfx.runtime.sites.stretch_sites import StretchSites

REGIONS = (0, 1, 2, 3)
LEVELS = [Level(), Level(parent=0, divide=(2, 2))]
PYRAMID = Pyramid(1, base=(4, 6), levels=LEVELS, hints=[(4, 6), (2, 3)], segments={"image": 9})
BATCHES = (1, 2, 1, 1)


def mask(shape: tuple[int, ...], seed: int) -> Mask:
    return Mask(torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4)


def tokens(count: int, seed: int) -> ActiveSites:
    """The second and the third region have the same sites."""
    regions = {n: mask((count,), seed + n % 3) for n in (1, 2, 3)} | {3: mask((count,), seed + 2)}
    return ActiveSites(PYRAMID, {"batch": 1, "tokens": count}, mask((count,), seed), regions)


def grid(height: int, width: int, seed: int) -> ActiveSites:
    shape = height, width
    regions = {n: mask(shape, seed + n) for n in (1, 2, 3)}
    return ActiveSites(PYRAMID, {"batch": 1, "y": height, "x": width}, mask(shape, seed), regions)


def members(base: str) -> list[ActiveSites]:
    if base == "image":
        whole = ActiveSites(PYRAMID, {"batch": 1, "tokens": 5}, None)
        return [tokens(9, 0), tokens(7, 10), whole, tokens(9, 30)]
    whole = ActiveSites(PYRAMID, {"batch": 1, "y": 2, "x": 4}, None)
    return [grid(4, 6, 0), grid(6, 4, 10), whole, grid(4, 6, 30)]


def level_of(base: str) -> int | None:
    return None if base == "image" else int(base[4:])


def one_by_one(found: FoundRows, key: object, wanted: list[Tensor], totals: list[int]) -> None:
    """Check a set against the sites of each batch element."""
    number = found.number[key]  # type: ignore[index]
    start = int(found.counts[:number].sum())
    rows = found.rows[start : start + int(found.counts[number].sum())]
    assert found.counts[number].tolist() == [len(own) for own in wanted]
    bases = [0, *itertools.accumulate(totals)]
    expected = torch.cat([own + base for own, base in zip(wanted, bases, strict=False)])
    assert rows.tolist() == expected.tolist()


@pytest.mark.parametrize("base", ["image", "grid0", "grid1"])
def test_rows_are_those_of_each_batch_element(base: str) -> None:
    each = members(base)
    own = [sites for sites, batch in zip(each, BATCHES, strict=True) for _ in range(batch)]
    totals = [sites.count(base) for sites in own]
    sets, level = RowSets(each, BATCHES), level_of(base)
    assert sets.totals(base).tolist() == totals
    active, rest = sets.active(base, REGIONS), sets.rest(base, REGIONS)
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    missing = sets.missing(base, pairs)

    def at(sites: ActiveSites, region: int) -> Mask:
        return sites.mask_at((level, sites.firsts([region])[0]))

    for region in REGIONS:
        one_by_one(active, region, [at(sites, region).active for sites in own], totals)
        one_by_one(rest, region, [at(sites, region).rest for sites in own], totals)
    for old, new in pairs:
        lacking = [at(s, new).sites & ~at(s, old).sites for s in own]
        found = [sites.reshape(-1).nonzero()[:, 0] for sites in lacking]
        one_by_one(missing, (old, new), found, totals)


def test_equal_sets_are_found_once() -> None:
    alike = [tokens(9, seed) for seed in (0, 10)]
    sets = RowSets(alike, (1, 1))
    assert len(sets.active("image", (2, 3)).counts) == 1
    assert len(sets.missing("image", [(2, 3), (3, 2)]).rows) == 0
    assert len(sets.active("image", (1, 2, 3)).counts) == 2
    found = sets.rest("image", (2, 3))  # with the sets that are known already
    assert found.number[2] == found.number[3]
    rest = [len(s.mask_at((None, 2)).rest) for s in alike]
    assert found.counts[found.number[2]].tolist() == rest


def test_padding_is_active_with_all_sites_of_the_image() -> None:
    whole = ActiveSites(PYRAMID, {"batch": 1, "tokens": 5}, None)
    sets = RowSets([tokens(9, 0), whole], (1, 1))
    assert sets.active("pad12_image", (0,)).rows.tolist() == list(range(3, 10))
    assert sets.rest("pad12_image", (0,)).rows.tolist() == [0, 1, 2]


def test_sites_are_known_after_the_last_choice() -> None:
    chosen = StretchSites(PYRAMID, {"batch": 1, "tokens": 9}, mask((9,), 0))
    sets = RowSets([tokens(9, 0), chosen], (1, 1))
    chosen.choose(1, mask((9,), 1))
    assert not sets.are_known
    first = sets.active("image", (1,))
    with pytest.raises(AssertionError, match="before their choice"):
        sets.active("image", REGIONS)
    for region in (2, 3, 0):
        chosen.choose(region, mask((9,), 2))
    assert sets.are_known
    found = sets.active("image", REGIONS)
    start = int(found.counts[: found.number[1]].sum())
    assert found.rows[start : start + len(first.rows)].tolist() == first.rows.tolist()
