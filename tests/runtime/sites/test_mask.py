"""Mask: a value with its own identity, and the coarser levels that it keeps."""

import gc
import weakref

import torch
from torch.nn import functional as F

from maskfx.ir.geometry.pyramid import Level
from maskfx.runtime.sites.mask import Mask, MaskCache
from tests.factories import masks

HALF = Level(parent=0, divide=(2, 2))


def test_masks_of_the_same_sites_are_equal() -> None:
    sites = masks.square((6, 8), 0)
    one, same = Mask(sites), Mask(sites.clone())
    assert one == same
    assert hash(one) == hash(same)
    other = sites.clone()
    other[0, 0] ^= True
    assert one != Mask(other)
    assert one != Mask(sites.view(8, 6)), "the shape counts"
    assert one != Mask(sites.flatten())


def test_a_mask_does_not_follow_its_tensor() -> None:
    sites = masks.one_site((6, 8), 0)
    mask = Mask(sites)
    sites.fill_(True)
    assert mask.count == 1
    assert not mask.is_full


def test_active_sites_and_the_rest() -> None:
    mask = Mask(torch.tensor([False, True, True, False]))
    assert mask.active.tolist() == [1, 2]
    assert mask.rest.tolist() == [0, 3]
    assert mask.everywhere.is_full
    assert mask.everywhere.covers(mask)
    assert not mask.covers(mask.everywhere)
    assert (mask | Mask(torch.tensor([True, False, False, False]))).active.tolist() == [0, 1, 2]
    assert Mask(torch.zeros(3, dtype=torch.bool)).is_empty


def test_a_level_is_kept_and_pools_the_mask() -> None:
    mask = Mask(masks.stroke((6, 8), 1))
    small = mask.at(HALF, (3, 4))
    assert torch.equal(small.sites, F.max_pool2d(mask.sites[None].float(), 2)[0] > 0)
    assert mask.at(HALF, (3, 4)) is small
    assert mask.at(HALF, (3, 5)) is not small
    assert mask.at(HALF, (3, 5)).shape == (3, 5)


def test_the_mask_of_a_tensor_is_kept_until_the_tensor_changes() -> None:
    cache, sites = MaskCache(), masks.square((6, 8), 0)
    mask = cache.of(sites)
    assert cache.of(sites) is mask
    assert cache.of(sites.clone()) is not mask
    sites[0, 0] ^= True
    assert cache.of(sites) != mask


def test_the_mask_of_a_tensor_goes_with_the_tensor() -> None:
    cache, sites = MaskCache(), masks.square((6, 8), 0)
    mask = weakref.ref(cache.of(sites))
    del sites
    gc.collect()
    assert mask() is None


def test_changes_of_tensors_without_a_version_are_seen() -> None:
    cache = MaskCache()
    with torch.inference_mode():
        sites = torch.zeros(4, dtype=torch.bool)
        assert cache.of(sites).is_empty
        sites[1] = True
        assert cache.of(sites).count == 1
