"""Replaces the rows of a rolling cache at unmasked sites by those of a template's next step."""

from __future__ import annotations

from torch import Tensor

from maskfx.errors import CacheError
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache, group_of
from maskfx.runtime.cache.rows import whole
from maskfx.runtime.cache.step_cache import SiteStats, StepCache
from maskfx.runtime.hardware.devices import moved
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask


def replace_rest(cache: RollingCache, recording: StepCache, mask: Mask) -> None:
    """Replace rows, statistics and sums of the sites outside of a mask.

    Args:
        cache: The cache of a request.
        recording: Another step of the template that the cache was started with.
        mask: The sites that keep their values.
    """
    lacking = not cache.rows.keys() <= recording.rows.keys()
    if lacking or not cache.stats.keys() <= recording.stats.keys() or recording.masks is not None:
        raise CacheError(
            "RollingCache: the recording lacks rows that this request reads; record a template "
            "without Masks and without a budget"
        )
    with cache.block.lock:
        _replace(cache, recording, mask)


def _replace(cache: RollingCache, recording: StepCache, mask: Mask) -> None:
    interface = cache.block.interface
    sites = ActiveSites(interface.pyramid, cache.sizes, mask)
    for tap, kept in cache.rows.items():
        assert isinstance(kept, Tensor), "a rolling cache holds plain rows"
        rest = rest_of(sites, group_of(interface, interface.taps[tap].segments))
        if len(rest):
            copy_sites(kept, whole(recording.rows[tap]), rest)
    for key, stats in cache.stats.items():
        rest = rest_of(sites, group_of(interface, key[0]))
        if len(rest):
            copy_statistics(stats, recording.stats[key], rest, key[1])
    cache.sums.clear()


def rest_of(sites: ActiveSites, segments: tuple[str, ...]) -> Tensor:
    return sites.laid_out(segments, sites.rest)


def copy_sites(kept: Tensor, source: Tensor, rest: Tensor) -> None:
    rows = source.index_select(1, moved(rest, source.device))
    kept.index_copy_(1, moved(rest, kept.device), rows.to(kept.device, kept.dtype))


def copy_statistics(kept: SiteStats, source: SiteStats, rest: Tensor, groups: int) -> None:
    """Copy the statistics of some sites, which are taken around other centres there."""
    values = kept.values
    assert isinstance(values, Tensor), "a rolling cache holds plain statistics"
    rows = whole(source.values)
    rows = rows.index_select(1, moved(rest, rows.device)).to(values.device).double()
    shift = (source.centre.to(values.device).double() - kept.centre.double()).flatten(1)[:, None]
    offset, square = rows.split(rows.shape[2] // 2, 2)
    channels = kept.size.double().expand(-1, groups).reshape(-1)
    square = square + channels * (2 * shift * offset + shift.square())
    found = rows.new_empty(rows.shape)
    found[..., : offset.shape[2]] = offset + shift
    found[..., offset.shape[2] :] = square
    values.index_copy_(1, moved(rest, values.device), found.to(values.dtype))
    kept.total.copy_(values.sum(1, dtype=kept.total.dtype))
